"""Learner ranks as Ray actors, on this machine or on the nodes of a Slurm allocation. Ray is imported here alone.

Ray places the ranks, one placement group a node, and knows why one died. An actor then does what every rank does: it
connects back to the controller with the run's token. The Ray cluster is the run's own: no other has its token, ports
and temporary folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from launcher import channel, rank
from launcher.arrivals import Awaited, learner
from launcher.placement import Placement, place, placement_of
from launcher.rank import Call
from launcher.ray_node import (
    OBJECT_STORE_BYTES,
    SETTINGS,
    NodeCall,
    await_head,
    environment,
    free_port,
    node_command,
    resource,
)
from launcher.scratch import scratch
from launcher.slurm import Job, ended, running_step, threads_per_rank
from launcher.workers import Failure
from rl_megatron.config import RunConfig
from rl_megatron.errors import WorkerDied
from rl_megatron.interfaces import Roles

os.environ.update(SETTINGS)  # Ray reads them when it is imported

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

logger = logging.getLogger(__name__)
logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that it leaves SIGTERM alone, which is meant

P = ParamSpec("P")
T = TypeVar("T")

_CAUSE_SECONDS = 20.0


class RankActor:
    """Where a rank runs."""

    def serve(self, call: Call, number: int, log: str) -> None:
        """Be rank ``number``; what it prints goes to the file ``log``."""
        with Path(log).open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        rank.serve(call, number)
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]


class RayLauncher:
    """Starts the workers of a run as actors. See interfaces.Launcher. ``job``: the allocation; None: this machine."""

    def __init__(self, model_folder: Path, run_folder: Path, job: Job | None, on_signal: Callable[[str], None]) -> None:
        self._model_folder, self._run_folder, self._job, self._on_signal = model_folder, run_folder, job, on_signal

    @contextlib.asynccontextmanager
    async def start(self, config: RunConfig) -> AsyncIterator[Roles]:
        """See interfaces.Launcher. Raises ConfigError where the allocation has not the tasks that the learner needs."""
        job, dims, limit = self._job, config.learner.dims, config.learner.timeout_seconds
        if job is None:
            placement, host = place(dims, (rank.node(),), dims.world_size), "127.0.0.1"
            folder = self._run_folder.resolve() / "ray"
        else:
            placement, host = placement_of(config, job.nodes), job.address()
            folder = job.folder
        folder.mkdir(exist_ok=True)
        logger.info("Ray %s: %s", ray.__version__, placement.describe())
        token, failure = secrets.token_bytes(channel.TOKEN_BYTES), Failure()
        with channel.listen(host, backlog=dims.world_size) as listener:
            threads = config.learner.threads or threads_per_rank(placement)
            call = Call(host=host, port=listener.getsockname()[1], token=token.hex(), threads=threads)
            async with _cluster(config, placement, job) as own:
                ends = await _in_thread(own, _start_actors, placement, call, folder)
                awaited = Awaited(
                    placement=placement,
                    token=token,
                    started=_first_end(ends),
                    seconds=limit,
                    files=f"rank-*.txt in {folder}",
                    blame=job.blame if job else lambda _: None,
                )
                try:
                    async with learner(
                        listener,
                        awaited,
                        failure,
                        config,
                        model_folder=self._model_folder,
                        run_folder=self._run_folder,
                        on_signal=self._on_signal,
                    ) as roles:
                        yield roles
                except WorkerDied as error:
                    if failure.rank is None:
                        raise
                    cause = await asyncio.to_thread(_cause, ends[failure.rank])
                    raise WorkerDied(f"{error}{cause}") from error


@contextlib.asynccontextmanager
async def _cluster(config: RunConfig, placement: Placement, job: Job | None) -> AsyncIterator[ThreadPoolExecutor]:
    """A Ray cluster of the run's own; what this process asks of it, it asks in the thread of the yielded executor.

    Ray's processes end with the thread that made them, and in a main thread Ray takes SIGTERM's handler.
    """
    token, limit = secrets.token_hex(32), config.learner.timeout_seconds
    async with contextlib.AsyncExitStack() as stack:
        own = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="ray"))
        if job is None:
            folder = stack.enter_context(scratch(within=Path("/tmp")))  # a short path: sockets lie in it
            stack.push_async_callback(_in_thread, own, ray.shutdown)
            await _in_thread(own, _start_here, placement, token, str(folder))
        else:
            call = NodeCall(
                head=job.here,
                host=job.address(),
                port=free_port(job.address()),
                token=token,
                folder=f"/tmp/rlm-{job.id}-{job.restart}",
                ranks=placement.ranks_per_node,
                seconds=limit,
            )
            command = node_command(
                config.slurm, placement, job.folder, python=sys.executable, where=job.learner_options()
            )
            step = await stack.enter_async_context(running_step(command, call.line(), job.folder))
            stack.push_async_callback(_in_thread, own, ray.shutdown)
            await _joined(own, call, job, step)
        yield own


async def _joined(own: ThreadPoolExecutor, call: NodeCall, job: Job, step: asyncio.subprocess.Process) -> None:
    """Be the driver of the cluster that a step makes. Raises WorkerDied where it ends before, or is late."""
    given_up = threading.Event()
    joining = asyncio.ensure_future(_in_thread(own, _join, call, job.nodes, given_up))
    over = asyncio.ensure_future(ended(step))
    try:
        await asyncio.wait({joining, over}, return_when=asyncio.FIRST_COMPLETED)
        if not joining.done():
            raise WorkerDied(f"{over.result()} before Ray was up; ray-*.txt in {job.folder} have what it said")
        await joining
    except (TimeoutError, ConnectionError, RayError) as error:
        raise WorkerDied(f"{error}; ray-*.txt in {job.folder} have what Ray said") from error
    finally:
        given_up.set()
        over.cancel()


def _join(call: NodeCall, nodes: Sequence[str], given_up: threading.Event) -> None:
    """Raises TimeoutError naming the nodes that Ray is not up on, ConnectionError or RayError where it refuses."""
    end = time.monotonic() + call.seconds
    await_head(call, given_up)
    while not ray.is_initialized():
        try:
            with _holding(call.token):
                ray.init(address=f"{call.host}:{call.port}", log_to_driver=False, configure_logging=False)
        except ConnectionError:  # the head listens before it serves, and Ray's own patience is short
            if given_up.wait(1.0) or time.monotonic() > end:
                raise
    while not given_up.is_set():
        there = ray.cluster_resources()  # type: ignore[no-untyped-call]
        missing = [node for node in nodes if resource(node) not in there]
        if not missing:
            return
        if time.monotonic() > end:
            raise TimeoutError(f"Ray is not up on {', '.join(missing)} after learner.timeout_seconds={call.seconds:g}")
        given_up.wait(0.2)


def _start_here(placement: Placement, token: str, folder: str) -> None:
    count = placement.ranks_per_node
    with _holding(token):
        ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=count,
            num_gpus=0,
            resources={resource(placement.nodes[0]): count},
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            configure_logging=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )


def _start_actors(placement: Placement, call: Call, folder: Path) -> list[Future[None]]:
    """An actor for each rank, in its node's placement group; when and how each ends."""
    actor: Any = ray.remote(RankActor)
    ends = []
    for i, node in enumerate(placement.nodes):
        bundles = [{"CPU": 1.0, resource(node): 1.0}] * placement.ranks_per_node
        group = placement_group(bundles, strategy="STRICT_PACK", name=f"learner {node}")
        for j in range(placement.ranks_per_node):
            number = i * placement.ranks_per_node + j
            here = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=j)
            made = actor.options(num_cpus=1, scheduling_strategy=here, name=f"rank {number}").remote()
            ends.append(made.serve.remote(call, number, str(folder / f"rank-{number}.txt")).future())
    return ends


async def _first_end(ends: Sequence[Future[None]]) -> str:
    """How the first actor ended, once one has."""
    waiting = [asyncio.wrap_future(end) for end in ends]
    for one in waiting:
        one.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio complains of it
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    number = next(i for i, one in enumerate(waiting) if one.done())
    return f"the actor of rank {number} ended{_cause(ends[number])}"


def _cause(end: Future[None]) -> str:
    """What Ray says of a death, to be put behind a sentence; nothing of an end by itself, or not known in time."""
    try:
        error = end.exception(_CAUSE_SECONDS)
    except FutureTimeout:
        return ""
    said = " ".join(line for line in str(error).splitlines() if not line.startswith("\t"))
    return "" if error is None or "INTENDED_USER_EXIT" in said else f"\nRay: {said}"


async def _in_thread(own: ThreadPoolExecutor, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await asyncio.get_running_loop().run_in_executor(own, functools.partial(function, *args, **kwargs))


@contextlib.contextmanager
def _holding(token: str) -> Iterator[None]:
    """Ray and the processes that it starts meanwhile find the cluster's token; what starts later does not."""
    os.environ.update(environment(token))
    try:
        yield
    finally:
        del os.environ["RAY_AUTH_TOKEN"]
