"""Groups with a demonstration: which teach, and what of a step's figures is of the sampled ones alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import torch

from rl_megatron.config.run import RunConfig
from rl_megatron.data.trajectories import single_turns
from rl_megatron.interfaces import Roles
from rl_megatron.observability.recorder import Row, Stopwatch
from rl_megatron.training.credit.shaping import groups_to_train_on
from rl_megatron.training.update import Update
from rl_megatron.types import RolloutGroup
from tests.completions import completion
from tests.rows import config_of
from tests.toy_roles import VOCABULARY, Toy, table
from tests.unit.training.test_update_oracle import groups, with_demonstrations

ENGINE = table(VOCABULARY, VOCABULARY, seed=4)


def row_of(sampled: list[RolloutGroup], **algorithm: Any) -> Row:
    given = {"algorithm": {"demonstration_gamma": 0.1, **algorithm}, "train": {"minibatches": 1, "max_staleness": 2}}
    policy, unused = Toy(table(VOCABULARY, VOCABULARY, seed=1)), Toy(torch.zeros(1))
    roles: Any = Roles(learners={"policy": policy}, frozen={}, engine=unused, weights=unused)
    update = Update(config=RunConfig.model_validate(given), roles=roles, attention_cost=0.0)
    return asyncio.run(update(sampled, 3, Stopwatch()))


def test_figures_of_engine_ratio_and_entropy_are_those_without_demonstrations() -> None:
    sampled = groups(3, ENGINE)
    found, wanted = row_of(with_demonstrations(sampled)), row_of(sampled)
    alike = [key for key in wanted if key.startswith(("mismatch/", "kl/", "ratio/", "clip_fraction", "entropy"))]
    assert {"mismatch/k1", "mismatch/ratio/v0", "kl/rollout", "kl/old_policy", "ratio/mean", "entropy"} <= {*alike}
    for key in alike:
        assert abs(found[key] - wanted[key]) < 1e-6, key  # type: ignore[operator]
    assert wanted["demonstration/share"] == 0
    assert "demonstration/probability" not in wanted
    tokens = sum(one.num_sampled for group in sampled for one in group.trajectories)
    assert abs(found["demonstration/share"] - 6 / (tokens + 6)) < 1e-6  # type: ignore[operator]


def test_a_step_of_demonstrations_alone_has_no_figures_of_the_others() -> None:
    cut = [
        single_turns(group.prompt, [completion([3], finish="length")] * 2, rewards=[0.0, 0.5])
        for group in groups(3, ENGINE)
    ]
    row = row_of(with_demonstrations(cut), drop_truncated=True)
    assert row["demonstration/share"] == 1
    assert row["grad_norm"] > 0  # type: ignore[operator]
    assert not [key for key in row if key.startswith(("ratio/", "clip_fraction", "entropy", "kl/old_policy"))]


def test_a_group_teaches_where_the_demonstration_differs_from_equal_completions() -> None:
    equal = [
        replace(group, trajectories=(replace(group.trajectories[0], reward=float(place % 2)),) * 2)
        for place, group in enumerate(groups(3, ENGINE))
    ]
    rewards = [
        [
            one.reward
            for one in (*group.trajectories, *(group.demonstration.trajectories if group.demonstration else ()))
        ]
        for group in with_demonstrations(equal)
    ]
    assert [len(each) for each in rewards] == [2, 3, 3, 3]
    section = config_of("luffy").algorithm
    found = groups_to_train_on(with_demonstrations(equal), section, max_new_tokens=6)
    assert found == [len(set(each)) > 1 for each in rewards]
    assert any(found)
    assert not any(groups_to_train_on(equal, section, max_new_tokens=6))
