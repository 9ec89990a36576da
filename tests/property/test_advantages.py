"""Group advantages, GAE, returns and whitening against plain Python over ragged groups and sequences."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_megatron.algorithms.advantages import group_advantages, moving_baseline, remax_advantages
from rl_megatron.algorithms.returns import (
    discounted_returns,
    gae,
    has_gaps,
    last_token_rewards,
    length_adaptive_lambda,
    less_optimal_baseline,
    whiten,
)
from rl_megatron.algorithms.segments import discounted_sum, whole_sequences

seeds = st.integers(0, 2**32)
sizes = st.lists(st.integers(1, 6), min_size=1, max_size=6)
levels = st.sampled_from(["none", "group", "batch"])
quick = settings(max_examples=150, deadline=None, derandomize=True)
fewer = settings(max_examples=100, deadline=None, derandomize=True)


def draw(seed: int, group_sizes: list[int]) -> tuple[list[float], list[int]]:
    """Rewards of shuffled ragged groups with ids that are neither dense nor sorted; some groups are all equal."""
    rng, pairs = random.Random(seed), []
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
            value = 0.0 if (len({rewards[j] for j in peers[mean]}) == 1) else reward - statistics.fmean(chosen)
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
            torch.zeros(size).long(),
            mean="group",
            std=std,
            leave_one_out=leave_one_out,
        )
        assert actual.tolist() == [0.0] * size


@fewer
@given(seeds, st.integers(2, 8), st.sampled_from([1e-3, 0.3, 1.0, 100.0, -7e4]))
def test_rewards_that_differ_by_rounding_alone_give_exactly_zero(seed: int, size: int, reward: float) -> None:
    """Each division, by a std or a batch's std, would make rounding an advantage of about 1."""
    rng = random.Random(seed)
    noise = [rng.choice([-1, 0, 1]) * 2.0**-23 for _ in range(size)]
    rewards = torch.tensor([reward * (1 + one) for one in noise])
    ids, cu_seqlens, every = torch.zeros(size).long(), torch.arange(size + 1), torch.ones(size, dtype=torch.bool)
    for std, best_of in (("none", 1), ("group", 1), ("batch", 1), ("advantages", 1), ("none", 2), ("group", 2)):
        given = {"mean": "group", "std": std, "leave_one_out": False, "best_of": best_of}
        assert not group_advantages(rewards, ids, **given).any(), given  # type: ignore[arg-type]  # of several types
    assert not whiten(rewards, every).any()
    assert not whiten(less_optimal_baseline(rewards, torch.rand(size), every, cu_seqlens, group_of=ids), every).any()
    assert not whiten(remax_advantages(rewards, rewards.flip(0)), every).any()


