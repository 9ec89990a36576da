"""Credit over turns: a single turn is the group's advantage, several are those of plain loops."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.data.samples import to_samples
from rl_megatron.data.trajectories import tokens_behind_prompt
from rl_megatron.errors import DataError
from rl_megatron.training.credit.assign import assign_credit
from rl_megatron.training.credit.shaping import groups_that_differ, shape_rewards
from rl_megatron.training.credit.state import AlgorithmState
from rl_megatron.types import Chain, RolloutGroup, Samples, Trajectory
from tests.turns import branched, group, groups, trajectory
from tests.unit.training.test_credit import GROUPS, advantages, credit

PLAIN = {"advantage_mean": "none", "advantage_std": "none"}


def by_turn(sampled: list[RolloutGroup], **section: Any) -> list[list[float]]:
    """The advantage of each turn of each trajectory, which all of its tokens have; others have 0."""
    samples, _ = credit({"credit": "turn", **section}, sampled, max_new_tokens=99)
    assert not samples.advantages[~samples.mask].any()
    rows = [(row, one) for g in sampled for one in g.trajectories for row in one.chains]
    out: dict[int, list[float]] = {}
    for (row, one), (first, _) in zip(rows, pairwise(samples.cu_seqlens.tolist()), strict=True):
        for turn in row.turns:
            said = samples.advantages[first + turn.start - 1 : first + turn.stop - 1]
            assert bool((said == said[0]).all())
            out.setdefault(id(one), []).append(float(said[0]))
    return list(out.values())


def in_plain_loops(
    sampled: list[RolloutGroup], *, gamma: float, mean: str, std: str, baseline: str
) -> list[list[float]]:
    """A_k = Σ_{j≥k} gamma^(j-k) (r_j - mean)/std, of rewards whose last has what the others leave of the whole."""
    out = []
    for g in sampled:
        rewards = [[turn.reward or 0.0 for turn in one.turns[:-1]] for one in g.trajectories]
        rewards = [[*r, one.reward - sum(r)] for r, one in zip(rewards, g.trajectories, strict=True)]
        for r in rewards:
            above = []
            for k, value in enumerate(r):
                peers = [x for other in rewards for j, x in enumerate(other) if baseline == "all" or j == k]
                equal = len({round(x, 9) for x in peers}) == 1
                centred = value - (statistics.fmean(peers) if mean == "group" else 0.0)
                scale = 0.0 if equal else 1 / (statistics.stdev(peers) + 1e-6)
                above.append(centred * (scale if std == "group" else 1.0))
            out.append([sum(gamma ** (j - k) * above[j] for j in range(k, len(r))) for k in range(len(r))])
    return out


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"gamma_turn": 0.0},
        {"gamma_turn": 0.3, "turn_baseline": "index"},
        {"advantage_std": "none", "leave_one_out": True},
        {"advantage_mean": "batch", "advantage_std": "batch"},
        {"advantage_std": "none", "advantage_mean": "none", "whiten": True},
        {"overlong_buffer": 3, "reward_scale": 0.7, "unfinished_reward": -0.3},
    ],
    ids=str,
)
def test_a_single_turn_has_the_advantage_of_its_completion_to_the_bit(section: dict[str, Any]) -> None:
    alone = {k: v for k, v in section.items() if k not in ("gamma_turn", "turn_baseline")}
    assert advantages(4, credit="turn", **section) == advantages(4, **alone)
    one = [group("a", [trajectory([3], rewards=[r], finish=f) for r, f in ((0.1, "stop"), (0.7, "length"))])]  # type: ignore[arg-type]
    assert advantages(4, one, credit="turn", **section) == advantages(4, one, **alone)


@pytest.mark.parametrize("baseline", ["all", "index"])
@pytest.mark.parametrize(("mean", "std"), [("group", "group"), ("group", "none"), ("none", "none"), ("none", "group")])
@pytest.mark.parametrize("gamma", [1.0, 0.5, 0.0])
def test_turns_are_those_of_plain_loops(gamma: float, mean: str, std: str, baseline: str) -> None:
    for seed in range(4):
        sampled = groups(seed)
        found = by_turn(sampled, gamma_turn=gamma, advantage_mean=mean, advantage_std=std, turn_baseline=baseline)
        wanted = in_plain_loops(sampled, gamma=gamma, mean=mean, std=std, baseline=baseline)
        for some, others in zip(found, wanted, strict=True):
            assert some == pytest.approx(others, rel=1e-5, abs=1e-6)


def test_turns_of_one_number_are_compared_within_their_group_alone() -> None:
    sampled = [
        group(name, [trajectory([1, 1, 1], rewards=[r, r + 2 * n, 3 * r]) for r in (0.0, 1.0)])
        for n, name in enumerate("abc")
    ]
    found = by_turn(sampled, gamma_turn=0.0, advantage_std="none", turn_baseline="index")
    assert found == [[-0.5, -0.5, -1.5], [0.5, 0.5, 1.5]] * 3


def test_three_turns_by_hand() -> None:
    sampled = [group("a", [trajectory([2, 1, 3], rewards=[1.0, None, 0.5], total=3.5)])]
    assert by_turn(sampled, gamma_turn=0.5, **PLAIN) == [[1 + 0.25 * 2.5, 0.5 * 2.5, 2.5]]


def test_without_discount_a_turns_reward_touches_that_turn_alone() -> None:
    def found(second: float) -> list[list[float]]:
        return by_turn([group("a", [trajectory([2, 1, 3], rewards=[1.0, second, 0.5])])], gamma_turn=0.0, **PLAIN)

    assert found(0.25) == [[1.0, 0.25, 0.5]]
    assert found(7.0) == [[1.0, 7.0, 0.5]]


def test_shaping_acts_on_the_last_turn_and_the_sum_is_the_shaped_reward() -> None:
    cut = trajectory([2, 1, 3], rewards=[1.0, 0.5, 0.25], finish="length")
    assert by_turn([group("a", [cut])], gamma_turn=0.0, reward_scale=0.5, **PLAIN) == [[0.5, 0.25, 0.125]]
    shaped = by_turn([group("a", [cut])], gamma_turn=0.0, unfinished_reward=-1.0, **PLAIN)
    assert shaped == [[1.0, 0.5, -2.5]]


def test_the_overlong_penalty_is_by_all_tokens_that_the_limit_counts() -> None:
    """Three turns of 8 and two observations of 3 tokens fill 30, in one row or in three, whose beginnings are alike."""
    row = AlgorithmSection(overlong_buffer=10, overlong_factor=0.5)
    whole, short = trajectory([8, 8, 8], total=1.0, finish="length"), trajectory([8, 8], total=1.0)
    sampled = [group("a", [whole, branched(whole), short])]
    shaped = shape_rewards(sampled, row, AlgorithmState(), max_new_tokens=30)
    assert shaped.values.tolist() == [0.5, 0.5, 1.0]
    other = replace(whole, chains=(*branched(whole).chains[:1], *trajectory([8], total=1.0, seed=5).chains))
    assert tokens_behind_prompt(other) == 8 + 8  # of a second row with another first token, the prompt of 2 is known


def test_equal_rewards_of_turns_give_no_advantage() -> None:
    """0.1 three times and 0.1 twice are sums that float32 rounds apart."""
    alike = [trajectory([1, 2, 1], rewards=[0.1] * 3), trajectory([2, 2], rewards=[0.1] * 2)]
    assert by_turn([group("a", alike)]) == [[0.0] * 3, [0.0] * 2]


def test_groups_teach_if_two_of_their_compared_turns_differ() -> None:
    early, late = trajectory([1, 1], rewards=[1.0, 0.0]), trajectory([1, 1], rewards=[0.0, 1.0])
    sampled = [
        group("a", [early, late]),
        group("b", [early, early]),
        group("c", [trajectory([1, 1], rewards=[0.5] * 2)]),
    ]

    def teach(**section: object) -> list[bool]:
        return groups_that_differ(sampled, AlgorithmSection.model_validate(section), max_new_tokens=9)

    assert teach() == [False, False, False]
    assert teach(credit="turn") == [True, True, False]
    assert teach(credit="turn", turn_baseline="index") == [True, False, False]


@pytest.mark.parametrize("name", ["discounted", "gae"])
def test_a_gap_between_turns_is_as_if_it_were_not_there(name: str) -> None:
    """Three turns in one row, and the same tokens as one turn behind the prompt, with equal values."""
    section = {"credit": name, "gamma": 0.9, **PLAIN, "whiten": True, "lam_length_factor": 0.5} | (
        {"lam": 0.8} if name == "gae" else {}
    )
    section = {k: v for k, v in section.items() if name == "gae" or k != "lam_length_factor"}
    section.pop("lam", None)
    whole = [trajectory([3, 2, 4], total=1.0), trajectory([1, 5, 1], total=0.25, finish="length", seed=3)]
    close = [closed(one) for one in whole]
    of_gaps, without = (to_samples([group("a", one)]) for one in (whole, close))
    values = torch.randn(int(without.mask.sum()), generator=torch.Generator().manual_seed(1))
    found = []
    for samples, trajectories in ((of_gaps, whole), (without, close)):
        old = torch.full((len(samples.mask),), math.nan)
        old[samples.mask] = values
        algorithm, sampled = AlgorithmSection.model_validate(section), [group("a", trajectories)]
        rewards = shape_rewards(sampled, algorithm, AlgorithmState(), max_new_tokens=99)
        made, _ = assign_credit(
            replace(samples, old_values=old),
            sampled,
            rewards,
            algorithm,
            success_reward=1.0,
            next_values=torch.tensor([0.3, -0.7]),
        )
        assert not made.advantages[~made.mask].any()
        found.append(made)
    assert of_gaps.mask.tolist() != without.mask.tolist()
    assert torch.equal(found[0].advantages[found[0].mask], found[1].advantages[found[1].mask])
    if name == "gae":
        assert found[0].returns is not None
        assert found[1].returns is not None
        assert torch.equal(found[0].returns[found[0].mask], found[1].returns[found[1].mask])


def closed(one: Trajectory) -> Trajectory:
    """The trajectory without the context between its turns: they are one."""
    (row,) = one.chains
    said = [token for turn in row.turns for token in row.token_ids[turn.start : turn.stop].tolist()]
    start = row.turns[0].start
    tokens = torch.tensor([*row.token_ids[:start].tolist(), *said], dtype=torch.int32).numpy()
    logprobs = torch.cat([torch.from_numpy(turn.logprobs.copy()) for turn in row.turns]).numpy()
    turn = replace(row.turns[-1], start=start, logprobs=logprobs)
    return replace(one, chains=(Chain(token_ids=tokens, turns=(turn,)),))


@pytest.mark.parametrize("name", ["discounted", "gae"])
def test_credit_from_token_to_token_is_refused_where_a_trajectory_has_several_rows(name: str) -> None:
    sampled = [group("a", [branched(trajectory([2, 3], total=1.0)), trajectory([1], total=0.0)])]
    with pytest.raises(DataError, match=rf"algorithm\.credit={name} .* several rows.* Set credit=completion or turn"):
        credit({"credit": name, **PLAIN}, sampled, next_values=torch.zeros(3), old_values=torch.zeros(14))


@pytest.mark.parametrize("section", [{}, {"credit": "turn", "gamma_turn": 0.5}], ids=str)
def test_a_branched_trajectory_has_the_advantages_of_one_row(section: dict[str, object]) -> None:
    whole = groups(5)
    apart = [replace(g, trajectories=tuple(branched(one) for one in g.trajectories)) for g in whole]
    (one, _), (other, _) = (credit(section, sampled, max_new_tokens=99) for sampled in (whole, apart))
    assert other.num_sequences > one.num_sequences
    assert torch.equal(trained(one), trained(other))


@pytest.mark.parametrize("baseline", ["all", "index"])
def test_turns_follow_each_other_as_they_were_sampled_whatever_the_order_of_their_rows(baseline: str) -> None:
    rng, sampled, mixed, orders = random.Random(7), groups(5), list[RolloutGroup](), list[list[int]]()
    for g in sampled:
        apart = []
        for one in map(branched, g.trajectories):
            numbered = [replace(c, turns=(replace(c.turns[0], number=n),)) for n, c in enumerate(one.chains)]
            orders.append(rng.sample(range(len(numbered)), len(numbered)))
            apart.append(replace(one, chains=tuple(numbered[n] for n in orders[-1])))
        mixed.append(replace(g, trajectories=tuple(apart)))
    assert any(order != sorted(order) for order in orders)
    section = {"gamma_turn": 0.5, "turn_baseline": baseline}
    wanted, found = by_turn(sampled, **section), by_turn(mixed, **section)
    assert found == [[of[n] for n in order] for of, order in zip(wanted, orders, strict=True)]


def trained(samples: Samples) -> torch.Tensor:
    return samples.advantages[samples.mask]


def test_samples_of_single_turns_have_no_ids() -> None:
    samples = to_samples(GROUPS)
    assert samples.group_of is samples.trajectory_of is samples.turn_of is samples.token_weight is None
    assert set(samples.columns) == {
        "input_ids", "targets", "mask", "advantages", "rollout_logprobs", "old_logprobs",
    }  # fmt: skip


def test_ids_number_prompts_trajectories_and_turns() -> None:
    one, other = trajectory([2, 1]), trajectory([1])
    samples = to_samples([group("a", [branched(one), other]), group("b", [one])], groups_of=True, turns_of=True)
    assert samples.group_of is not None
    assert samples.trajectory_of is not None
    assert samples.turn_of is not None
    assert samples.group_of.tolist() == [0, 0, 0, 1]
    assert samples.trajectory_of.tolist() == [0, 0, 1, 2]
    assert samples.turn_of[samples.mask].tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert not samples.turn_of[~samples.mask].any()
