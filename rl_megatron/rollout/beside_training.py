"""An engine for what is sampled beside training, which goes first."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Final

from typing_extensions import override

from rl_megatron.interfaces import RolloutEngine
from rl_megatron.types import Completion, GenerationRequest

LAST: Final = 1 << 30
"""A ``birth`` after those of all versions that a run can have."""


class BesideTraining(RolloutEngine):
    """Sends requests on as the youngest, which engines with priorities take last, and at most ``most`` of them at once;
    the others wait here, where they take no slot of a server. None: all."""

    def __init__(self, engine: RolloutEngine, most: int | None) -> None:
        self._engine, self._free = engine, nullcontext() if most is None else asyncio.Semaphore(most)

    @override
    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        """As the engine, once fewer are under way."""
        async with self._free:
            return await self._engine.generate(replace(request, birth=LAST))

    @override
    def so_far(self, request_id: str) -> Completion | None:
        """As the engine."""
        return self._engine.so_far(request_id)

    @override
    async def interrupt(self) -> None:
        """As the engine."""
        await self._engine.interrupt()
