"""Calls a reward function within a time limit, and returns its failures as results instead of raising."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

from rl_megatron.interfaces import LARGEST_REWARD, RewardFunction
from rl_megatron.types import Completion, Prompt, Scored
from rl_megatron.user_code import describe_error

_MOST_NAMED = 3  # completions without a finite reward that a message names


async def score(
    function: RewardFunction,
    prompt: Prompt,
    completions: Sequence[Completion],
    texts: Sequence[str],
    *,
    limit: float,
) -> tuple[Scored, ...]:
    """Call ``function``, and wait at most ``limit`` seconds (reward.timeout_seconds).

    A completion without a finite reward gets the total NaN and an ``error`` that says why. If ``function`` raises or is
    ``late``, all completions get the same error.
    """
    try:
        async with asyncio.timeout(limit) as time:
            given = await function(prompt, completions, texts)
        return tuple(_finite(i, one) for i, (one, _) in enumerate(zip(given, completions, strict=True)))
    except Exception as error:  # noqa: BLE001  any exception is named and counted
        late = isinstance(error, TimeoutError) and time.expired()
        problem = f"no answer within reward.timeout_seconds={limit:g}" if late else describe_error(error)
        return (Scored(total=math.nan, error=problem, late=late),) * len(completions)


def errors_of(scored: Sequence[Scored]) -> list[str]:
    """The distinct errors of one prompt's completions, and how many more there are than are shown."""
    named = list(dict.fromkeys(one.error for one in scored if one.error is not None))
    more = [f"so did {len(named) - _MOST_NAMED} more"] if len(named) > _MOST_NAMED else []
    return named[:_MOST_NAMED] + more


def _finite(index: int, one: Scored) -> Scored:
    """Add an error if the total of completion ``index`` is not finite, or too large; it names the parts that are not
    finite."""
    if abs(one.total) <= LARGEST_REWARD:
        return one
    if math.isfinite(one.total):
        said = f"completion {index} got {one.total}, which is beyond {LARGEST_REWARD:g}"
        return replace(one, total=math.nan, error=said)
    parts = [f"{name}: {value}" for name, value in one.parts.items() if not math.isfinite(value)]
    named = f" ({', '.join(parts)})" if parts else ""
    return replace(one, total=math.nan, error=f"completion {index} got {one.total}, which is not finite{named}")
