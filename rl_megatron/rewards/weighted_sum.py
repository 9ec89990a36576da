"""Adds several rewards by weight, and keeps each part by name."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence

from rl_megatron.errors import RewardError
from rl_megatron.interfaces import RewardFunction
from rl_megatron.rewards.scoring import queued, running
from rl_megatron.types import Completion, Prompt, Scored
from rl_megatron.user_code import describe_error


class WeightedSum:
    """Scores with all parts concurrently. A part that raises fails the whole call."""

    def __init__(self, parts: Mapping[str, tuple[float, RewardFunction]]) -> None:
        self._weights = {name: weight for name, (weight, _) in parts.items()}
        self._functions = {name: function for name, (_, function) in parts.items()}

    async def __call__(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Scored]:
        """Raises RewardError that names the part."""
        try:
            with queued():
                async with asyncio.TaskGroup() as tasks:
                    parts = [
                        tasks.create_task(_part(name, function, prompt, completions, texts))
                        for name, function in self._functions.items()
                    ]
        except ExceptionGroup as failed:  # the first is the cause; it cancelled the others
            raise failed.exceptions[0] from failed
        by_completion = zip(*(task.result() for task in parts), strict=True)
        return [self._sum(dict(zip(self._weights, totals, strict=True))) for totals in by_completion]

    def _sum(self, parts: Mapping[str, float]) -> Scored:
        """NaN if a term is not finite: ``fsum`` raises on inf - inf, and on a finite sum that overflows."""
        terms = [self._weights[name] * value for name, value in parts.items()]
        finite = all(map(math.isfinite, terms)) and abs(sum(terms)) < math.inf
        return Scored(total=math.fsum(terms) if finite else math.nan, parts=parts)


async def _part(
    name: str, function: RewardFunction, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
) -> list[float]:
    try:
        with running():
            return [one.total for one in await function(prompt, completions, texts)]
    except Exception as error:
        raise RewardError(f"part {name!r} {describe_error(error)}") from error
