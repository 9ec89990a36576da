"""What a reward model on ranks of its own says of texts: the value of each one's last token."""

from __future__ import annotations

import asyncio
from asyncio import to_thread
from collections.abc import Sequence
from dataclasses import dataclass, field

from rl_megatron.data.packing import Packer, unpack
from rl_megatron.data.samples import check_tokens, scored_row, written_samples
from rl_megatron.interfaces import Scorer
from rl_megatron.rewards.scoring import turn_of
from rl_megatron.types import Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedScores:
    """Asks ``model``, whose ranks ``packer`` packs for, one call after the other: texts of one call alone share
    micro-batches, so their scores do not depend on what else is scored."""

    model: Scorer
    packer: Packer
    vocab_size: int
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def max_tokens(self) -> int:
        """Of a text, which a micro-batch holds whole."""
        return self.packer.max_tokens

    async def __call__(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Raises DataError for a text that no micro-batch holds, and as `check_tokens` and `Scorer.score`."""
        samples = await to_thread(self._samples, texts)
        async with turn_of(self.turn):
            batch = await to_thread(self.packer.pack, samples)
            said = await self.model.score(batch, frozenset({"values"}))
            await self.model.forget()
        values = await to_thread(unpack, batch, said["values"], samples)
        return [float(value) for value in values[samples.mask]]

    def _samples(self, texts: Sequence[Sequence[int]]) -> Samples:
        rows = [scored_row("to score", ids) for ids in texts]
        check_tokens(rows, self.vocab_size)
        return written_samples(rows)
