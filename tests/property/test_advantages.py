"""Group advantages against plain Python statistics over ragged groups in any order."""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_megatron.algorithms.advantages import group_advantages

seeds = st.integers(0, 2**32)
sizes = st.lists(st.integers(1, 6), min_size=1, max_size=6)
levels = st.sampled_from(["none", "group", "batch"])
quick = settings(max_examples=150, deadline=None, derandomize=True)


def draw(seed: int, group_sizes: list[int]) -> tuple[list[float], list[int]]:
    """Rewards of shuffled ragged groups with ids that are neither dense nor sorted; some groups are all equal."""
    rng = random.Random(seed)
    pairs = []
    for group, size in enumerate(group_sizes):
        kind = rng.choice(["equal", "binary", "real"])
        equal = rng.choice([0.0, 0.1, 1.0])
        for _ in range(size):
            reward = {"equal": equal, "binary": float(rng.random() < 0.5), "real": rng.gauss(0, 10)}[kind]
            pairs.append((reward, 1000 - 7 * group))
    rng.shuffle(pairs)
    return [reward for reward, _ in pairs], [group for _, group in pairs]


def reference(
    rewards: list[float],
    groups: list[int],
    *,
    mean: str,
    std: str,
    leave_one_out: bool,
    eps: float = 1e-6,
    unbiased: bool = True,
) -> list[float]:
    members: dict[int, list[int]] = defaultdict(list)
    for i, group in enumerate(groups):
        members[group].append(i)
    everyone = list(range(len(rewards)))
    spread = statistics.stdev if unbiased else statistics.pstdev
    out = []
    for i, reward in enumerate(rewards):
        peers = {"none": [], "group": members[groups[i]], "batch": everyone}
        value = reward
        if mean != "none":
            chosen = [rewards[j] for j in peers[mean] if not (leave_one_out and j == i)]
            equal = len({rewards[j] for j in peers[mean]}) == 1
            value = 0.0 if equal else reward - statistics.fmean(chosen)
        if std not in {"none", "advantages"}:
            chosen = [rewards[j] for j in peers[std]]
            if len(set(chosen)) == 1:
                value = 0.0
            else:
                value /= spread(chosen) + eps
        out.append(value)
    if std == "advantages":
        scale = spread(out) + eps if len(set(out)) > 1 else math.inf
        out = [value / scale for value in out]
    return out


@quick
@given(seeds, sizes, levels, levels, st.booleans(), st.sampled_from([1e-8, 1e-4, 0.5]), st.booleans())
def test_equals_plain_statistics(
    seed: int, group_sizes: list[int], mean: str, std: str, leave_one_out: bool, eps: float, unbiased: bool
) -> None:
    rewards, groups = draw(seed, group_sizes)
    of_advantages = mean == std == "group" and seed % 2 == 0
    options: dict[str, Any] = {
        "mean": mean,
        "std": "advantages" if of_advantages else std,
        "leave_one_out": leave_one_out and mean != "none",
        "eps": eps,
        "unbiased": unbiased,
    }
    actual = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), **options)
    assert actual.dtype == torch.float32
    expected = torch.tensor(reference(rewards, groups, **options), dtype=torch.float32)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@quick
@given(st.sampled_from([0.1, 1 / 3, 1e8 + 0.1, -7.3]), st.integers(1, 9), st.booleans())
def test_equal_rewards_give_exactly_zero(reward: float, size: int, leave_one_out: bool) -> None:
    """A mean of equal floats may differ from them by rounding; divided by a rounding-sized std that would be ±1."""
    for std in ("none", "group", "batch", "advantages"):
        actual = group_advantages(
            torch.full((size,), reward, dtype=torch.float64),
            torch.zeros(size, dtype=torch.int64),
            mean="group",
            std=std,
            leave_one_out=leave_one_out,
        )
        assert actual.tolist() == [0.0] * size


@quick
@given(seeds, st.integers(2, 8))
def test_rloo_is_dr_grpo_times_g_over_g_minus_one(seed: int, size: int) -> None:
    rewards = torch.tensor([random.Random(seed + i).gauss(0, 1) for i in range(size)])
    groups = torch.zeros(size, dtype=torch.int64)
    rloo = group_advantages(rewards, groups, mean="group", std="none", leave_one_out=True)
    dr_grpo = group_advantages(rewards, groups, mean="group", std="none", leave_one_out=False)
    torch.testing.assert_close(rloo, dr_grpo * size / (size - 1))
    others = [(rewards.sum() - r) / (size - 1) for r in rewards]
    torch.testing.assert_close(rloo, rewards - torch.stack(others), rtol=1e-5, atol=1e-6)


def test_grpo_of_a_group_of_four() -> None:
    """Mean 0.25, unbiased std 0.5."""
    advantages = group_advantages(
        torch.tensor([1.0, 0, 0, 0]), torch.zeros(4, dtype=torch.int64), mean="group", std="group", leave_one_out=False
    )
    assert advantages.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


def test_a_std_of_advantages_is_of_what_the_groups_means_leave() -> None:
    """Groups of 0, 1 and 10, 12: advantages ±1/2 and ±1, whose variance is 2.5/4 over n and 2.5/3 over n - 1."""
    rewards, groups = torch.tensor([0.0, 1, 10, 12]), torch.tensor([0, 0, 1, 1])
    for unbiased, variance in ((False, 2.5 / 4), (True, 2.5 / 3)):
        found = group_advantages(
            rewards, groups, mean="group", std="advantages", leave_one_out=False, eps=0.25, unbiased=unbiased
        )
        scale = math.sqrt(variance) + 0.25
        assert found.tolist() == pytest.approx([-0.5 / scale, 0.5 / scale, -1 / scale, 1 / scale])


def test_no_rewards_give_no_advantages() -> None:
    empty = group_advantages(
        torch.zeros(0), torch.zeros(0, dtype=torch.int64), mean="group", std="batch", leave_one_out=False
    )
    assert empty.shape == (0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_place(bad: float) -> None:
    with pytest.raises(ValueError, match=r"those at \[1\]"):
        group_advantages(
            torch.tensor([0.0, bad]), torch.zeros(2, dtype=torch.int64), mean="group", std="none", leave_one_out=False
        )


def test_leaving_one_out_of_no_mean_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a mean"):
        group_advantages(
            torch.zeros(2), torch.zeros(2, dtype=torch.int64), mean="none", std="group", leave_one_out=True
        )
