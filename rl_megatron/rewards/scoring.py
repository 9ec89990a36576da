"""One call of a reward function: bounded in time; what it does wrong is an answer, not an exception."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rl_megatron.interfaces import RewardFunction
from rl_megatron.rewards.own import numbers
from rl_megatron.rewards.threads import said
from rl_megatron.rewards.weighted_sum import PartedRewards
from rl_megatron.types import Completion, Prompt

_MOST_NAMED = 3  # completions without a finite reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What a reward gave the completions of one prompt."""

    rewards: tuple[float, ...]  # NaN where it failed
    problems: tuple[str, ...] = ()  # what went wrong, each thing once
    errors: int = 0  # completions without a reward
    parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # of a weighted sum, unweighted


async def score(
    function: RewardFunction,
    prompt: Prompt,
    completions: Sequence[Completion],
    texts: Sequence[str],
    *,
    limit: float,
) -> Scores:
    """Ask ``function``, for ``limit`` seconds (reward.timeout_seconds) at most."""
    count = len(completions)

    def failed(problem: str) -> Scores:
        return Scores(rewards=(math.nan,) * count, problems=(problem,), errors=count)

    try:
        async with asyncio.timeout(limit) as time:
            given = await function(prompt, completions, texts)
        rewards = numbers(given, count)
    except Exception as error:  # noqa: BLE001  whatever is raised is named and counted
        late = isinstance(error, TimeoutError) and time.expired()
        return failed(f"no answer in reward.timeout_seconds={limit:g}" if late else said(error))
    parts = given.parts if isinstance(given, PartedRewards) else {}
    finite = tuple(r if math.isfinite(r) else math.nan for r in rewards)
    bad = [i for i, r in enumerate(finite) if math.isnan(r)]
    problems = [f"completion {i} got {rewards[i]}, which is not finite{_culprits(parts, i)}" for i in bad[:_MOST_NAMED]]
    if len(bad) > _MOST_NAMED:
        problems.append(f"so did {len(bad) - _MOST_NAMED} more")
    return Scores(rewards=finite, problems=tuple(problems), errors=len(bad), parts=parts)


def _culprits(parts: Mapping[str, tuple[float, ...]], index: int) -> str:
    """The parts that gave completion ``index`` no finite number, in brackets."""
    named = [f"{name}: {values[index]}" for name, values in parts.items() if not math.isfinite(values[index])]
    return f" ({', '.join(named)})" if named else ""
