"""Has ranks record their kernels."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

from typing_extensions import override

from launcher.controller.group import WorkerGroup
from rl_megatron.interfaces import Profiled
from rl_megatron.observability.timeline.kernels import RankKernels, Recorded
from rl_megatron.placement.names import file_stem

logger = logging.getLogger(__name__)


class KernelGroup(Profiled):
    """The ranks of a role. Every call raises WorkerDied if a rank has ended."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._recording: list[int] = []

    @override
    async def begin(self, ranks: Collection[int]) -> None:
        self._recording = [worker.rank for worker in self._group.workers if worker.rank in ranks]
        await self._group.ask("begin_kernels", dict.fromkeys(self._recording, ()))

    @override
    async def end(self, folder: Path) -> Sequence[RankKernels]:
        workers = [worker for worker in self._group.workers if worker.rank in self._recording]
        files = {one.rank: (folder / f"{file_stem(one.role, one.rank)}.json.gz",) for one in workers}
        answers: list[Recorded | str] = await self._group.ask("end_kernels", files)
        for problem in (answer for answer in answers if isinstance(answer, str)):
            logger.warning("kernels were not written: %s", problem)
        both = zip(workers, answers, strict=True)
        return [worker.placed(answer) for worker, answer in both if not isinstance(answer, str)]
