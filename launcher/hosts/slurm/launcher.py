"""Starts ranks on the nodes of a Slurm allocation: one srun step per role, one task per node, whose ranks connect back.

This file learns about the job from its environment alone. It leaves messages for the job's script in the folder of this
attempt: ``requeue``, to be requeued and resume from the checkpoint, and ``failed_node``, the node where a rank died,
empty where ranks of several did not come up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from typing_extensions import override

from launcher.controller.arrivals import Awaited, learner
from launcher.controller.failure import Failure
from launcher.hosts.slurm.allocation import Allocation
from launcher.hosts.slurm.steps import first_end, running_step, step_command
from launcher.hosts.threads import threads_per_rank
from launcher.wire import channel
from launcher.wire.greetings import Call, Muster
from rl_megatron.config.run import RunConfig
from rl_megatron.interfaces import Launcher, Roles, unheard
from rl_megatron.placement.names import LEARNER, file_stem
from rl_megatron.placement.ranks import Placement, placement_of, ranks_by_role

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
