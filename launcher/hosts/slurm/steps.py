"""Runs steps of a job: an srun process for the time of a context."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from launcher.controller.handle import STOP_SECONDS
from launcher.hosts.slurm.allocation import cores_option
from rl_megatron.config.sections.slurm import SlurmSection
from rl_megatron.placement.ranks import Placement

logger = logging.getLogger(__name__)


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
