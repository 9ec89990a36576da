"""Steps of a job: an srun, running while a context is open."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from launcher.controller.handle import STOP_SECONDS
from rl_megatron.config.sections.slurm import SlurmSection
from rl_megatron.placement.names import file_stem
from rl_megatron.placement.ranks import Placement

logger = logging.getLogger(__name__)


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
        "launcher.worker.remote",
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


async def first_end(steps: Sequence[asyncio.subprocess.Process]) -> str:
    """How the first of the steps ended, once one has."""
    waiting = [asyncio.ensure_future(ended(step)) for step in steps]
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for one in waiting:
            one.cancel()
