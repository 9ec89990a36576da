"""Rules over several sections: what would train on nothing, or do nothing, is refused with its reason."""

from __future__ import annotations

import pytest

from rl_megatron import config_io
from rl_megatron.errors import ConfigError

ONE = "rollout.group_size=1"
SINGLE = [ONE, "rollout.prompts_per_step=1", "train.minibatches=1"]
REFILL = "rollout.dynamic_sampling=refill"


def problem(*keys: str) -> str | None:
    try:
        config_io.load("tiny_cpu", list(keys))
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["algorithm=grpo", ONE], "group_size=1 with algorithm.advantage_mean=group, algorithm.advantage_std=group: "),
        (["algorithm=rloo", ONE], "group_size=1 with algorithm.advantage_mean=group: "),
        (["algorithm=liteppo", "algorithm.advantage_mean=batch", "algorithm.advantage_std=group", ONE], "std=group: "),
        (["algorithm=reinforce", *SINGLE], "group_size=1 with algorithm.advantage_mean=batch: "),
        (
            ["algorithm=reinforce", "algorithm.advantage_mean=none", "algorithm.whiten=true", *SINGLE],
            "group_size=1 with algorithm.whiten=true: ",
        ),
        (["algorithm=ppo", REFILL], "from which algorithm.credit=gae learns"),
        (["algorithm=remax", REFILL], "from which algorithm.advantage_mean=greedy learns"),
        (["algorithm=reinforce", "rollout.dynamic_sampling=drop"], "from which algorithm.advantage_mean=batch learns"),
        (
            ["algorithm=grpo", REFILL, "algorithm.kl.coefficient=0.1", "algorithm.kl.placement=completion_reward"],
            "from which algorithm.kl.placement=completion_reward learns",
        ),
    ],
)
def test_groups_that_teach_nothing_and_those_that_do_are_not_mistaken(keys: list[str], reason: str) -> None:
    assert reason in (problem(*keys) or "")


@pytest.mark.parametrize(
    "keys",
    [
        ["algorithm=reinforce", ONE],
        ["algorithm=ppo", ONE],
        ["algorithm=remax", *SINGLE],
        ["algorithm=reinforce_plus_plus", "algorithm.gamma=0.9", *SINGLE],
        ["algorithm=grpo", REFILL],
        ["algorithm=dpo", REFILL],
        ["algorithm=reinforce", "algorithm.advantage_mean=none", REFILL],  # REINFORCE-Rej, arXiv:2504.11343
    ],
)
def test_groups_of_one_and_filters_are_taken_where_they_mean_something(keys: list[str]) -> None:
    assert problem(*keys) is None