@fewer
@given(seeds, st.sampled_from([0.1, 1.0, 30.0]), st.sampled_from(["none", "group"]))
def test_whitening_leaves_zeros_of_equal_groups_at_zero(seed: int, scale: float, std: str) -> None:
    """The mean of other groups' advantages is 0 but for rounding, and is not to be subtracted from exact zeros."""
    rng = random.Random(seed)
    rewards = torch.tensor([scale] * 5 + [scale * rng.gauss(0, 1) for _ in range(15)])
    centered = group_advantages(rewards, torch.arange(20) // 5, mean="group", std=std, leave_one_out=False)
    found = whiten(centered, torch.ones(20, dtype=torch.bool))
    assert found[:5].tolist() == [0.0] * 5
    assert found[5:].double().std() == pytest.approx((14 / 19) ** -0.5, rel=0.02)


def test_no_rewards_give_no_advantages() -> None:
    empty = group_advantages(torch.zeros(0), torch.zeros(0).long(), mean="group", std="batch", leave_one_out=False)
    assert empty.shape == (0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_place(bad: float) -> None:
    with pytest.raises(ValueError, match=r"those at \[1\]"):
        group_advantages(torch.tensor([0.0, bad]), torch.zeros(2).long(), mean="group", std="none", leave_one_out=False)


def test_leaving_one_out_of_no_mean_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a mean"):
        group_advantages(torch.zeros(2), torch.zeros(2).long(), mean="none", std="group", leave_one_out=True)


# GAE, returns and whitening against a backward loop over the tokens of each sequence.
ragged = st.lists(st.integers(0, 9), min_size=1, max_size=5)
rates = st.sampled_from([0.0, 0.5, 0.99, 1.0])


def boundaries(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def draw_values(seed: int, lengths: list[int]) -> tuple[list[float], list[float], list[bool]]:
    """Rewards, values and mask, with gaps anywhere or behind prompts alone; NaN where masked out."""
    rng = random.Random(seed)
    prompts = [rng.randint(0, length) for length in lengths]
    behind_prompts = [t >= prompt for prompt, length in zip(prompts, lengths, strict=True) for t in range(length)]
    mask = behind_prompts if rng.random() < 0.5 else [rng.random() < 0.75 for _ in behind_prompts]
    rewards = [rng.gauss(0, 1) if kept else math.nan for kept in mask]
    return rewards, [rng.gauss(0, 1) if kept else math.nan for kept in mask], mask


@fewer
@given(seeds, ragged, rates, rates, st.booleans())
def test_gae_is_that_of_loops(seed: int, lengths: list[int], gamma: float, lam: float, lam_per_sequence: bool) -> None:
    rewards, values, mask = draw_values(seed, lengths)
    rng = random.Random(seed + 1)
    truncated = [rng.random() < 0.5 for _ in lengths]
    next_values = [rng.gauss(0, 1) if cut else math.nan for cut in truncated]
    lams = [rng.random() if lam_per_sequence else lam for _ in lengths]
    expected, start = [0.0] * sum(lengths), 0
    for s, length in enumerate(lengths):
        following, advantage = (next_values[s] if truncated[s] else 0.0), 0.0
        for t in reversed(range(start, start + length)):
            if mask[t]:
                advantage = rewards[t] + gamma * following - values[t] + gamma * lams[s] * advantage
                expected[t], following = advantage, values[t]
        start += length
    actual = gae(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(values, dtype=torch.float64),
        torch.tensor(mask, dtype=torch.bool),
        boundaries(lengths),
        next_values=torch.tensor(next_values, dtype=torch.float64),
        truncated=torch.tensor(truncated),
        gamma=gamma,
        lam=torch.tensor(lams, dtype=torch.float64) if lam_per_sequence else lam,
    )
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float32), rtol=1e-6, atol=1e-6)


@fewer
@given(seeds, ragged, rates)
def test_discounted_returns_equal_the_backward_loop(seed: int, lengths: list[int], gamma: float) -> None:
    rewards, _, mask = draw_values(seed, lengths)
    expected, start = [0.0] * sum(lengths), 0
    for length in lengths:
        total = 0.0
        for t in reversed(range(start, start + length)):
            if mask[t]:
                total = rewards[t] + gamma * total
                expected[t] = total
        start += length
    actual = discounted_returns(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(mask, dtype=torch.bool),
        boundaries(lengths),
        gamma=gamma,
    )
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float32), rtol=1e-6, atol=1e-6)


@settings(parent=fewer, max_examples=30)
@given(
    seeds,
    st.lists(st.sampled_from([0, 1, 5, 31, 32, 33, 64, 200, 1025]), min_size=1, max_size=5),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 0.99, 1.0]),
)
def test_sums_over_blocks_equal_loops(seed: int, lengths: list[int], each_its_own: bool, discount: float) -> None:
    rng = random.Random(seed)
    discounts = [rng.choice([0.0, 1.0, rng.random()]) if each_its_own else discount for _ in lengths]
    values = [rng.gauss(0, 1) for _ in range(sum(lengths))]
    expected, start = [0.0] * len(values), 0
    for length, own in zip(lengths, discounts, strict=True):
        total = 0.0
        for t in reversed(range(start, start + length)):
            expected[t] = total = values[t] + own * total
        start += length
    given_discounts = torch.tensor(discounts if each_its_own else [discount], dtype=torch.float64)
    before = torch.tensor(values, dtype=torch.float64)
    actual = discounted_sum(before, torch.tensor(lengths), given_discounts)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    assert before.tolist() == values


