"""algorithm.old_kl_limit: a step makes no more optimizer steps of the policy once it is too far from the old one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.interfaces import Roles
from rl_megatron.observability.recorder import Row, Stopwatch
from rl_megatron.training.optimizer_steps import learning_rate
from rl_megatron.training.update import Update
from tests.toy_roles import VOCABULARY, Toy, table
from tests.unit.training.plain_update import PlainUpdate
from tests.unit.training.test_update_oracle import CRITIC, STEPS, groups

LIMIT = 0.002
ENGINE = table(VOCABULARY, VOCABULARY, seed=1) + 0.1 * table(VOCABULARY, VOCABULARY, seed=4)


def config_of(algorithm: dict[str, Any], **train: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "algorithm": {"old_kl_limit": LIMIT, **algorithm},
            "train": {"minibatches": 1, "learning_rate": 2.0, **train},
            "rollout": {"max_prompt_tokens": 2, "max_new_tokens": 6},
            "learner": {"max_tokens_per_micro_batch": 16},
        }
    )


class Rig:
    """Tables of a policy and, where it is needed, a critic, and their update."""

    def __init__(self, config: RunConfig) -> None:
        self.policy, self.critic = Toy(table(VOCABULARY, VOCABULARY, seed=1)), Toy(table(VOCABULARY, seed=2))
        learners = {"policy": self.policy, **({"critic": self.critic} if config.algorithm.needs_critic else {})}
        unused = Toy(torch.zeros(1))
        self.roles: Any = Roles(learners=learners, frozen={}, engine=unused, weights=unused)
        self.config = config
        self.update = Update(config=config, roles=self.roles, attention_cost=0.0)

    def step(self, number: int) -> Row:
        self.policy.heard.clear()
        self.critic.heard.clear()
        return asyncio.run(self.update(groups(number, ENGINE), number, Stopwatch()))

    def heard(self, of: Toy) -> list[str]:
        every: list[Any] = of.heard
        return [what for what, *_ in every if what in {"backward", "step", "drop"}]


@pytest.mark.parametrize("algorithm", [{}, CRITIC, {"old_logprobs": "rollout", "drop_truncated": True}])
@pytest.mark.parametrize("limit", [1e-6, LIMIT, 0.01, 9.0])
def test_epochs_end_where_those_of_plain_loops_do(algorithm: dict[str, Any], limit: float) -> None:
    """One minibatch an epoch, five epochs; a critic makes all of its steps."""
    config = config_of({**algorithm, "old_kl_limit": limit}, epochs=5)
    rig = Rig(config)
    plain = PlainUpdate(config, rig.policy.weights, torch.zeros_like(rig.policy.weights), rig.critic.weights)
    for number in STEPS:
        row = rig.step(number)
        plain.step(groups(number, ENGINE), number)
        assert row["steps/made"] == plain.steps_made
        assert rig.heard(rig.policy) == ["backward", "step"] * plain.steps_made + ["backward", "drop"] * (
            plain.steps_made < 5
        )
        assert ("kl/stopped_at" in row) == (plain.steps_made < 5)
        torch.testing.assert_close(rig.policy.weights.double(), plain.policy, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rig.critic.weights.double(), plain.critic, rtol=1e-4, atol=1e-5)


def test_limits_of_the_test_above_end_steps_at_different_epochs() -> None:
    made = [Rig(config_of({"old_kl_limit": limit}, epochs=5)).step(4)["steps/made"] for limit in (1e-6, LIMIT, 0.01)]
    assert made == [1, 2, 4]


def test_minibatches_behind_the_limit_are_left_out_and_the_rate_is_the_steps_own() -> None:
    """Of two epochs of three minibatches; each step begins afresh, in a process that knows nothing of before."""
    config = config_of({}, minibatches=3, epochs=2, lr_decay="linear", steps=10)
    whole, again, made = Rig(config), Rig(config), []
    for number in (1, 2, 3):
        row = whole.step(number)
        count = row["steps/made"]
        assert isinstance(count, int)
        made.append(count)
        assert whole.heard(whole.policy) == ["backward", "step"] * count + ["backward", "drop"] * (count < 6)
        rates = {one[1] for one in whole.policy.heard if isinstance(one, tuple) and one[0] == "step"}
        assert rates == {learning_rate(config, number)} == {row["learning_rate"]}
        assert row["learning_rate"] == pytest.approx(2.0 * (11 - number) / 10)
        if count < 6:
            assert float(str(row["kl/stopped_at"])) > LIMIT
        again.update = Update(config=config, roles=again.roles, attention_cost=0.0)
        assert {**again.step(number)} == row
        assert torch.equal(again.policy.weights, whole.policy.weights)
    assert 1 < min(made) < 6, made


def test_work_is_that_of_the_minibatches_that_were_computed() -> None:
    config = config_of({"old_kl_limit": 1e-6}, minibatches=4)
    rig = Rig(config)
    rig.update.training_flops = lambda lengths: float(sum(lengths))
    row = rig.step(3)
    assert row["steps/made"] == 1
    assert rig.heard(rig.policy) == ["backward", "step", "backward", "drop"]
    whole = Rig(config_of({"old_kl_limit": 9.0}, minibatches=4)).step(3)
    assert row["flops/train"] == row["tokens/train"]
    assert float(str(row["tokens/train"])) < float(str(whole["tokens/train"]))


def test_a_batch_that_is_too_far_at_once_changes_nothing_and_says_so() -> None:
    """The old policy is the engine's, another one by far; the next batch may be near again."""
    config = config_of({"old_logprobs": "rollout", "old_kl_limit": 1e-4}, epochs=2)
    rig = Rig(config)
    before = rig.policy.weights.clone()
    row = rig.step(3)
    assert torch.equal(rig.policy.weights, before)
    assert row["steps/made"] == 0
    assert row["steps/skipped"] == 0
    assert rig.heard(rig.policy) == ["backward", "drop"]
    assert "loss" not in row


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["algorithm=grpo", "train.minibatches=1"], r"old_kl_limit=0\.1 does nothing: with train\.epochs=1 and"),
        (["algorithm=dpo"], r"old_kl_limit=0\.1 does nothing: algorithm\.preference\.beta"),
        (
            ["algorithm=decoupled_ppo", "algorithm.old_logprobs=interpolated"],
            r"old_logprobs=interpolated does not read it, algorithm\.old_logprobs=learner or rollout does",
        ),
        (["algorithm=grpo", "algorithm.old_kl_limit=0"], r"old_kl_limit"),
    ],
)
def test_a_limit_that_cannot_act_is_refused(keys: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", ["algorithm.old_kl_limit=0.1", *keys])
