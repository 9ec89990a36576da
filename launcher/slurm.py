"""Ranks on the nodes of a Slurm allocation: one srun step, a task a rank, each of which connects back to here.

Everything that this file asks of Slurm is in the environment of the job. What it leaves for the job's script is in the
folder of this attempt: ``requeue``, to be started again from the checkpoint, and ``failed_node``, where a rank died.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from launcher import channel
from launcher.placement import Placement, place
from launcher.proxies import roles_of
from launcher.rank import Call, Hello
from launcher.worker import Setup
from launcher.workers import STOP_SECONDS, Ending, Failure, serving
from rl_megatron.config import RunConfig
from rl_megatron.config_slurm import SlurmSection
from rl_megatron.errors import ConfigError, WorkerDied
from rl_megatron.interfaces import Roles

logger = logging.getLogger(__name__)

_HELLO_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The allocation that this process runs in."""

    id: str
    restart: int
    here: str  # the node of this process
    nodes: tuple[str, ...]
    folder: Path  # of this attempt, in the run's folder

    @classmethod
    def this(cls, run_folder: Path) -> Job:
        """Out of the environment. Raises ConfigError outside a job."""
        job, restart = os.environ.get("SLURM_JOB_ID"), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        if job is None:
            raise ConfigError(
                "run.launcher=slurm, but this is no Slurm job; send one with rl-megatron submit, "
                "or set run.launcher=local"
            )
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]], capture_output=True, text=True
        )
        folder = run_folder / "jobs" / f"{job}-{restart}"
        folder.mkdir(parents=True, exist_ok=True)
        return cls(
            id=job,
            restart=restart,
            here=os.environ.get("SLURMD_NODENAME", socket.gethostname()),
            nodes=tuple(listed.stdout.split()),
            folder=folder,
        )

    def ask_requeue(self) -> None:
        """Tell the job's script that a checkpoint waits to be continued."""
        (self.folder / "requeue").touch()

    def blame(self, node: str) -> None:
        """Tell the job's script on which node a rank died."""
        (self.folder / "failed_node").write_text(f"{node}\n")

    def address(self) -> str:
        """This node's address as the other nodes reach it; loopback where there are none."""
        others = [node for node in self.nodes if node != self.here]
        if not others:
            return "127.0.0.1"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((others[0], 9))  # sends nothing: asks for the way
            return str(probe.getsockname()[0])


class ConnectedRank:
    """A rank that connected from its node (see RankProcess)."""

    def __init__(self, connection: Connection, hello: Hello) -> None:
        self.connection, self.rank, self.hello = connection, hello.rank, hello
        self.where = f"pid {hello.pid} on {hello.node}"
        self._stream = socket.socket(fileno=os.dup(connection.fileno()))
        self._gone = threading.Event()

    def ending(self, hung_up: threading.Event) -> Ending:
        """See RankProcess; that a stream ended is all that another node says."""
        hung_up.wait()
        self._gone.set()
        how = f"hung up: it was killed, crashed or lost its node; rank-{self.rank}.txt has what it said"
        return Ending(how=how, expected=True, killed=True)

    def kill(self) -> None:
        """See RankProcess; a rank ends within seconds of its stream."""
        with contextlib.suppress(OSError):  # it hung up first
            self._stream.shutdown(socket.SHUT_RDWR)

    def join(self, seconds: float) -> bool:
        """See RankProcess."""
        return self._gone.wait(seconds)


class SlurmLauncher:
    """Starts the workers of a run on its allocation. See interfaces.Launcher."""

    def __init__(self, model_folder: Path, run_folder: Path, job: Job, on_signal: Callable[[str], None]) -> None:
        self._model_folder, self._run_folder, self._job, self._on_signal = model_folder, run_folder, job, on_signal

    @contextlib.asynccontextmanager
    async def start(self, config: RunConfig) -> AsyncIterator[Roles]:
        """See interfaces.Launcher. Raises ConfigError where the allocation has not the tasks that the learner needs."""
        job, dims = self._job, config.learner.dims
        placement = place(dims, job.nodes, config.slurm.tasks_per_node(dims.world_size))
        logger.info("job %s, restart %d: %s", job.id, job.restart, placement.describe())
        failure, token = Failure(), secrets.token_bytes(channel.TOKEN_BYTES)
        with channel.listen(job.address(), backlog=dims.world_size) as listener:
            host, port = listener.getsockname()
            threads = config.learner.threads or threads_per_rank(placement)
            call = Call(host=host, port=port, token=token.hex(), threads=threads)
            command = step_command(config.slurm, placement, job.folder, python=sys.executable)
            async with _step(command, call, job.folder) as step:
                ranks = await _arrivals(listener, token, placement, step, job, config.learner.timeout_seconds)
                listener.close()  # nobody else is awaited
                setup = Setup(
                    config=config,
                    model_folder=self._model_folder.resolve(),
                    run_folder=self._run_folder.resolve(),
                    rendezvous=f"tcp://{ranks[0].hello.store}",
                )
                try:
                    async with serving(ranks, setup, failure, self._on_signal) as group:
                        yield roles_of(group, config)
                except WorkerDied:
                    if failure.rank is not None:
                        job.blame(placement.node_of(failure.rank))
                    raise


