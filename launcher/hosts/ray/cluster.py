"""Starts the Ray cluster of one run, here or on the nodes of a Slurm allocation, and engine servers in it.

Ray places ranks (launcher.py) and engine servers, whose guards actors hold, with a placement group for each role and
node, and knows why one died. The cluster belongs to the run: no other has its token, ports and temporary folder. This
process is the driver. Import this file before ray, which reads its settings at import.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from typing_extensions import override

from launcher.controller.group import retrieve_exception
from launcher.hosts.ray.node import (
    COMPLETE,
    OBJECT_STORE_BYTES,
    ONE_MACHINE,
    SETTINGS,
    Bundle,
    NodeCall,
    engine_node_command,
    environment,
    health_command,
    node_command,
    shares,
    totals,
)
from launcher.hosts.sites import cpus_of_engine_node, visible_gpus
from launcher.hosts.slurm.allocation import Allocation
from launcher.hosts.slurm.launcher import ended, running_step
from launcher.processes import guards
from launcher.processes.guards import HERE, Guard, GuardSpec, free_port
from launcher.processes.own_thread import DedicatedThread
from launcher.processes.scratch import scratch
from launcher.wire import this_node
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError, EngineError, WorkerFailure
from rl_megatron.interfaces import Launcher, RunComponents, ignore_progress
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import RankPlacement, make_placement, place_ranks, ranks_by_role
from rl_megatron.placement.seats import ServerPlacement, describe_placements, local_server_placements, server_placements

os.environ.update(SETTINGS)  # Ray reads them at import
if "SLURM_JOB_ID" not in os.environ:
    os.environ.update(ONE_MACHINE)

import ray
from ray.exceptions import RayError
from ray.job_config import JobConfig
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from launcher.hosts.ray.actors import ServerActor

for _name in ("RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_RUNTIME_ENV_HOOK"):  # set by the cluster of a `ray job submit`
    os.environ.pop(_name, None)
logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that it does not handle SIGTERM, which is intended
logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_LOOK_SECONDS = 0.2
_MISMATCH = "Version mismatch"  # start of the RuntimeError of ray/_private/utils.py in Ray 2.60
_SHUTDOWN_SECONDS = 60.0
_ANSWER_SECONDS = 60.0  # limit of a call to the running cluster
_DEATHS = (ConnectionError, RuntimeError, RayError)  # Ray's errors if one of its processes is missing


class _Job(JobConfig):
    """A job whose actors do not have the driver's folder before our packages: `run_worker` puts the user's after."""

    @override
    def _runtime_env_has_working_dir(self) -> bool:
        return True  # otherwise Ray 2.60.0 puts the driver's script and current folder first (connect, worker.py)


@dataclass(slots=True, kw_only=True)
class Wait:
    """A wait for a cluster, in several threads."""

    what: str  # the thing that it waits for now, for messages
    given_up: threading.Event = field(default_factory=threading.Event)


async def await_health(call: NodeCall) -> None:
    """Waits until the head answers, which may be some time after it listens.

    Ray itself would wait a quarter of an hour for a silent head, and block this process all the while.
    """
    while True:
        asking = await asyncio.create_subprocess_exec(
            *health_command(call),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, **environment(call.token)},
        )
        try:
            if await asking.wait() == 0:
                return
        finally:
            if asking.returncode is None:
                asking.kill()
        await asyncio.sleep(_LOOK_SECONDS)


def join_cluster(call: NodeCall, wanted: set[str], wait: Wait) -> None:
    """Joins a running cluster once it has the ``wanted`` resources, or ends once the wait is given up.

    Ray raises RuntimeError, too, if the raylet of this node has not registered within a minute. Raises ConfigError if
    the cluster has other versions.
    """
    os.environ.update({"RAY_gcs_server_port_wait_time_s": "1"})  # Ray makes one attempt with a limit, not twenty
    while not ray.is_initialized():
        try:
            with _holding(call.token):
                ray.init(
                    address=f"{call.host}:{call.port}", job_config=_Job(), log_to_driver=False, configure_logging=False
                )
        except (ConnectionError, RuntimeError) as error:
            if str(error).startswith(_MISMATCH):
                raise ConfigError(
                    f"Ray rejected the controller, and a retry will not help: {' '.join(str(error).split())}; use the "
                    f"same environment on all nodes ({sys.executable} here), and do not change it while a job starts"
                ) from error
            wait.what = f"this node's raylet, of which Ray says: {error}"
            if wait.given_up.wait(_LOOK_SECONDS):
                raise
    while not wait.given_up.is_set():
        missing = sorted(wanted - ray.cluster_resources().keys())  # type: ignore[no-untyped-call]
        if not missing:
            return
        wait.what = f"nodes that have {', '.join(missing)}"
        wait.given_up.wait(_LOOK_SECONDS)


def start_here(has: Bundle, token: str, folder: str) -> None:
    """Starts a cluster of this machine that ``has`` these resources, and becomes its driver."""
    own = {name: amount for name, amount in has.items() if name != "CPU"}
    with _holding(token):
        ray.init(
            address="local",
            job_config=_Job(),
            include_dashboard=False,
            num_cpus=int(has["CPU"]),
            num_gpus=0,
            resources=own,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            configure_logging=False,
            _node_ip_address=HERE,
            _temp_dir=folder,
        )


def restore_sigterm_handler() -> None:
    """Makes this process's own handler of SIGTERM run again, which a driver's start replaces. The main thread calls it.

    Ray's (absl's failure_signal_handler.cc, installed for SIGTERM as for SIGSEGV) prints a stack, calls the one before,
    and has SIGALRM abort the process three seconds later.
    """
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    signal.siginterrupt(signal.SIGTERM, False)  # the value that asyncio sets


def describe_end(error: BaseException) -> str:
    """Returns Ray's account of an end, as the end of a sentence."""
    lines = " ".join(line for line in str(error).splitlines() if not line.startswith("\t"))
    return f"\nRay: {lines}"