def test_a_batch_of_many_parts_is_its_sequences_one_by_one() -> None:
    g, lengths = torch.Generator().manual_seed(0), [750_000, 0, 7, 450_000, 500_001, 3]
    bounds = boundaries(lengths)
    assert len(list(whole_sequences(bounds))) > 2
    num = int(bounds[-1])
    rewards, values = (torch.randn(num, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(num, generator=g) < 0.9
    mask[:750_000] = True
    after, cut = torch.randn(len(lengths), generator=g), torch.tensor([True, False, True, False, True, False])

    def advantages(start: int, stop: int) -> torch.Tensor:
        part = slice(int(bounds[start]), int(bounds[stop]))
        return gae(
            rewards[part],
            values[part],
            mask[part],
            bounds[start : stop + 1] - bounds[start],
            next_values=after[start:stop],
            truncated=cut[start:stop],
            gamma=0.99,
            lam=0.95,
        )

    whole = advantages(0, len(lengths))
    assert torch.isfinite(whole).all()
    torch.testing.assert_close(whole, torch.cat([advantages(s, s + 1) for s in range(len(lengths))]))
    for trained in (mask, torch.ones_like(mask)):
        placed = last_token_rewards(torch.arange(1.0, 7.0), trained, bounds)
        ends = [a + trained[a:b].nonzero()[-1].item() for a, b in itertools.pairwise(bounds.tolist()) if b > a]
        assert placed.nonzero().flatten().tolist() == ends
        assert placed[ends].tolist() == [1.0, 3.0, 4.0, 5.0, 6.0]


def test_parts_are_of_half_a_million_positions() -> None:
    """In sequences of 1024: each part is whole ones, one after the other, and there is none more."""
    found = list(whole_sequences(torch.arange(0, 2**21 + 1, 1024)))
    assert found == [(slice(512 * i, 512 * (i + 1)), slice(2**19 * i, 2**19 * (i + 1))) for i in range(4)]


@pytest.mark.parametrize("more", [0, 7])
@pytest.mark.parametrize("num", [3, 32, 33, 64, 96, 1056])
def test_whole_blocks_are_summed_where_the_caller_has_room(num: int, more: int) -> None:
    """A fresh page costs more than the sums: none is taken where every segment is a number of blocks."""
    room = torch.zeros(num + more, dtype=torch.float64)
    half = torch.tensor([0.5], dtype=torch.float64)
    summed = discounted_sum(torch.ones(num, dtype=torch.float64), torch.tensor([num]), half, room=room)
    assert (summed.data_ptr() == room.data_ptr()) == (num % 32 == 0)
    assert summed.tolist() == pytest.approx([2 - 0.5 ** (num - 1 - t) for t in range(num)])


def test_gaps_are_masked_out_positions_behind_masked_in_ones_of_a_sequence() -> None:
    """All masks and all bounds of up to five positions, two of whose sequences may be empty."""
    for num in range(1, 6):
        for mask in itertools.product([False, True], repeat=num):
            for inner in itertools.combinations_with_replacement(range(num + 1), 2):
                bounds = (0, *inner, num)
                sequences = [mask[a:b] for a, b in itertools.pairwise(bounds)]
                expected = any(list(s) != sorted(s) for s in sequences)
                assert has_gaps(torch.tensor(mask), torch.tensor(bounds)) == expected, (mask, bounds)


def test_length_adaptive_lambda() -> None:
    mask = torch.ones(140, dtype=torch.bool)
    mask[:30] = False
    assert length_adaptive_lambda(mask, torch.tensor([0, 40, 140])).tolist() == pytest.approx([0.0, 0.8])


@fewer
@given(seeds, st.integers(0, 12))
def test_whitening_equals_plain_statistics(seed: int, num: int) -> None:
    values, _, mask = draw_values(seed, [num])
    kept = [v for v, m in zip(values, mask, strict=True) if m]
    actual = whiten(torch.tensor(values, dtype=torch.float64), torch.tensor(mask, dtype=torch.bool))
    expected = [0.0] * num
    if len(kept) > 1:
        center, std = statistics.fmean(kept), statistics.stdev(kept)
        expected = [(v - center) / (std + 1e-8) if m else 0.0 for v, m in zip(values, mask, strict=True)]
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float32), rtol=1e-5, atol=1e-6)


def test_baselines_of_remax_and_of_a_moving_mean() -> None:
    assert remax_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0.25, 1.0])).tolist() == [0.75, -1.0]
    assert moving_baseline(0.5, torch.tensor([1.0, 0.0, 1.0, 1.0]), decay=0.9) == pytest.approx(0.525)
