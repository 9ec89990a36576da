"""Resolves ``reward.function``: registered names, the user's own functions, servers, models, and sums of these."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

from rl_megatron.config.sections.reward import RANKS, RewardSection, reward_key
from rl_megatron.config.sections.sandbox import SandboxSection
from rl_megatron.errors import ConfigError
from rl_megatron.interfaces import RewardFunction
from rl_megatron.rewards.by_source import BySource
from rl_megatron.rewards.classifiers.in_process import ClassifierReward
from rl_megatron.rewards.classifiers.on_ranks import RankedReward, RewardModels
from rl_megatron.rewards.exact_match import exact_match
from rl_megatron.rewards.final_number import final_number
from rl_megatron.rewards.format import format_reward
from rl_megatron.rewards.http import HttpReward
from rl_megatron.rewards.length import length_reward
from rl_megatron.rewards.math_verify import math_verify
from rl_megatron.rewards.tests import PassedTests
from rl_megatron.rewards.threads import Async, Plain
from rl_megatron.rewards.weighted_sum import WeightedSum
from rl_megatron.sandbox.table import Sandbox
from rl_megatron.user_code import load_named

REWARDS: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "final_number": final_number,
    "math_verify": math_verify,
}
CONFIGURED: dict[str, Callable[[RewardSection], RewardFunction]] = {
    "format": format_reward,
    "length": length_reward,
}


def resolve_rewards(
    reward: RewardSection,
    of_sources: Mapping[str, RewardSection],
    sandbox: SandboxSection | None = None,
    models: RewardModels | None = None,
) -> RewardFunction:
    """The run's reward, and those ``of_sources`` and sets that have their own. Raises as `resolve_reward`."""
    shared = Sandbox(sandbox or SandboxSection())
    own = {name: resolve_reward(one, reward_key(name), shared, models) for name, one in of_sources.items()}
    run = resolve_reward(reward, "reward", shared, models)
    return BySource(run, own) if own else run


def resolve_reward(
    reward: RewardSection | str,
    key: str = "reward",
    sandbox: Sandbox | None = None,
    models: RewardModels | None = None,
) -> RewardFunction:
    """The reward function of a section, or of a ``reward.function`` with default options.

    A function is a registered name, an http:// or https:// URL, ``hf:<folder>`` of a sequence classifier (loaded here),
    ``ranks:<name>`` of one on the run's ranks, or ``package.module:function``. Your own takes (prompt, completions,
    texts) and returns one float per completion; it may be ``async``, else it runs in a thread and may block. A section
    with parts becomes their weighted sum.
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
        return _own(name, key, section)
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


def _own(path: str, key: str, section: RewardSection) -> RewardFunction:
    function = load_named(path, key, "function", callable)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return Async(function, steps=section.steps)
    return Plain(function, steps=section.steps)