@contextlib.contextmanager
def _holding(token: str) -> Iterator[None]:
    """Gives Ray, and the processes that it starts within, the cluster's token; later processes do not get it."""
    os.environ.update(environment(token))
    try:
        yield
    finally:
        del os.environ["RAY_AUTH_TOKEN"]


class RayCluster:
    """The Ray cluster of one run, on the nodes of ``allocation``; None: on this machine."""

    def __init__(self, config: RunConfig, allocation: Allocation | None, run_folder: Path) -> None:
        """Raises ConfigError if the allocation lacks tasks that the learner needs, or servers do not fit."""
        self.allocation = allocation
        roles = ranks_by_role(config)
        if allocation is None:
            self.placements = [
                place_ranks(config.role_learner(role).dims, (this_node(),), count, role=role)
                for role, count in roles.items()
            ]
            self.host = HERE
            gpus = len(visible_gpus()) if config.learner.device != "cpu" else 0
            self.seats: Sequence[ServerPlacement] = [
                replace(s, node=this_node()) for s in local_server_placements(config, gpus)
            ]
            self.folder = run_folder.resolve() / "ray"
        else:
            nodes = {LEARNER: allocation.nodes, **allocation.separate}
            self.placements = [make_placement(config, nodes[role], role) for role in roles]
            self.host = allocation.address()
            self.seats = server_placements(config, allocation.nodes, allocation.engine_nodes)
            self.folder = allocation.folder
        self.shares = shares(self.placements, self.seats, is_single=bool(allocation and allocation.engine_nodes))
        self._config = config
        self._own: DedicatedThread | None = None
        self._places: Sequence[PlacementGroupSchedulingStrategy] = ()  # places of servers

    @property
    def own(self) -> DedicatedThread:
        """The thread that makes all calls to the running cluster.

        Ray's processes end with the thread that made them, and in a main thread Ray replaces SIGTERM's handler.
        """
        assert self._own is not None
        return self._own

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the cluster while the context is open. Raises WorkerFailure if it does not start."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        seats = [describe_placements(self.seats)] if self.seats else []
        described = [*(placement.describe() for placement in self.placements), *seats]
        logger.info("Ray %s: %s", ray.__version__, "\n".join(described))
        async with contextlib.AsyncExitStack() as stack:
            self._own = DedicatedThread("ray")
            stack.callback(self._own.close)
            if self.allocation is None:
                folder = stack.enter_context(scratch(within=Path("/tmp")))  # a short path, because it holds sockets
                (has,) = totals(*self.shares.ranks.values(), self.shares.engines).values()
                driver = self.own(start_here, has, secrets.token_hex(32), str(folder))
                await self._come_up(stack, driver, [], Wait(what="its processes on this machine"))
            else:
                await self._start_on(self.allocation, stack)
            restore_sigterm_handler()
            bundles = self.shares.engines
            groups = await self.place(lambda: {node: make_group("engine", node, bundles[node]) for node in bundles})
            free = {node: count() for node in groups}
            self._places = [
                PlacementGroupSchedulingStrategy(groups[s.node], placement_group_bundle_index=next(free[s.node]))
                for s in self.seats
            ]
            yield

    async def _start_on(self, allocation: Allocation, stack: contextlib.AsyncExitStack) -> None:
        learner, engines = self.shares.ranks[LEARNER], self.shares.engines
        on_learner = totals(learner) if allocation.engine_nodes else totals(learner, engines)
        call = NodeCall(
            head=allocation.this_node,
            host=self.host,
            port=free_port(""),
            token=secrets.token_hex(32),
            folder=f"/tmp/rlm-{allocation.id}-{secrets.token_hex(6)}",  # node-local; its name cannot be guessed
            resources=on_learner,
            seconds=self._config.learner.timeout_seconds,
        )
        calls = [(self._node_command(allocation, self.placements[0]), call)]
        for other in self.placements[1:]:
            there = replace(call, head=None, resources=totals(self.shares.ranks[other.role]))
            calls.append((self._node_command(allocation, other), there))
        if allocation.engine_nodes and engines:
            there = replace(call, head=None, resources=totals(engines))
            cpus = cpus_of_engine_node(self._config, allocation, self.seats)
            calls.append((engine_node_command(allocation, cpus, python=sys.executable), there))
        steps = [
            await stack.enter_async_context(running_step(command, told.line(), allocation.folder))
            for command, told in calls
        ]
        wanted = {name for _, told in calls for has in told.resources.values() for name in has}
        wait = Wait(what=f"its head at {call.host}:{call.port}")
        try:
            await self._come_up(stack, self._join(call, wanted, wait), steps, wait)
        except WorkerFailure:
            await asyncio.to_thread(allocation.blame, sorted({n for _, told in calls for n in told.resources}))
            raise
        for step in steps:
            assert step.stdin is not None
            step.stdin.write(COMPLETE)

    def _node_command(self, allocation: Allocation, placement: RankPlacement) -> list[str]:
        slurm, python = self._config.slurm, sys.executable
        if placement.role == LEARNER:
            return node_command(slurm, placement, allocation.folder, python=python, where=allocation.learner_options())
        return allocation.separate_command(
            node_command(slurm, placement, allocation.folder, python=python), placement.role
        )

    async def _come_up(
        self,
        stack: contextlib.AsyncExitStack,
        driver: Awaitable[None],
        steps: Sequence[asyncio.subprocess.Process],
        wait: Wait,
    ) -> None:
        """Waits for ``driver``, with ``learner.timeout_seconds`` as the only limit. Raises WorkerFailure with the
        awaited event if a step of Ray ends first, after the limit, or if Ray's processes fail; else ``driver``'s."""
        limit, driving = self._config.learner.timeout_seconds, asyncio.ensure_future(driver)
        over = [asyncio.ensure_future(ended(step)) for step in steps]
        read = f"ray-*.txt in {self.folder} have Ray's output"
        stack.push_async_callback(self._shut)
        try:
            await asyncio.wait({driving, *over}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not driving.done():
                late = f"learner.timeout_seconds={limit:g} passed"
                why = next((one.result() for one in over if one.done()), late)
                raise WorkerFailure(f"{why} before Ray was up; it waited for {wait.what}; {read}")
            try:
                driving.result()
            except Exception as error:
                if type(error) is not Exception and not isinstance(error, _DEATHS):  # a bare one: its raylet is slow
                    raise
                logger.info("Ray did not start", exc_info=True)
                raise WorkerFailure(f"Ray did not start: {error}; {read}") from error
        finally:
            for one in (driving, *over):
                one.cancel()

    async def _join(self, call: NodeCall, wanted: set[str], wait: Wait) -> None:
        try:
            await await_health(call)
            await self.own(join_cluster, call, wanted, wait)
        finally:
            wait.given_up.set()

    async def _shut(self) -> None:
        """Leaves the cluster, unless Ray still waits for a head that has died."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SHUTDOWN_SECONDS):
                await self.own(ray.shutdown)

    async def ask(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Makes a call to the running cluster. Raises EngineError if Ray does not answer."""
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await self.own(function, *args, **kwargs)
        except TimeoutError as error:
            raise EngineError(self._silent(f"{_ANSWER_SECONDS:g} s")) from error

    async def place(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Makes a call of the start, for many ranks or servers. Raises WorkerFailure after
        ``learner.timeout_seconds``."""
        limit = self._config.learner.timeout_seconds
        try:
            async with asyncio.timeout(limit):
                return await self.own(function, *args, **kwargs)
        except TimeoutError as error:
            if self.allocation is not None:
                await asyncio.to_thread(self.allocation.blame, sorted({n for p in self.placements for n in p.nodes}))
            raise WorkerFailure(self._silent(f"learner.timeout_seconds={limit:g}")) from error

    def _silent(self, limit: str) -> str:
        return (
            f"Ray's head on {self.host} has not answered in {limit}: it is busy, stopped or lost; ray-*.txt in "
            f"{self.folder} have Ray's output"
        )

    async def start_guard(self, number: int, order: GuardSpec) -> Guard:
        """Starts a server's guard at seat ``number``. Raises EngineError after ``rollout.server.start_seconds``, and
        immediately if its node is gone."""
        node, nodes = self.seats[number].node, await self.ask(_living)
        if node not in nodes:
            raise EngineError(f"Ray has no node {node} now; it has {', '.join(sorted(nodes))}")
        actor = await self.ask(make_server_actor, self._places[number])
        limit = self._config.rollout.server.start_seconds
        try:
            async with asyncio.timeout(limit):
                await asyncio.wrap_future(actor.start.remote(order).future())
        except (TimeoutError, RayError) as error:
            await self.end(actor)
            why = f": {error}" if isinstance(error, RayError) else f" in rollout.server.start_seconds={limit:g}"
            raise EngineError(f"Ray did not start the server of {order.log.name} on {node}{why}") from error
        except BaseException:  # the caller has stopped waiting for it
            await asyncio.shield(self.end(actor))
            raise
        return ActorGuard(self.end, actor, order.log)

    async def end(self, actor: Any) -> None:
        """Ends an actor. Warns if Ray does not answer: the actor's process ends with the cluster's."""
        try:
            await self.ask(ray.kill, actor)
        except EngineError as error:
            logger.warning("an actor was not ended: %s", error)


@dataclass(frozen=True, slots=True, kw_only=True)
class InCluster(Launcher):
    """A launcher with all processes in one cluster."""

    cluster: RayCluster
    inner: Launcher

    @override
    @contextlib.asynccontextmanager
    async def start(
        self, config: RunConfig, tell: Callable[[str], None] = ignore_progress
    ) -> AsyncIterator[RunComponents]:
        async with self.cluster.running(), self.inner.start(config, tell) as roles:
            yield roles


def _living() -> set[str]:
    """Returns the nodes that the cluster has now."""
    labels = (label for node in ray.nodes() if node["Alive"] for label in node["Resources"])  # type: ignore[no-untyped-call]
    return {label.partition(" on ")[2] for label in labels if " on " in label}


def make_group(role: str, node: str, bundles: Sequence[Bundle]) -> Any:
    """Returns a placement group inside a node."""
    return placement_group([dict(bundle) for bundle in bundles], strategy="STRICT_PACK", name=f"{role} {node}")


class ActorGuard(Guard):
    """The guard that an actor holds."""

    def __init__(self, kill: Callable[[Any], Awaitable[None]], actor: Any, log: Path) -> None:
        self._kill, self._actor, self._log = kill, actor, log
        self._over: asyncio.Future[str] = asyncio.wrap_future(actor.wait.remote().future())
        self._over.add_done_callback(retrieve_exception)

    @override
    async def wait(self) -> str:
        """Returns also when its actor or its node is gone."""
        try:
            return await asyncio.shield(self._over)
        except RayError as error:
            return f"ended with its actor{describe_end(error)}"

    @override
    async def end(self) -> None:
        """Also ends the actor, which frees its place in the cluster."""
        try:
            async with asyncio.timeout(2 * guards.STOP_SECONDS):
                await asyncio.wrap_future(self._actor.end.remote().future())
        except TimeoutError:
            logger.warning("the actor of the server of %s did not end it; killed", self._log)
        except RayError:  # the actor is gone, and its guard's pipe closed
            pass
        await self._kill(self._actor)


def make_server_actor(here: PlacementGroupSchedulingStrategy) -> Any:
    """Makes the actor class, bound to its bundle, which it takes completely."""
    bundle = here.placement_group.bundle_specs[here.placement_group_bundle_index]
    actor: Any = ray.remote(ServerActor)
    return actor.options(num_cpus=1, num_gpus=bundle.get("GPU", 0), scheduling_strategy=here).remote()
