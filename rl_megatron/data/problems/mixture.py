"""Prompts of several sources in fixed shares, each source shuffled again in every epoch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rl_megatron.data.problems.rendering import LABEL
from rl_megatron.types import Prompt

DigestOf = Literal["rows", "margins", "questions", "texts"]
OLDER_DIGESTS: tuple[DigestOf, ...] = ("margins", "questions", "texts")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceState:
    """A source between two draws, for checkpoints."""

    epoch: int
    position: int  # prompts drawn in the epoch
    size: int  # prompts
    digest: str  # checksum of the prompts
    weight: float
    taken: int  # prompts drawn since the weights were set


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureState:
    """All sources between two draws; ``position``: prompts drawn since the weights were set."""

    position: int
    sources: Mapping[str, SourceState]


class Proportions:
    """Says which source is next, so that after n prompts each had its share of n, less or more than one prompt.

    A source is eligible while its prompts are below its share of n + 1. Of these the next is the one with the earliest
    due prompt, and of equal ones the first in ``weights``. Source: Baruah et al., Proportionate progress, Algorithmica
    1996. The largest deficit first, without the condition, strays by more than one from six sources on.
    """

    def __init__(self, weights: Mapping[str, float], taken: Mapping[str, int] | None = None) -> None:
        exact = {name: Fraction(weight) for name, weight in weights.items()}
        scale = math.lcm(*(weight.denominator for weight in exact.values()))
        self._weights = {name: int(weight * scale) for name, weight in exact.items()}  # exact, in the same ratios
        self._sum = sum(self._weights.values())
        self.taken = dict(taken) if taken is not None else dict.fromkeys(weights, 0)
        self._drawn = sum(self.taken.values())
        self._eligible: list[tuple[Fraction, int, str]] = []  # heap of (when the next prompt is due, place, name)
        self._later: list[tuple[int, int, str]] = []  # heap of (first draw at which it is eligible, place, name)
        self._places = {name: place for place, name in enumerate(weights)}
        for name in weights:
            self._wait(name)

    def next(self) -> str:
        """Takes the next prompt's source. With n sources it looks at about log n of them."""
        self._drawn += 1
        while self._later and self._later[0][0] <= self._drawn:
            _, place, name = heappop(self._later)
            heappush(self._eligible, (Fraction(self.taken[name] + 1, self._weights[name]), place, name))
        _, _, name = heappop(self._eligible)
        self.taken[name] += 1
        self._wait(name)
        return name

    def _wait(self, name: str) -> None:
        """Holds the source back until the first draw n with taken < share of n."""
        first = self.taken[name] * self._sum // self._weights[name] + 1
        heappush(self._later, (first, self._places[name], name))


class Epochs:
    """Endless epochs over ``rows``, each shuffled by (seed, epoch), so that a position determines the order."""

    def __init__(self, rows: NDArray[np.integer], *, seed: int) -> None:
        self.rows, self.epoch, self.position = rows, 0, 0
        self._seed = seed
        self._orders: dict[int, NDArray[np.uint32]] = {}

    @property
    def passed(self) -> float:
        """The epochs that were drawn, with the part of the present one."""
        return self.epoch + self.position / len(self.rows)

    @property
    def drawn(self) -> int:
        """The number of rows that were drawn, in all epochs: the next draw's number."""
        return self.epoch * len(self.rows) + self.position

    def next(self) -> int:
        """Returns the next row."""
        if self.position == len(self.rows):
            self.move(self.epoch + 1, 0)
        self.position += 1
        return int(self.rows[self._order(self.epoch)[self.position - 1]])

    def draws(self, start: int, stop: int) -> NDArray[np.integer]:
        """Returns the rows of the draws with these numbers, in any epochs. Any thread may ask."""
        parts = [np.zeros(0, np.uint32)]
        while start < stop:
            epoch, first = divmod(start, len(self.rows))
            parts.append(self._order(epoch)[first : first + stop - start])
            start += len(parts[-1])
        return self.rows[np.concatenate(parts)]

    def move(self, epoch: int, position: int) -> None:
        """Continues at ``position`` of ``epoch``."""
        self.epoch, self.position = epoch, position

    def _order(self, epoch: int) -> NDArray[np.uint32]:
        """Returns the order of the rows in this epoch; it is kept until a later one's is made."""
        order = self._orders.get(epoch)
        if order is None:
            chance = np.random.default_rng([self._seed, epoch])
            order = chance.permutation(np.arange(len(self.rows), dtype=np.uint32))
            self._orders = {one: own for one, own in self._orders.items() if one >= self.epoch} | {epoch: order}
        return order


def digest_of_prompts(prompts: Sequence[Prompt], of: DigestOf = "rows") -> str:
    """Returns a digest of ids, questions and answers in their order, of pairs both answers and the margin. It covers
    all other fields of problems, which teachers, rewards and environments may read, and a conversation's label.
    Checkpoints of older versions have it without these (margins), or also without margins (questions). The oldest have
    texts for questions, which differ by day where a chat template writes the date (texts)."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        question = prompt.text if of == "texts" or not prompt.question else prompt.question
        margin = [f"{prompt.margin!r}"] if prompt.margin and of in ("rows", "margins") else []
        kept = prompt.meta if prompt.token_ids else {LABEL: prompt.meta[LABEL]} if LABEL in prompt.meta else {}
        others = [json.dumps(kept, ensure_ascii=False, sort_keys=True)] if of == "rows" and kept else []
        for text in (prompt.id, question, prompt.answer, *prompt.rejected, *margin, *others):
            data = text.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
