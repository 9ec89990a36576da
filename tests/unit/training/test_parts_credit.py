"""Advantages of each part of a reward (GDPO): its paper's equations, which groups teach, and what is refused."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.data.samples import to_samples
from rl_megatron.data.trajectories import single_turns
from rl_megatron.errors import ConfigError, DataError
from rl_megatron.training.credit.assign import assign_credit
from rl_megatron.training.credit.shaping import groups_that_differ, groups_to_train_on, shape_rewards
from rl_megatron.training.credit.state import AlgorithmState
from rl_megatron.types import Prompt, RolloutGroup
from tests.completions import completion
from tests.rows import BESIDE, config_of

WEIGHTS = {"right": 1.0, "short": 0.5, "seen": 0.0}
Parts = Mapping[str, Sequence[float]]


def group(name: str, parts: Parts, weights: Mapping[str, float] = WEIGHTS) -> RolloutGroup:
    """Completions of 1, 2, 3, … tokens, with these values of each part."""
    rows = [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
    of = [{part: (value, weights[part]) for part, value in row.items()} for row in rows]
    sampled = [completion(range(10, 11 + place)) for place, _ in enumerate(rows)]
    totals = [math.fsum(weights[part] * value for part, value in row.items()) for row in rows]
    prompt = Prompt(id=name, text=name, token_ids=(1, 2), answer="")
    return single_turns(prompt, sampled, ["x"] * len(rows), totals, of)


RIGHT, SHORT = [1.0, 0.0, 0.0, 1.0], [0.0, 0.5, 1.0, 1.0]
GROUPS = [
    group("a", {"right": RIGHT, "short": SHORT, "seen": [9.0, 0.0, 3.0, 1.0]}),
    group("b", {"right": [0.0, 0.0, 1.0, 0.0], "short": [1.0] * 4}),  # one part is equal, one is not there
]


def section(**row: object) -> AlgorithmSection:
    return AlgorithmSection.model_validate({"advantage_of": "parts", **row})


def advantages(row: AlgorithmSection, groups: Sequence[RolloutGroup] = GROUPS) -> list[float]:
    """Of completions, each of whose tokens has the same."""
    shaped = shape_rewards(groups, row, AlgorithmState(), max_new_tokens=9)
    samples, _ = assign_credit(to_samples(groups), groups, shaped, row, success_reward=1.0)
    found = []
    for start, stop in zip(samples.cu_seqlens[:-1], samples.cu_seqlens[1:], strict=True):
        (value,) = set(samples.advantages[start:stop][samples.mask[start:stop]].tolist())
        found.append(value)
    return found


def normalised(values: Sequence[float], others: bool = False) -> list[float]:
    """(r - mean) / std of one group, or with the mean of the others; 0 where all are equal."""
    spread, total, count = statistics.stdev(values), sum(values), len(values)
    means = [(total - value) / (count - 1) if others else total / count for value in values]
    return [(value - mean) / spread if spread else 0.0 for value, mean in zip(values, means, strict=True)]


def summed(others: bool = False) -> list[float]:
    """Equations 4 and 5 of arXiv:2601.05242, with its weights."""
    first = [a + 0.5 * b for a, b in zip(normalised(RIGHT, others), normalised(SHORT, others), strict=True)]
    return [*first, *normalised([0.0, 0.0, 1.0, 0.0], others)]


@pytest.mark.parametrize("others", [False, True])
def test_parts_are_normalised_over_their_group_before_they_are_added(others: bool) -> None:
    assert advantages(section(leave_one_out=others)) == pytest.approx(summed(others), rel=1e-5, abs=1e-6)


def test_the_row_normalises_the_sum_over_the_completions_of_the_batch() -> None:
    """Equation 6; over tokens, as before, long completions would weigh more."""
    row = config_of("gdpo").algorithm
    mean, spread = statistics.mean(summed()), statistics.stdev(summed())
    wanted = [(value - mean) / spread for value in summed()]
    assert advantages(row) == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    by_tokens = advantages(row.model_copy(update={"whiten_of": "tokens"}))
    assert by_tokens != pytest.approx(wanted, rel=1e-2)


def test_of_one_part_it_is_grpo_and_of_a_std_of_the_batch_each_part_has_its_own() -> None:
    alone = [group("a", {"right": RIGHT}), group("b", {"right": [0.0, 0.0, 1.0, 0.0]})]
    assert advantages(section(), alone) == advantages(AlgorithmSection(), alone)
    spread_of_right = statistics.stdev([*RIGHT, 0.0, 0.0, 1.0, 0.0])
    spread_of_short = statistics.stdev([*SHORT, 1.0, 1.0, 1.0, 1.0])
    wanted = [
        (a - 0.5) / spread_of_right + 0.5 * (b - 0.625) / spread_of_short for a, b in zip(RIGHT, SHORT, strict=True)
    ]
    assert advantages(section(advantage_std="batch"))[:4] == pytest.approx(wanted, rel=1e-5)
    other = replace(GROUPS[1], trajectories=alone[1].trajectories)  # of a source whose reward has no such part
    spread_of_short = statistics.stdev(SHORT)
    wanted = [
        (a - 0.5) / spread_of_right + 0.5 * (b - 0.625) / spread_of_short for a, b in zip(RIGHT, SHORT, strict=True)
    ]
    assert advantages(section(advantage_std="batch"), [GROUPS[0], other])[:4] == pytest.approx(wanted, rel=1e-5)


def test_a_mean_of_the_batch_is_over_the_completions_that_have_the_part() -> None:
    """So that without a std, too, it is not what the sums have, whose mean is over all."""
    other = group("b", {"right": [0.0, 0.0, 1.0, 0.0]})
    found = advantages(section(advantage_mean="batch", advantage_std="none"), [GROUPS[0], other])
    right, short = statistics.mean([*RIGHT, 0.0, 0.0, 1.0, 0.0]), statistics.mean(SHORT)
    wanted = [a - right + 0.5 * (b - short) for a, b in zip(RIGHT, SHORT, strict=True)]
    assert found == pytest.approx([*wanted, *(value - right for value in (0.0, 0.0, 1.0, 0.0))], rel=1e-5)


@pytest.mark.parametrize("std", ["group", "batch"])
def test_a_group_of_equal_totals_teaches_by_its_parts(std: str) -> None:
    """Unless its parts are equal, or cancel; a part of weight 0 is recorded alone."""
    same_total = group("total", {"right": [1.0, 0.0, 0.5], "short": [0.0, 2.0, 1.0]})
    equal = group("equal", {"right": [1.0, 1.0], "short": [0.5, 0.5], "seen": [0.0, 1e39]})
    cancels = group("cancels", {"right": [1.0, 0.3, 0.1], "short": [0.0, 0.7, 0.9]}, {"right": 0.7, "short": 0.7})
    differs = group("differs", {"right": [1.0, 0.0]})
    groups = [same_total, equal, cancels, differs]
    assert len(set(same_total.rewards)) == len(set(equal.rewards)) == 1
    assert groups_that_differ(groups, AlgorithmSection(), max_new_tokens=9)[0] is False
    row = section(advantage_std=std)
    assert groups_that_differ([], row, max_new_tokens=9) == []
    for found in (groups_that_differ, groups_to_train_on):
        assert found(groups, row, max_new_tokens=9) == [True, False, std == "batch", True]
    if std == "group":  # exactly: whitening would make rounding as large as other advantages
        assert advantages(row, [cancels]) == advantages(config_of("gdpo").algorithm, [cancels]) == [0.0] * 3
    assert max(map(abs, advantages(row, [same_total]))) > 0.2


def test_a_completion_without_parts_is_named() -> None:
    (one, *rest) = GROUPS[0].trajectories
    stored = replace(GROUPS[0], trajectories=(replace(one, parts={}), *rest))
    with pytest.raises(DataError, match=r"reward of prompt 'a' has no parts: .*start a new run, or set advantage_of="):
        advantages(section(), [GROUPS[1], stored])


P = "algorithm.advantage_of=parts"


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["advantage_std=none"], "advantage_std=none the sum of parts less their means is the sum less its mean"),
        (["advantage_mean=greedy", "advantage_std=none"], f"{P} with algorithm.advantage_mean=greedy: that baseline"),
        (["advantage_mean=moving"], f"{P} with algorithm.advantage_mean=moving: that baseline is of the sum"),
        (["advantage_mean=tracked"], f"{P} with algorithm.advantage_mean=tracked: that baseline is of the sum"),
        (["credit=turn"], f"{P} with algorithm.credit=turn: parts are compared with those of whole.*set credit=com"),
        (["credit=gae"], f"{P} with algorithm.credit=gae: .*a critic to be; set credit=completion or discounted"),
        (["credit=discounted"], "whiten_of=completions with credit=discounted: a completion has no one advantage"),
        (["normalise_rewards=group"], f"{P} with algorithm.normalise_rewards=group: it changes the sum"),
        (["reward_scale=2"], f"{P} with algorithm.reward_scale=2: it changes the sum"),
        (["unfinished_reward=0"], f"{P} with algorithm.unfinished_reward=0.0: it changes the sum"),
        (["overlong_buffer=2"], f"{P} with algorithm.overlong_buffer=2: it changes the sum.*make it a part"),
        (["kl.coefficient=0.1", "kl.placement=completion_reward"], "the KL is no part; set kl.placement=loss"),
        (["preference.beta=0.1"], "advantage_of=parts does nothing: .*trains on pairs without it"),
        (["whiten=false"], "whiten_of=completions does nothing"),
    ],
)
def test_what_is_of_the_sum_is_refused_with_its_reason(keys: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config_of("gdpo", *(f"algorithm.{key}" for key in keys))


SOURCES = ["data=mixture", "data.sources.sums.type=arithmetic", "data.sources.more.type=arithmetic"]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["algorithm=gdpo"], rf"{P} with reward\.function=exact_match: this reward has no parts.* in reward\.parts"),
        (
            ["algorithm=gdpo", *BESIDE["gdpo"], "reward.on_error=0.5"],
            rf"{P} with reward\.on_error=0\.5: that number is of the sum",
        ),
        (
            ["algorithm=gdpo", *BESIDE["gdpo"], *SOURCES, "data.sources.more.reward.function=format"],
            r"with data\.sources\.more\.reward\.function=format: this reward has no parts.*\.more\.reward\.parts",
        ),
    ],
)
def test_rewards_without_parts_are_refused_before_the_run(keys: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", keys)


def test_choices_that_mean_something_for_each_part_are_taken() -> None:
    for row in (
        ["leave_one_out=true"],
        ["advantage_std=batch"],
        ["advantage_std=advantages"],
        ["advantage_mean=batch"],
        ["whiten=false", "whiten_of=tokens", "credit=discounted"],
        ["objective=cispo"],
        ["drop_truncated=true"],
    ):
        config_of("gdpo", *(f"algorithm.{key}" for key in row))
    own = [f"data.sources.{name}.reward.parts.exact_match=1" for name in ("sums", "more")]
    config = load_config("tiny_cpu", ["algorithm=gdpo", *SOURCES, *own])  # the run's own reward judges nothing
    assert isinstance(config, RunConfig)
    unscaled = ["algorithm.advantage_std=none", "algorithm.advantage_mean=batch"]
    with pytest.raises(ConfigError, match="advantage_of=parts does nothing"):
        load_config("tiny_cpu", ["algorithm=gdpo", *SOURCES, *own, *unscaled])
    other = "data.sources.more.reward.parts.length=1"  # of which the mean is over this source alone
    assert isinstance(load_config("tiny_cpu", ["algorithm=gdpo", *SOURCES, *own, other, *unscaled]), RunConfig)
    with pytest.raises(ConfigError, match=r"environment\.function=calculator: an environment gives one reward"):
        load_config("calculator", ["algorithm=gdpo"])


def test_functions_of_your_own_get_one_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest of a group is 1, all others 0; which is no function of a sum's parts together."""
    module = type(torch)("largest_for_test")
    module.largest = lambda rewards: (rewards == rewards.max()).double()
    monkeypatch.setitem(__import__("sys").modules, "largest_for_test", module)
    row = section(advantage_mean="largest_for_test:largest", advantage_std="none")
    assert advantages(row)[:4] == [1.0, 0.0, 0.5, 1.5]
    assert groups_that_differ(GROUPS, row, max_new_tokens=9) == [True, True]
