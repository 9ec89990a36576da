"""An engine behind another one that is given only a few requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from typing_extensions import override

from rl_megatron.interfaces import RolloutEngine
from rl_megatron.types import Completion, GenerationRequest


class FewAtOnce(RolloutEngine):
    """Sends at most ``most`` requests on at once; the others wait here, where they take no slot of a server."""

    def __init__(self, engine: RolloutEngine, most: int) -> None:
        self._engine, self._free = engine, asyncio.Semaphore(most)

    @override
    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        """As the engine, once fewer are under way."""
        async with self._free:
            return await self._engine.generate(request)

    @override
    def so_far(self, request_id: str) -> Completion | None:
        """As the engine."""
        return self._engine.so_far(request_id)

    @override
    async def interrupt(self) -> None:
        """As the engine."""
        await self._engine.interrupt()
