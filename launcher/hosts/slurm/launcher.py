"""Starts ranks on the nodes of a Slurm allocation: one srun step per role, one task per node, whose ranks connect back.

This file reads the job from its environment alone. It leaves messages for the job's script in this attempt's folder.
``requeue`` requests a requeue, to resume from the checkpoint. ``failed_node`` is the node where a rank died, or empty
if ranks of several nodes did not come up.

Runs steps of a job: an srun process for the time of a context.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from typing_extensions import override

from launcher.controller.arrivals import ConnectingLauncher, StartedRanks
from launcher.controller.group import STOP_SECONDS
from launcher.hosts.slurm.allocation import Allocation, rank_command
from launcher.processes.environment import threads_per_rank
from launcher.wire import Call, Muster
from rl_megatron.config.run import RunConfig
from rl_megatron.placement.names import file_stem
from rl_megatron.placement.ranks import RankPlacement, make_placement

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def running_step(command: list[str], line: bytes, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a step. Each of its tasks reads ``line``. Leaving the context ends the step."""
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
    """Waits for the end of srun, which is made to end: ranks have ended by themselves, because their streams closed."""
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
    """Waits for the step's end, and says how it ended."""
    return f"srun ended with status {await step.wait()}"


async def first_end(steps: Sequence[asyncio.subprocess.Process]) -> str:
    """Waits for the first of the steps to end, and says how it ended."""
    waiting = [asyncio.ensure_future(ended(step)) for step in steps]
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for one in waiting:
            one.cancel()


class SlurmLauncher(ConnectingLauncher):
    """Starts the workers of a run on its allocation."""

    def __init__(
        self, model_folder: Path, run_folder: Path, allocation: Allocation, on_signal: Callable[[str], None]
    ) -> None:
        super().__init__(model_folder, run_folder, on_signal)
        self._allocation = allocation

    @override
    async def _address(self) -> str:
        return await asyncio.to_thread(self._allocation.address)

    @override
    def _threads(self, config: RunConfig) -> int:
        return threads_per_rank(make_placement(config, self._allocation.nodes))

    @override
    @contextlib.asynccontextmanager
    async def _begin(self, config: RunConfig, call: Call) -> AsyncIterator[StartedRanks]:
        """Raises ConfigError if the allocation does not have the tasks that the learner needs."""
        allocation, folder = self._allocation, self._allocation.folder
        placements = [make_placement(config, allocation.nodes)]
        placements += [make_placement(config, nodes, role) for role, nodes in allocation.separate.items()]
        described = "\n".join(placement.describe() for placement in placements)
        logger.info("job %s, restart %d: %s", allocation.id, allocation.restart, described)
        async with contextlib.AsyncExitStack() as stack:
            steps = []
            for each in placements:
                per_node = {each.role: each.ranks_per_node}
                muster = Muster(call=call, nodes=each.nodes, ranks_per_node=per_node, folder=str(folder.absolute()))
                step = running_step(self._command(config, each), muster.line(), folder)
                steps.append(await stack.enter_async_context(step))
            files = f"step.txt and {', '.join(file_stem(placement.role, '*') for placement in placements)}.txt"
            yield StartedRanks(
                placements=placements,
                ended=first_end(steps),
                folder=folder,
                output=f"{files} in {folder} have their output",
                report_lost_nodes=allocation.blame,
            )

    def _command(self, config: RunConfig, placement: RankPlacement) -> list[str]:
        return rank_command(config.slurm, placement, self._allocation, sys.executable)
