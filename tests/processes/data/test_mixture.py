"""Mixtures of sources: order, resume, ids, rewards of each source, and what is refused.

These tests start processes.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

from rl_megatron.config.sections.reward import RewardSection
from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.rewards.registry import resolve_rewards
from rl_megatron.rollout.batch import Drawn
from rl_megatron.rollout.sampler import RolloutSampler
from tests.unit.data.test_mixture import Engine, of


def test_a_prompt_is_scored_by_its_sources_reward_and_its_limits() -> None:
    own = {"b": RewardSection(function="math_verify"), "c": RewardSection(function="tests.never:here", on_error=-2.0)}
    sections = {name: one for name, one in own.items() if name != "c"}

    async def fails(*_: object) -> list[Any]:
        raise KeyError("price")

    function = resolve_rewards(RewardSection(), sections)
    function._own["c"] = fails  # type: ignore[attr-defined]
    sampler = RolloutSampler(
        engine=cast(Any, Engine()),
        reward_function=function,
        decode=lambda _: r"\frac{1}{2}",
        rollout=RolloutSection(group_size=2, max_new_tokens=9),
        reward=RewardSection(),
        stop_token_ids=(),
        seed=0,
        own_rewards=own,
    )
    prompts = [replace(one, answer="0.5") for name in "abc" for one in of(name, 1)]
    drawn = [Drawn(ordinal=i, prompt=prompt, batch=1) for i, prompt in enumerate(prompts)]
    answered = asyncio.run(sampler.groups(drawn))
    assert [one.rewards for one in answered] == [(0.0, 0.0), (1.0, 1.0), (-2.0, -2.0)]
