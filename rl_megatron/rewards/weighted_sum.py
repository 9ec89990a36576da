"""Adds several rewards by weight, and keeps each part by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rl_megatron.config.sections.reward import RewardPart
from rl_megatron.errors import RewardError, together
from rl_megatron.interfaces import RewardFunction
from rl_megatron.rewards.scoring import queued, running
from rl_megatron.types import Completion, Prompt, Scored
from rl_megatron.user_code import describe_error


class WeightedSum:
    """Scores with all parts concurrently. A part that raises fails the whole call."""

    def __init__(self, functions: Mapping[str, RewardFunction], parts: Mapping[str, RewardPart]) -> None:
        """Both by the parts' names."""
        self._functions, self._parts = functions, parts

    async def __call__(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Scored]:
        """Raises RewardError that names the part."""
        with queued():
            async with together() as tasks:
                parts = [
                    tasks.create_task(_part(name, function, prompt, completions, texts))
                    for name, function in self._functions.items()
                ]
        by_completion = zip(*(task.result() for task in parts), strict=True)
        return [self._sum(dict(zip(self._functions, totals, strict=True))) for totals in by_completion]

    def _sum(self, given: Mapping[str, float]) -> Scored:
        """NaN if a term is not finite: ``fsum`` raises on inf - inf, and on a finite sum that overflows."""
        parts = {name: value if self._counts(name, given) else 0.0 for name, value in given.items()}
        terms = [self._parts[name].weight * value for name, value in parts.items()]
        finite = all(map(math.isfinite, terms)) and abs(sum(terms)) < math.inf
        return Scored(total=math.fsum(terms) if finite else math.nan, parts=parts)

    def _counts(self, name: str, given: Mapping[str, float]) -> bool:
        """Whether all that the part's ``when`` names are enough; one that is not finite is shown as it is."""
        return not math.isfinite(given[name]) or all(given[o] >= least for o, least in self._parts[name].when.items())


async def _part(
    name: str, function: RewardFunction, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
) -> list[float]:
    try:
        with running():
            return [one.total for one in await function(prompt, completions, texts)]
    except Exception as error:
        raise RewardError(f"part {name!r} {describe_error(error)}") from error
