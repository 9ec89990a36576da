"""Ranks on the nodes of a Slurm allocation: one srun step, a task a rank, each of which connects back to here.

Everything that this file asks of Slurm is in the environment of the job. What it leaves for the job's script is in the
folder of this attempt: ``requeue``, to be started again from the checkpoint, and ``failed_node``, where a rank died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher import channel, rank
from launcher.arrivals import Awaited, learner
from launcher.placement import Placement, placement_of
from launcher.rank import Call
from launcher.workers import STOP_SECONDS, Failure
from rl_megatron.config import RunConfig
from rl_megatron.config_slurm import SlurmSection
from rl_megatron.interfaces import Roles

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The allocation that this process runs in."""

    id: str
    restart: int
    here: str  # the node of this process
    nodes: tuple[str, ...]  # the learner's
    engine_nodes: tuple[str, ...]  # for engine servers alone
    heterogeneous: bool  # a component for each of the two
    folder: Path  # of this attempt, in the run's folder

    @classmethod
    def this(cls, run_folder: Path, slurm: SlurmSection) -> Job | None:
        """Out of the environment; None outside a job."""
        job, restart = os.environ.get("SLURM_JOB_ID"), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        if job is None:
            return None
        heterogeneous = "SLURM_HET_SIZE" in os.environ
        if heterogeneous:
            nodes, engine_nodes = (_hosts(f"SLURM_JOB_NODELIST_HET_GROUP_{i}") for i in range(2))
        else:
            every = _hosts("SLURM_JOB_NODELIST")
            count = max(1, len(every) - slurm.engines.nodes)
            nodes, engine_nodes = every[:count], every[count:]
        folder = run_folder / "jobs" / f"{job}-{restart}"
        folder.mkdir(parents=True, exist_ok=True)
        return cls(
            id=job,
            restart=restart,
            here=rank.node(),
            nodes=nodes,
            engine_nodes=engine_nodes,
            heterogeneous=heterogeneous,
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
        others = [node for node in (*self.nodes, *self.engine_nodes) if node != self.here]
        if not others:
            return "127.0.0.1"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((others[0], 9))  # sends nothing: asks for the way
            return str(probe.getsockname()[0])

    def learner_options(self) -> list[str]:
        """What keeps a step on the learner's nodes, where others are in the job."""
        if self.heterogeneous:
            return ["--het-group=0"]
        return [f"--nodelist={','.join(self.nodes)}"] if self.engine_nodes else []

    def server_command(self, node: str, cpus: int) -> list[str]:
        """The srun that runs one command on a node, with all its memory and GPUs, beside whatever else is there."""
        kept = ("SLURM_GPUS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK")  # the learner's
        return [
            "env",
            *(f"--unset={name}" for name in kept),
            "srun",
            *(["--het-group=1"] if self.heterogeneous and node in self.engine_nodes else []),
            *("--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", f"--cpus-per-task={cpus}", "--mem=0"),
        ]


def _hosts(variable: str) -> tuple[str, ...]:
    listed = subprocess.run(["scontrol", "show", "hostnames", os.environ[variable]], capture_output=True, text=True)
    return tuple(listed.stdout.split())


class SlurmLauncher:
    """Starts the workers of a run on its allocation. See interfaces.Launcher."""

    def __init__(self, model_folder: Path, run_folder: Path, job: Job, on_signal: Callable[[str], None]) -> None:
        self._model_folder, self._run_folder, self._job, self._on_signal = model_folder, run_folder, job, on_signal

    @contextlib.asynccontextmanager
    async def start(self, config: RunConfig) -> AsyncIterator[Roles]:
        """See interfaces.Launcher. Raises ConfigError where the allocation has not the tasks that the learner needs."""
        job, dims = self._job, config.learner.dims
        placement = placement_of(config, job.nodes)
        logger.info("job %s, restart %d: %s", job.id, job.restart, placement.describe())
        token = secrets.token_bytes(channel.TOKEN_BYTES)
        with channel.listen(job.address(), backlog=dims.world_size) as listener:
            host, port = listener.getsockname()
            threads = config.learner.threads or threads_per_rank(placement)
            call = Call(host=host, port=port, token=token.hex(), threads=threads)
            command = step_command(
                config.slurm, placement, job.folder, python=sys.executable, where=job.learner_options()
            )
            async with running_step(command, call.line(), job.folder) as step:
                awaited = Awaited(
                    placement=placement,
                    token=token,
                    started=ended(step),
                    seconds=config.learner.timeout_seconds,
                    files=f"step.txt and rank-*.txt in {job.folder}",
                    blame=job.blame,
                )
                async with learner(
                    listener,
                    awaited,
                    Failure(),
                    config,
                    model_folder=self._model_folder,
                    run_folder=self._run_folder,
                    on_signal=self._on_signal,
                ) as roles:
                    yield roles


def threads_per_rank(placement: Placement) -> int:
    """CPU threads of a rank: what the job gave each task, else this node's cores shared out."""
    given = os.environ.get("SLURM_CPUS_PER_TASK")
    return int(given) if given else max(1, len(os.sched_getaffinity(0)) // placement.ranks_per_node)


def step_command(
    slurm: SlurmSection, placement: Placement, folder: Path, *, python: str, where: Sequence[str] = ()
) -> list[str]:
    """The srun that starts all ranks, in the container where there is one; output is a file a rank in ``folder``."""
    return [
        "srun",
        *where,
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
async def running_step(command: list[str], line: bytes, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """The running step, each task of which reads ``line``; at the end of the context it is over."""
    logger.info("starting a step: %s", shlex.join(command))
    with (folder / "step.txt").open("ab") as output:
        step = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        )
    try:
        assert step.stdin is not None
        step.stdin.write(line)
        yield step
    finally:
        if step.stdin is not None:
            step.stdin.close()
        for how in (signal.SIGTERM, signal.SIGKILL):  # first of all, ranks end by themselves: their streams did
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await step.wait()
                break
            except TimeoutError:
                step.send_signal(how)


async def ended(step: asyncio.subprocess.Process) -> str:
    """How the step ended, once it has."""
    return f"srun ended with status {await step.wait()}"
