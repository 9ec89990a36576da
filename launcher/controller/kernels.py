"""Has ranks record their kernels."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection
from pathlib import Path

from launcher.controller.group import WorkerGroup
from rl_megatron.observability.timeline.ranks import Recorded, save
from rl_megatron.placement.names import file_stem

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def record_kernels(groups: Collection[WorkerGroup], ranks: Collection[int], folder: Path) -> AsyncIterator[None]:
    """Records the kernels of those of ``ranks`` that each group has, while the context is open, into ``folder``.

    Raises WorkerDied. If an error ends the context, nothing is written.
    """
    workers = [(group, [one for one in group.workers if one.rank in ranks]) for group in groups]
    await asyncio.gather(*(group.ask("begin_kernels", {one.rank: () for one in its}) for group, its in workers))
    yield
    written = []
    for group, its in workers:
        files = {one.rank: (folder / f"{file_stem(one.role, one.rank)}.json.gz",) for one in its}
        answers: list[Recorded | str] = await group.ask("end_kernels", files)
        for worker, answer in zip(its, answers, strict=True):
            if isinstance(answer, str):
                logger.warning("kernels were not written: %s", answer)
            else:
                written.append(worker.placed(answer))
    await asyncio.to_thread(save, folder, written)
    logger.info("kernels of the step are in %s; rl-megatron report RUN --trace FILE has them too", folder)