def threads_per_rank(placement: Placement) -> int:
    """CPU threads of a rank: what the job gave each task, else this node's cores shared out."""
    given = os.environ.get("SLURM_CPUS_PER_TASK")
    return int(given) if given else max(1, len(os.sched_getaffinity(0)) // placement.ranks_per_node)


def step_command(slurm: SlurmSection, placement: Placement, folder: Path, *, python: str) -> list[str]:
    """The srun that starts all ranks, in the container where there is one; output is a file a rank in ``folder``."""
    return [
        "srun",
        f"--nodes={len(placement.nodes)}",
        f"--ntasks={placement.dims.world_size}",
        f"--ntasks-per-node={placement.ranks_per_node}",
        "--distribution=block",
        *([f"--cpus-per-task={slurm.cpus_per_task}"] if slurm.cpus_per_task else []),
        "--kill-on-bad-exit=1",  # a rank that dies before it connects ends the step, not only the wait for it
        f"--output={folder}/rank-%t.txt",
        *slurm.container_options(),
        *slurm.container_prefix(),
        slurm.container_python if slurm.container else python,
        "-m",
        "launcher.rank",
    ]


@contextlib.asynccontextmanager
async def _step(command: list[str], call: Call, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """The running step; at the end of the context it is over."""
    logger.info("starting the ranks: %s", shlex.join(command))
    with (folder / "step.txt").open("ab") as output:
        step = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        )
    try:
        assert step.stdin is not None
        step.stdin.write(call.line())
        step.stdin.close()
        yield step
    finally:
        for how in (signal.SIGTERM, signal.SIGKILL):  # first of all, ranks end by themselves: their streams did
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await step.wait()
                break
            except TimeoutError:
                step.send_signal(how)


async def _arrivals(
    listener: socket.socket,
    token: bytes,
    placement: Placement,
    step: asyncio.subprocess.Process,
    job: Job,
    limit: float,
) -> list[ConnectedRank]:
    """All ranks, in order. Raises WorkerDied where the step ends before, or they are not there in ``limit`` seconds."""
    arrived: dict[int, ConnectedRank] = {}
    waiting = asyncio.ensure_future(_welcome(listener, token, placement, arrived))
    ended = asyncio.ensure_future(step.wait())
    try:
        await asyncio.wait({waiting, ended}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            waiting.result()
            return [arrived[rank] for rank in range(placement.dims.world_size)]
        missing = sorted(set(range(placement.dims.world_size)) - arrived.keys())
        nodes = sorted({placement.node_of(rank) for rank in missing})
        if len(nodes) == 1:  # what all nodes have in common is not mended by leaving one out
            job.blame(nodes[0])
        why = f"srun ended with status {ended.result()}" if ended.done() else f"{limit:g} s passed"
        ranks = f"rank {', '.join(map(str, missing))} on {', '.join(nodes)}"
        raise WorkerDied(f"{why} before {ranks} connected; step.txt and rank-*.txt in {job.folder} have what they said")
    finally:
        for task in (waiting, ended):
            task.cancel()
        if not waiting.done() or waiting.cancelled() or waiting.exception():
            for rank in arrived.values():
                rank.kill()


async def _welcome(
    listener: socket.socket, token: bytes, placement: Placement, arrived: dict[int, ConnectedRank]
) -> None:
    """Accept streams until every rank has one; each proves itself in a thread, so that none holds others up."""
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    everybody = asyncio.Event()

    async def prove(accepted: socket.socket) -> None:
        try:
            rank = await loop.run_in_executor(pool, _hear, accepted, token)
        except (OSError, EOFError, ValueError, TypeError) as error:
            logger.warning("a stream was refused: %s", error)
            return
        if rank.rank in arrived or placement.node_of(rank.rank) != rank.hello.node:
            logger.warning("rank %d came twice or from another node than planned: %s", rank.rank, rank.hello)
            rank.kill()
            return
        arrived[rank.rank] = rank
        if len(arrived) == placement.dims.world_size:
            everybody.set()

    async def accept() -> None:
        while True:
            accepted, _ = await loop.sock_accept(listener)
            tasks.append(asyncio.create_task(prove(accepted)))

    pool = ThreadPoolExecutor(32, thread_name_prefix="welcome")
    tasks = [asyncio.create_task(accept())]
    try:
        await everybody.wait()
    finally:
        for task in tasks:
            task.cancel()
        pool.shutdown(wait=False, cancel_futures=True)


def _hear(accepted: socket.socket, token: bytes) -> ConnectedRank:
    accepted.setblocking(True)
    connection = channel.accept(accepted, token)
    return ConnectedRank(connection, Hello(**json.loads(connection.recv_bytes(_HELLO_BYTES))))
