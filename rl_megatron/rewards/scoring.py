"""One call of a reward function: bounded in time, and whatever it does wrong is told, not raised."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rl_megatron.interfaces import RewardFunction
from rl_megatron.rewards.weighted_sum import PartedRewards
from rl_megatron.types import Completion, Prompt


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
        async with asyncio.timeout(limit):
            given = await function(prompt, completions, texts)
        rewards = tuple(float(r) for r in given)
    except TimeoutError:
        return failed(f"no answer in reward.timeout_seconds={limit:g}")
    except Exception as error:  # noqa: BLE001  the user's code: whatever it raises is named and counted
        return failed(f"raised {type(error).__name__}: {error}")
    if len(rewards) != count:
        return failed(f"gave {len(rewards)} rewards for {count} completions; one for each is wanted")
    parts = given.parts if isinstance(given, PartedRewards) else {}
    problems = tuple(
        f"completion {i} got {r}, which is not finite{_culprits(parts, i)}"
        for i, r in enumerate(rewards)
        if not math.isfinite(r)
    )
    finite = tuple(r if math.isfinite(r) else math.nan for r in rewards)
    return Scores(rewards=finite, problems=problems, errors=len(problems), parts=parts)


def _culprits(parts: Mapping[str, tuple[float, ...]], index: int) -> str:
    """The parts that gave completion ``index`` no finite number, in brackets."""
    named = [f"{name}: {values[index]}" for name, values in parts.items() if not math.isfinite(values[index])]
    return f" ({', '.join(named)})" if named else ""
