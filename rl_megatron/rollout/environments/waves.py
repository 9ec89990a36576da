"""Has an engine that answers batch by batch sample turn k of all trajectories as one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from operator import itemgetter

from typing_extensions import override

from rl_megatron.interfaces import RolloutEngine
from rl_megatron.types import Completion, GenerationRequest

PATIENCE = 0.25  # seconds without a further request after which a wave goes without those that are late

_Asked = tuple[str, GenerationRequest, asyncio.Future[Sequence[Completion]]]


class Waves(RolloutEngine):
    """Sends requests on together: once every trajectory that is under way waits for one, or the others are late, and
    the engine has answered those before.

    A wave is in the order of its requests' ids, so that equal ones are computed equally.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._under_way = 0
        self._waiting: list[_Asked] = []
        self._timer: asyncio.TimerHandle | None = None
        self._running: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """One more trajectory will ask."""
        self._under_way += 1

    def end(self) -> None:
        """A trajectory asks no more."""
        self._under_way -= 1
        self._consider()

    @override
    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        answer: asyncio.Future[Sequence[Completion]] = asyncio.get_running_loop().create_future()
        self._waiting.append((request.id, request, answer))
        self._consider()
        return await answer

    @override
    def so_far(self, request_id: str) -> Completion | None:
        return self._engine.so_far(request_id)

    @override
    async def interrupt(self) -> None:
        await self._engine.interrupt()

    def _consider(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waiting = [one for one in self._waiting if not one[2].done()]  # cancelled ones are
        if not self._waiting or self._running is not None:
            return
        loop = asyncio.get_running_loop()
        if len(self._waiting) >= self._under_way:
            self._go()
        else:
            self._timer = loop.call_later(PATIENCE, self._go)

    def _go(self) -> None:
        self._timer = None
        wave, self._waiting = sorted(self._waiting, key=itemgetter(0)), []
        self._running = asyncio.ensure_future(self._sample(wave))

    async def _sample(self, wave: Sequence[_Asked]) -> None:
        found = await asyncio.gather(*(self._engine.generate(one) for _, one, _ in wave), return_exceptions=True)
        for (_, _, answer), result in zip(wave, found, strict=True):
            if answer.done():
                continue
            if isinstance(result, BaseException):
                answer.set_exception(result)
            else:
                answer.set_result(result)
        self._running = None
        self._consider()
