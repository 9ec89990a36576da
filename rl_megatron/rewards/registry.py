"""Resolves ``reward.function``: registered names, custom functions, servers, models, and sums of these.

Scores completions by the reward of their prompt's source.

Adds several rewards by weight, and keeps each part by name.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rl_megatron.config.sections.reward import RANKS, RewardPart, RewardSection, SandboxSection, reward_key
from rl_megatron.errors import ConfigError, RewardError, task_group
from rl_megatron.interfaces import RewardFunction
from rl_megatron.rewards.classifiers.in_process import ClassifierReward
from rl_megatron.rewards.classifiers.on_ranks import RankedReward, RewardModels
from rl_megatron.rewards.http import HttpReward
from rl_megatron.rewards.rules import exact_match, final_number, format_reward, length_reward, math_verify
from rl_megatron.rewards.scoring import counted_call, paused_while_queued
from rl_megatron.rewards.tests import PassedTests
from rl_megatron.rewards.threads import Async, Plain, as_trl, is_trl
from rl_megatron.sandbox.executors import Sandbox
from rl_megatron.types import Completion, Prompt, RewardResult
from rl_megatron.user_code import describe_error, load_named


class WeightedSum:
    """Scores with all parts concurrently. A part that raises fails the whole call."""

    def __init__(self, functions: Mapping[str, RewardFunction], parts: Mapping[str, RewardPart]) -> None:
        """Takes both by the parts' names."""
        self._functions, self._parts = functions, parts

    async def __call__(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> list[RewardResult]:
        """Returns the sum of each completion's parts. Raises RewardError that names the part."""
        with paused_while_queued():
            async with task_group() as tasks:
                parts = [
                    tasks.create_task(_part(name, function, prompt, completions, texts))
                    for name, function in self._functions.items()
                ]
        by_completion = zip(*(task.result() for task in parts), strict=True)
        return [self._sum(dict(zip(self._functions, totals, strict=True))) for totals in by_completion]

    def _sum(self, answers: Mapping[str, float | None]) -> RewardResult:
        """Sums the parts that do not abstain; abstains if all with a weight do. NaN if a term is not finite: ``fsum``
        raises on inf - inf, and on a finite sum that overflows."""
        given = {name: value for name, value in answers.items() if value is not None}
        weighted = {name for name in answers if self._parts[name].weight}
        if weighted and weighted.isdisjoint(given):
            return RewardResult(total=math.nan, parts=given, abstains=True)
        parts = {name: value if self._counts(name, given) else 0.0 for name, value in given.items()}
        terms = [self._parts[name].weight * value for name, value in parts.items()]
        finite = all(map(math.isfinite, terms)) and abs(sum(terms)) < math.inf
        return RewardResult(total=math.fsum(terms) if finite else math.nan, parts=parts)

    def _counts(self, name: str, given: Mapping[str, float]) -> bool:
        """True if all parts in ``when`` reach their bounds, or if the part's value is not finite, which is shown."""
        bounds = self._parts[name].when.items()
        return not math.isfinite(given[name]) or all(given.get(other, -math.inf) >= least for other, least in bounds)


async def _part(
    name: str, function: RewardFunction, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
) -> list[float | None]:
    try:
        with counted_call():
            return [None if one.abstains else one.total for one in await function(prompt, completions, texts)]
    except Exception as error:
        raise RewardError(f"part {name!r} {describe_error(error)}") from error


class SourceReward:
    """The reward by a prompt's source; a source that is not in ``own`` has the reward ``otherwise``."""

    def __init__(self, otherwise: RewardFunction, own: Mapping[str, RewardFunction]) -> None:
        self._otherwise, self._own = otherwise, own

    async def __call__(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> Sequence[RewardResult]:
        """Scores with the reward of the prompt's source, and raises its exceptions."""
        return await self._own.get(prompt.source, self._otherwise)(prompt, completions, texts)


REWARDS: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "final_number": final_number,
    "math_verify": math_verify,
}
CONFIGURED: dict[str, Callable[[RewardSection], RewardFunction]] = {"format": format_reward, "length": length_reward}


def resolve_rewards(
    reward: RewardSection,
    of_sources: Mapping[str, RewardSection],
    sandbox: SandboxSection | None = None,
    models: RewardModels | None = None,
) -> RewardFunction:
    """Returns the run's reward, with those ``of_sources`` and sets that have one. Raises like `resolve_reward`."""
    shared = Sandbox(sandbox or SandboxSection())
    own = {name: resolve_reward(one, reward_key(name), shared, models) for name, one in of_sources.items()}
    run = resolve_reward(reward, "reward", shared, models)
    return SourceReward(run, own) if own else run


def resolve_reward(
    reward: RewardSection | str, key: str = "reward", sandbox: Sandbox | None = None, models: RewardModels | None = None
) -> RewardFunction:
    """Returns the reward function of a section, or of a ``reward.function`` with default options.

    A function is a registered name, an http:// or https:// URL, ``hf:<folder>`` of a sequence classifier (loaded here),
    ``ranks:<name>`` of one on the run's ranks, or ``package.module:function``. A custom one takes (prompt, completions,
    texts) or TRL's keywords, and returns a float or None per completion. It may be ``async``; otherwise it runs in a
    thread and may block. A section with parts becomes their weighted sum.
    Raises ConfigError that names the unknown function, after the section's ``key``, and the nearest known one.
    """
    section = RewardSection(function=reward) if isinstance(reward, str) else reward
    sandbox, models = sandbox or Sandbox(SandboxSection()), models or RewardModels()
    if not section.parts:
        return _function(section.function, section, f"{key}.function", sandbox, models)
    functions = {
        name: _function(function, section, f"{key}.parts.{name}.function", sandbox, models)
        for name, function in section.functions.items()
    }
    return WeightedSum(functions, section.parts)


def _function(name: str, section: RewardSection, key: str, sandbox: Sandbox, models: RewardModels) -> RewardFunction:
    if name == "tests":
        return PassedTests(section.tests, sandbox)
    if name.startswith(("http://", "https://")):
        return HttpReward(name, section.http, key=key)
    if name.startswith(RANKS):
        return RankedReward(name.removeprefix(RANKS), section.model, models, key=key)
    if name.startswith("hf:"):
        return ClassifierReward(Path(name.removeprefix("hf:")).expanduser(), section.model, key=key)
    if ":" in name:
        return _load_custom(name, key, section)
    if name in CONFIGURED:
        return CONFIGURED[name](section)
    if name not in REWARDS:
        known = [*REWARDS, *CONFIGURED, "tests"]
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"{key}={name!r:.200} is unknown; {hint}allowed: {', '.join(known)}, your own package.module:function, "
            "an http:// or https:// URL, hf:<folder of a sequence classifier>, or ranks:<name of reward_models>"
        )
    return REWARDS[name]


def _load_custom(path: str, key: str, section: RewardSection) -> RewardFunction:
    function = load_named(path, key, "function", callable)
    waits = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
    return (Async if waits else Plain)(as_trl(function) if is_trl(function) else function, steps=section.steps)
