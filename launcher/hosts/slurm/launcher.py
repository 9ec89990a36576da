"""Starts ranks on the nodes of a Slurm allocation: one srun step per role, one task per node, whose ranks connect back.

This file learns about the job from its environment alone. It leaves messages for the job's script in the folder of this
attempt: ``requeue``, to be requeued and resume from the checkpoint, and ``failed_node``, the node where a rank died,
empty where ranks of several did not come up.

Runs steps of a job: an srun process for the time of a context.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from typing_extensions import override

from launcher.controller.arrivals import Awaited, learner
from launcher.controller.handle import STOP_SECONDS, Failure
from launcher.hosts.slurm.allocation import Allocation, cores_option
from launcher.hosts.threads import threads_per_rank
from launcher.wire import channel
from launcher.wire.greetings import Call, Muster
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.slurm import SlurmSection
from rl_megatron.interfaces import Launcher, Roles, unheard
from rl_megatron.placement.names import LEARNER, file_stem
from rl_megatron.placement.ranks import Placement, placement_of, ranks_by_role


def step_command(slurm: SlurmSection, placement: Placement, *, python: str, where: Sequence[str] = ()) -> list[str]:
    """The srun command that runs worker/node.py on every node, in the container if given; its tasks read a `Muster`."""
    nodes = len(placement.nodes)
    return [
        "srun",
        *where,
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        f"--job-name={placement.role}",  # as `squeue --steps` shows it
        *cores_option(slurm.cores(placement.ranks_per_node)),
        "--kill-on-bad-exit=1",  # a rank that dies before it connects ends the step
        "--label",  # output, which goes to step.txt, with the number of the node
        *slurm.container_options(slurm.container, Path.cwd()),
        *slurm.container_prefix(slurm.container),
        slurm.container_python if slurm.container else python,
        *("-P", "-m", "launcher.worker.node"),
    ]


@contextlib.asynccontextmanager
async def running_step(command: list[str], line: bytes, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a step whose tasks each read ``line``; leaving the context ends it."""
    logger.info("starting a step: %s", shlex.join(command))
    with (folder / "step.txt").open("ab") as output:
        step = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=dict(os.environ),
        )
    try:
        assert step.stdin is not None
        step.stdin.write(line)
        yield step
    finally:
        if step.stdin is not None:
            step.stdin.close()
        await _ends(step, command)


async def _ends(step: asyncio.subprocess.Process, command: Sequence[str]) -> None:
    """Wait for the end of srun, which is made to end: ranks have ended by themselves, because their streams closed."""
    for how in (signal.SIGTERM, signal.SIGKILL, None):
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await step.wait()
            break
        except TimeoutError:
            what = "is left" if how is None else f"gets {how.name}"
            logger.warning("srun has not ended in %g s, and %s: %s", STOP_SECONDS, what, shlex.join(command))
            if how is not None:
                step.send_signal(how)
    if step.returncode in (None, -signal.SIGKILL):
        logger.warning("its step may go on, and keep its GPUs: `squeue --steps` names it, and `scancel` ends it")


async def ended(step: asyncio.subprocess.Process) -> str:
    """Wait for the step's end, and say how it ended."""
    return f"srun ended with status {await step.wait()}"


async def first_end(steps: Sequence[asyncio.subprocess.Process]) -> str:
    """Wait for the first of the steps to end, and say how it ended."""
    waiting = [asyncio.ensure_future(ended(step)) for step in steps]
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for one in waiting:
            one.cancel()


logger = logging.getLogger(__name__)


class SlurmLauncher(Launcher):
    """Starts the workers of a run on its allocation."""

    def __init__(
        self, model_folder: Path, run_folder: Path, allocation: Allocation, on_signal: Callable[[str], None]
    ) -> None:
        self._model_folder, self._run_folder = model_folder, run_folder
        self._allocation, self._on_signal = allocation, on_signal

    @override
    @contextlib.asynccontextmanager
    async def start(self, config: RunConfig, tell: Callable[[str], None] = unheard) -> AsyncIterator[Roles]:
        """Raises ConfigError if the allocation does not have the tasks that the learner needs."""
        allocation = self._allocation
        placement = placement_of(config, allocation.nodes)
        separate = [placement_of(config, nodes, role) for role, nodes in allocation.separate.items()]
        logger.info("job %s, restart %d: %s", allocation.id, allocation.restart, placement.describe())
        for other in separate:
            logger.info("%s", other.describe())
        token = secrets.token_bytes(channel.TOKEN_BYTES)
        address = await asyncio.to_thread(allocation.address)
        async with contextlib.AsyncExitStack() as stack:
            listener = stack.enter_context(channel.listen(address, backlog=sum(ranks_by_role(config).values())))
            host, port = listener.getsockname()
            threads = config.learner.threads or threads_per_rank(placement)
            steps = []
            for each in (placement, *separate):
                call = Call(
                    host=host,
                    port=port,
                    token=token.hex(),
                    seconds=config.learner.timeout_seconds,
                    threads=threads,
                    device=config.learner.device,
                    role=each.role,
                )
                muster = Muster(
                    call=call,
                    nodes=each.nodes,
                    ranks_per_node=each.ranks_per_node,
                    folder=str(allocation.folder.absolute()),
                )
                command = self._command(config, each)
                steps.append(await stack.enter_async_context(running_step(command, muster.line(), allocation.folder)))
            awaited = Awaited(
                placement=placement,
                separate=separate,
                token=token,
                started=first_end(steps),
                seconds=config.learner.timeout_seconds,
                folder=allocation.folder,
                files=f"step.txt and {', '.join(file_stem(p.role, '*') for p in (placement, *separate))}.txt",
                blame=allocation.blame,
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
        allocation, section = self._allocation, config.slurm
        if placement.role == LEARNER:
            return step_command(section, placement, python=sys.executable, where=allocation.learner_options())
        return allocation.separate_command(step_command(section, placement, python=sys.executable), placement.role)
