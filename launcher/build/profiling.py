"""Profiles steps of a run: those of ``profile.steps``, and those that ``rl-megatron profile`` asks for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.interfaces import Profiled
from rl_megatron.observability.timeline.kernels import RankKernels, folder_of, save

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Steps that somebody waits for, ``over`` once there are no more of them, and then ``heard``."""

    count: int
    ranks: Collection[int]
    done: list[str] = field(default_factory=list)  # folders
    over: asyncio.Event = field(default_factory=asyncio.Event)
    heard: asyncio.Event = field(default_factory=asyncio.Event)


class Profiling:
    """Records the kernels of a run's steps. A fault of it is logged, and ends no run."""

    def __init__(
        self, config: RunConfig, run: Path, profiled: Sequence[Profiled], flush: Callable[[], Awaitable[None]]
    ) -> None:
        """``flush`` has readers see the run's timeline up to now."""
        self._flush = flush
        self._section, self._run, self._profiled = config.profile, run.resolve(), profiled
        self._ranks = range(config.learner.dims.world_size)
        self._last = config.train.steps
        self._asked: list[_Asked] = []  # the first is at work
        self._step = 0

    @contextlib.asynccontextmanager
    async def step(self, number: int) -> AsyncIterator[None]:
        """Record what is done inside, if the step is to be profiled. What an error ends is not recorded."""
        self._step = number
        if self._asked and len(self._asked[0].done) == self._asked[0].count:
            await self._end_first()
        asked = self._asked[0] if self._asked else None
        ranks = {*(asked.ranks if asked else ()), *(self._section.ranks if number in self._section.steps else ())}
        if not ranks:
            yield
            return
        await asyncio.gather(*(one.begin(ranks) for one in self._profiled))
        yield
        folder = folder_of(self._run, number)
        await self._written(folder)
        if asked is not None:
            asked.done.append(str(folder))

    async def _written(self, folder: Path) -> None:
        answers: list[Sequence[RankKernels]] = await asyncio.gather(*(one.end(folder) for one in self._profiled))
        await asyncio.to_thread(save, folder, [rank for ranks in answers for rank in ranks])
        logger.info("kernels of the step are in %s; rl-megatron report %s --trace FILE has them too", folder, self._run)

    async def _end_first(self) -> None:
        """Answer the oldest request: the timeline has all steps that were recorded for it."""
        first = self._asked.pop(0)
        await self._flush()
        first.over.set()

    async def end(self) -> None:
        """Answer all that wait, with what was recorded for them: there are no more steps."""
        waiting = [*self._asked]
        while self._asked:
            await self._end_first()
        await asyncio.gather(*(one.heard.wait() for one in waiting))

    async def answer(self, arguments: Mapping[str, Any]) -> list[str]:
        """Profile the next ``steps`` on ``ranks``. Returns the folders of what was recorded, once it is written.

        Raises ConfigError for steps or ranks that there are not.
        """
        count, ranks = int(arguments.get("steps") or 1), [int(r) for r in arguments.get("ranks") or self._section.ranks]
        left = self._last - self._step
        if not 1 <= count <= left:
            raise ConfigError(f"{count} steps: {left} are left; give 1 to {left}")
        if strange := sorted(set(ranks) - set(self._ranks)):
            raise ConfigError(f"rank {strange[0]}: ranks are 0 to {len(self._ranks) - 1}; give some of these")
        asked = _Asked(count, ranks)
        self._asked.append(asked)
        try:
            await asked.over.wait()
            return asked.done
        finally:
            asked.heard.set()
