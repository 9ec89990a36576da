"""Ranks on the nodes of a Slurm allocation: an srun step a role, a task a rank, each of which connects back to here.

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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher import channel, rank
from launcher.arrivals import Awaited, learner
from launcher.rank import Call
from launcher.workers import STOP_SECONDS, Failure
from rl_megatron.config.run import RunConfig
from rl_megatron.config.slurm import SlurmSection
from rl_megatron.interfaces import Roles, unheard
from rl_megatron.placement.names import LEARNER, file_stem
from rl_megatron.placement.nodes import beside, cut
from rl_megatron.placement.ranks import Placement, placement_of

logger = logging.getLogger(__name__)


_INHERITED = ("SLURM_GPUS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK")  # by srun, of the learner's
_OWN = ("env", *(f"--unset={name}" for name in _INHERITED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The allocation that this process runs in."""

    id: str
    restart: int
    here: str  # the node of this process
    nodes: tuple[str, ...]  # the learner's
    engine_nodes: tuple[str, ...]  # for engine servers alone
    heterogeneous: bool  # a component for each role that has nodes
    folder: Path  # of this attempt, in the run's folder
    separate: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of a critic and a reference alone

    @classmethod
    def this(cls, run_folder: Path, slurm: SlurmSection, separate: Sequence[str] = ()) -> Job | None:
        """Out of the environment; None outside a job. ``separate``: the roles with ranks of their own."""
        job, restart = os.environ.get("SLURM_JOB_ID"), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        if job is None:
            return None
        heterogeneous = "SLURM_HET_SIZE" in os.environ
        others = beside(slurm, separate)
        if heterogeneous:
            found = {r: _hosts(f"SLURM_JOB_NODELIST_HET_GROUP_{i}") for i, r in enumerate((LEARNER, *others))}
        else:
            found = cut(_hosts("SLURM_JOB_NODELIST"), others)
        folder = run_folder / "jobs" / f"{job}-{restart}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return cls(
            id=job,
            restart=restart,
            here=rank.node(),
            nodes=found[LEARNER],
            engine_nodes=found.get("engines", ()),
            heterogeneous=heterogeneous,
            folder=folder,
            separate={role: found[role] for role in separate},
        )

    def ask_requeue(self) -> None:
        """Tell the job's script that a checkpoint waits to be continued."""
        (self.folder / "requeue").touch()

    def blame(self, node: str) -> None:
        """Tell the job's script on which node a rank died."""
        (self.folder / "failed_node").write_text(f"{node}\n")

    def address(self) -> str:
        """This node's address as the other nodes reach it; loopback where there are none."""
        others = [node for nodes in self._by_role.values() for node in nodes if node != self.here]
        if not others:
            return "127.0.0.1"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((others[0], 9))  # sends nothing: asks for the way
            return str(probe.getsockname()[0])

    @property
    def _by_role(self) -> dict[str, tuple[str, ...]]:
        """In the order of the components of a heterogeneous job."""
        engines = {"engines": self.engine_nodes} if self.engine_nodes else {}
        return {LEARNER: self.nodes, **self.separate, **engines}

    def learner_options(self) -> list[str]:
        """What keeps a step on the learner's nodes, where others are in the job."""
        return self._on(LEARNER)

    def _on(self, role: str) -> list[str]:
        by_role = self._by_role
        if self.heterogeneous:
            return [f"--het-group={list(by_role).index(role)}"]
        return [f"--nodelist={','.join(by_role[role])}"] if len(by_role) > 1 else []

    def separate_command(self, command: Sequence[str], role: str) -> list[str]:
        """An srun's command, as it is of a role with nodes of its own: it has all their memory and GPUs."""
        return [*_OWN, command[0], *self._on(role), "--mem=0", *command[1:]]

    def server_command(self, nodes: Sequence[str], cpus: int) -> list[str]:
        """The srun that runs a command on each node, with all its memory and GPUs, beside whatever else is there."""
        return [
            *_OWN,
            "srun",
            *(self._on("engines") if self.heterogeneous and nodes[0] in self.engine_nodes else []),
            *("--overlap", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", f"--nodelist={','.join(nodes)}"),
            *(f"--cpus-per-task={cpus}", "--mem=0"),
        ]


def _hosts(variable: str) -> tuple[str, ...]:
    listed = subprocess.run(["scontrol", "show", "hostnames", os.environ[variable]], capture_output=True, text=True)
    return tuple(listed.stdout.split())


class SlurmLauncher:
    """Starts the workers of a run on its allocation. See interfaces.Launcher."""

    def __init__(self, model_folder: Path, run_folder: Path, job: Job, on_signal: Callable[[str], None]) -> None:
        self._model_folder, self._run_folder, self._job, self._on_signal = model_folder, run_folder, job, on_signal

    @contextlib.asynccontextmanager
    async def start(self, config: RunConfig, tell: Callable[[str], None] = unheard) -> AsyncIterator[Roles]:
        """See interfaces.Launcher. Raises ConfigError where the allocation has not the tasks that the learner needs."""
        job = self._job
        placement = placement_of(config, job.nodes)
        separate = [placement_of(config, nodes, role) for role, nodes in job.separate.items()]
        logger.info("job %s, restart %d: %s", job.id, job.restart, placement.describe())
        for other in separate:
            logger.info("%s", other.describe())
        token = secrets.token_bytes(channel.TOKEN_BYTES)
        ranks = config.learner.dims.world_size * (1 + len(separate))
        async with contextlib.AsyncExitStack() as stack:
            listener = stack.enter_context(channel.listen(job.address(), backlog=ranks))
            host, port = listener.getsockname()
            threads = config.learner.threads or threads_per_rank(placement)
            steps = []
            for each in (placement, *separate):
                call = Call(
                    host=host,
                    port=port,
                    token=token.hex(),
                    threads=threads,
                    device=config.learner.device,
                    role=each.role,
                )
                command = self._command(config, each)
                steps.append(await stack.enter_async_context(running_step(command, call.line(), job.folder)))
            awaited = Awaited(
                placement=placement,
                separate=separate,
                token=token,
                started=_first_end(steps),
                seconds=config.learner.timeout_seconds,
                folder=job.folder,
                files=f"step.txt and {', '.join(file_stem(p.role, '*') for p in (placement, *separate))}.txt",
                blame=job.blame,
            )
            yield await stack.enter_async_context(
                learner(
                    listener,
                    awaited,
                    Failure(),
                    config,
                    model_folder=self._model_folder,
                    run_folder=self._run_folder,
                    on_signal=self._on_signal,
                    tell=tell,
                )
            )

    def _command(self, config: RunConfig, placement: Placement) -> list[str]:
        job, section = self._job, config.slurm
        if placement.role == LEARNER:
            return step_command(section, placement, job.folder, python=sys.executable, where=job.learner_options())
        return job.separate_command(step_command(section, placement, job.folder, python=sys.executable), placement.role)


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
        f"--output={folder}/{file_stem(placement.role, '%t')}.txt",
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


async def _first_end(steps: Sequence[asyncio.subprocess.Process]) -> str:
    """How the first of the steps ended, once one has."""
    waiting = [asyncio.ensure_future(ended(step)) for step in steps]
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for one in waiting:
            one.cancel()
