"""Several rewards added up by weight, each kept by name."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import overload

from rl_megatron.errors import RewardError
from rl_megatron.interfaces import RewardFunction
from rl_megatron.rewards.own import numbers
from rl_megatron.rewards.threads import said
from rl_megatron.types import Completion, Prompt


class PartedRewards(Sequence[float]):
    """The weighted sums of G completions; ``parts`` holds what each part gave them, unweighted, by its name."""

    def __init__(self, weights: Mapping[str, float], parts: Mapping[str, tuple[float, ...]]) -> None:
        self.parts = parts
        columns = [[weights[name] * value for value in values] for name, values in parts.items()]
        self._sums = tuple(_sum(row) for row in zip(*columns, strict=True))

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[float, ...]: ...
    def __getitem__(self, index: int | slice) -> float | tuple[float, ...]:
        return self._sums[index]

    def __len__(self) -> int:
        return len(self._sums)


class WeightedSum:
    """Scores with all parts at once. A part that raises, or gives another number of rewards, fails the whole call."""

    def __init__(self, parts: Mapping[str, tuple[float, RewardFunction]]) -> None:
        self._weights = {name: weight for name, (weight, _) in parts.items()}
        self._functions = {name: function for name, (_, function) in parts.items()}

    async def __call__(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> Sequence[float]:
        """Raises RewardError that names the part."""
        try:
            async with asyncio.TaskGroup() as tasks:
                running = {
                    name: tasks.create_task(_part(name, function, prompt, completions, texts))
                    for name, function in self._functions.items()
                }
        except ExceptionGroup as failed:  # the first is the cause; the others were cancelled for it
            raise failed.exceptions[0] from failed
        return PartedRewards(self._weights, {name: task.result() for name, task in running.items()})


async def _part(
    name: str, function: RewardFunction, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
) -> tuple[float, ...]:
    try:
        return numbers(await function(prompt, completions, texts), len(completions))
    except Exception as error:
        raise RewardError(f"part {name!r} {said(error)}") from error


def _sum(terms: Sequence[float]) -> float:
    """NaN where a term is not finite: ``fsum`` raises on inf - inf, and on a finite sum that overflows."""
    return math.fsum(terms) if all(map(math.isfinite, terms)) and abs(sum(terms)) < math.inf else math.nan
