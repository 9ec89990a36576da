"""Advantages by brute force and closed forms: best of k, the optimal token baseline, and shaped rewards."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from rl_megatron.algorithms.advantages import group_advantages
from rl_megatron.algorithms.returns import (
    drop_truncated,
    less_optimal_baseline,
    overlong_penalty,
    set_unfinished_rewards,
)
from rl_megatron.config.io import load_config
from rl_megatron.data.samples import single_turns
from rl_megatron.errors import ConfigError
from rl_megatron.training.credit import groups_with_gradient
from rl_megatron.types import Prompt
from tests.completions import completion
from tests.rows import config_of


def by_subsets(rewards: list[float], k: int, *, leave_one_out: bool, std: bool, unbiased: bool = True) -> list[float]:
    """Of one group."""
    subsets = [set(one) for one in itertools.combinations(range(len(rewards)), k)]
    bests, out = [max(rewards[i] for i in one) for one in subsets], []
    for i in range(len(rewards)):
        mine = [one for one in subsets if i in one]
        value = statistics.fmean(max(rewards[j] for j in one) for one in mine)
        value -= (
            statistics.fmean(max(rewards[j] for j in one - {i}) for one in mine)
            if leave_one_out
            else (statistics.fmean(bests))
        )
        scale = rewards if leave_one_out else bests
        if std:
            spread = statistics.stdev(scale) if unbiased else statistics.pstdev(scale)
            value = value / (spread + 1e-6) if len(set(scale)) > 1 else 0.0
        out.append(value)
    return out


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize(("std", "unbiased"), [("none", True), ("group", True), ("group", False)])
@pytest.mark.parametrize("k", [2, 3, 5])
def test_it_is_the_mean_over_all_subsets(k: int, std: str, unbiased: bool, leave_one_out: bool) -> None:
    """Of groups of several sizes in any order: rewards of 0 and 1, real ones, and some that are equal."""
    rng = random.Random(k)
    kinds = [lambda: float(rng.random() < 0.5), lambda: rng.gauss(0, 3), lambda: rng.choice([0.1, 0.2, 0.3])]
    told = [[kind() for _ in range(size)] for size in (6, 8, 6) for kind in kinds] + [[0.1] * 7]
    placed = [(number, i) for number, one in enumerate(told) for i in range(len(one))]
    rng.shuffle(placed)
    found = group_advantages(
        torch.tensor([told[g][i] for g, i in placed], dtype=torch.float64),
        torch.tensor([90 - 7 * g for g, _ in placed]),
        mean="group",
        std=std,
        leave_one_out=leave_one_out,
        unbiased=unbiased,
        best_of=k,
    )
    wanted = [by_subsets(one, k, leave_one_out=leave_one_out, std=std == "group", unbiased=unbiased) for one in told]
    assert found.tolist() == pytest.approx([wanted[g][i] for g, i in placed], rel=1e-5, abs=1e-6)
    assert all(found[place] == 0 for place, (g, _) in enumerate(placed) if len(set(told[g])) == 1)


@pytest.mark.parametrize("wrong", range(9))
def test_the_row_is_the_papers_closed_form(wrong: int) -> None:
    """arXiv:2508.10751, of 8 completions and k = 4; with fewer than k wrong ones every subset has a right one."""
    row, n, k = config_of("passk").algorithm, 8, 4
    rewards = torch.tensor([0.0] * wrong + [1.0] * (n - wrong))
    found = group_advantages(
        rewards,
        torch.zeros(n, dtype=torch.int64),
        mean=row.advantage_mean,
        std=row.advantage_std,
        leave_one_out=row.leave_one_out,
        unbiased=row.std_unbiased,
        best_of=row.best_of,
    )
    mean = 1 - math.comb(wrong, k) / math.comb(n, k)
    if mean in (0.0, 1.0):
        assert found.tolist() == [0.0] * n
        return
    std = math.sqrt(mean * (1 - mean))
    of_wrong = 1 - mean - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)
    assert found.tolist() == pytest.approx([of_wrong / std] * wrong + [(1 - mean) / std] * (n - wrong), rel=1e-5)


def test_of_the_whole_group_the_best_alone_has_the_lead_over_the_second() -> None:
    """arXiv:2503.19595, and verl's grpo_passk by its description; tied bests have no lead."""
    rewards = torch.tensor([0.2, 0.9, 0.5, 1.0, 1.0, 0.0])
    ids = torch.tensor([3, 3, 3, 8, 8, 8])
    found = group_advantages(rewards, ids, mean="group", std="none", leave_one_out=True, best_of=3)
    assert found.tolist() == pytest.approx([0.0, 0.4, 0.0, 0.0, 0.0, 0.0], abs=1e-7)
    divided = group_advantages(rewards, ids, mean="group", std="group", leave_one_out=True, best_of=3)
    assert divided[1].item() == pytest.approx(0.4 / (statistics.stdev([0.2, 0.9, 0.5]) + 1e-6), rel=1e-5)


@pytest.mark.parametrize("k", [2, 3])
def test_leaving_the_completion_out_gives_the_gradient_of_the_best_of_k(k: int) -> None:
    """All outcomes of three completions of a policy over four answers, by their probabilities: no sampling."""
    logits = torch.tensor([0.3, -0.5, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    worth = torch.tensor([0.0, 1.0, 0.4, 2.5], dtype=torch.float64)
    probabilities = logits.softmax(0)
    wanted = sum(probabilities[list(d)].prod() * worth[list(d)].max() for d in itertools.product(range(4), repeat=k))
    (gradient,) = torch.autograd.grad(wanted, logits, retain_graph=True)
    surrogate = torch.zeros((), dtype=torch.float64)
    for drawn in (list(one) for one in itertools.product(range(4), repeat=3)):
        ids = torch.zeros(3, dtype=torch.int64)
        found = group_advantages(worth[drawn], ids, mean="group", std="none", leave_one_out=True, best_of=k)
        chance = probabilities[drawn].prod().detach()
        surrogate = surrogate + chance * k / 3 * (found.double() * probabilities[drawn].log()).sum()
    (found_gradient,) = torch.autograd.grad(surrogate, logits)
    assert found_gradient.tolist() == pytest.approx(gradient.tolist(), rel=1e-5)


@pytest.mark.parametrize(("leave_one_out", "teach"), [(False, [False, True, False]), (True, [True, True, False])])
def test_dynamic_sampling_keeps_the_groups_that_have_an_advantage(leave_one_out: bool, teach: list[bool]) -> None:
    keys = ["algorithm.best_of=2", f"algorithm.leave_one_out={str(leave_one_out).lower()}"]
    row = config_of("grpo", *keys).algorithm
    prompt, sampled = Prompt(id="a", text="", token_ids=(1, 2), answer=""), [completion([3])] * 3
    told = [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 1.0]]
    groups = [single_turns(prompt, sampled, [""] * 3, rewards, [{}] * 3) for rewards in told]
    assert groups_with_gradient(groups, row, max_new_tokens=9) == teach


def test_the_datas_demonstration_is_one_more_completion_of_the_group() -> None:
    passk = ["algorithm=passk", "algorithm.demonstration_gamma=0.1"]
    assert load_config("tiny_cpu", [*passk, "rollout.group_size=4"]).algorithm.best_of == 4
    with pytest.raises(ConfigError, match=r"best_of=4 with rollout\.group_size=3 .*group_size=4 or more"):
        load_config("tiny_cpu", [*passk, "rollout.group_size=3"])


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["rollout.group_size=4"], r"best_of=4 with rollout\.group_size=4 and leave_one_out=false: .*group_size=5 or"),
        (["rollout.group_size=3", "algorithm.leave_one_out=true"], r"leave_one_out=true: .*rollout\.group_size=4 or"),
        (["algorithm.advantage_std=batch"], r"best_of=4 with algorithm\.advantage_std=batch: best_of uses the std"),
        (["algorithm.advantage_mean=batch"], r"best_of=4 does nothing: algorithm\.advantage_mean=batch does not read"),
        (["algorithm.advantage_of=parts"], r"best_of=4 with algorithm\.advantage_of=parts: each part would have"),
        (["algorithm.credit=turn"], r"best_of=4 with algorithm\.credit=turn: best_of compares"),
        (["algorithm.preference.beta=0.1"], r"best_of=4 does nothing: algorithm\.preference\.beta=0\.1 trains on"),
    ],
)
def test_what_is_not_of_a_groups_completions_is_refused(keys: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", ["algorithm=passk", *keys])


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("std", ["none", "group"])
def test_a_group_of_fewer_compares_nothing(std: str, leave_one_out: bool) -> None:
    """As one of which trajectories were dropped."""
    ids, rewards = torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([0.0, 3.0, 1.0, 2.0, 0.0, 1.0])
    found = group_advantages(rewards, ids, mean="group", std=std, leave_one_out=leave_one_out, best_of=3)
    alone = group_advantages(rewards[:4], ids[:4], mean="group", std=std, leave_one_out=leave_one_out, best_of=3)
    assert found.tolist() == [*alone.tolist(), 0.0, 0.0]
    assert alone[1] > 0


def test_bests_are_of_a_group() -> None:
    with pytest.raises(ValueError, match="set mean='group', not 'batch'"):
        group_advantages(torch.rand(4), torch.zeros(4).long(), mean="batch", std="none", leave_one_out=False, best_of=2)


# The optimal token baseline (arXiv:2602.07078): its closed form in plain loops, and the variance that it minimizes.
LENGTHS = (3, 1, 4, 2, 0, 4, 5)
GROUPS = (7, 2, 7, 2, 7, 7, 2)


def ragged(seed: int) -> tuple[list[list[float]], list[list[float]], Tensor, Tensor]:
    """Returns and norms of the tokens of each sequence, and a mask in which these follow a prompt and have gaps."""
    rng = random.Random(seed)
    kept = [[False, *(rng.sample([True] * n + [False] * 2, n + 2))] for n in LENGTHS]
    returns, norms = ([[draw() for _ in range(n)] for n in LENGTHS] for draw in (lambda: rng.gauss(0, 1), rng.random))
    cu_seqlens = torch.tensor([0, *(len(row) for row in kept)]).cumsum(0)
    return returns, norms, torch.tensor([x for row in kept for x in row]), cu_seqlens


def placed(rows: list[list[float]], mask: Tensor) -> Tensor:
    out = torch.full(mask.shape, torch.nan)
    out[mask] = torch.tensor([x for row in rows for x in row])
    return out


@pytest.mark.parametrize("seed", range(3))
def test_advantages_are_those_of_the_papers_closed_form(seed: int) -> None:
    returns, norms, mask, cu_seqlens = ragged(seed)
    group_of = torch.tensor(GROUPS)
    found = less_optimal_baseline(placed(returns, mask), placed(norms, mask), mask, cu_seqlens, group_of=group_of)
    wanted = []
    for mine, own in zip(GROUPS, returns, strict=True):
        for t, value in enumerate(own):
            rows = [i for i, group in enumerate(GROUPS) if group == mine and LENGTHS[i] > t]
            weights = [list(accumulate(norms[i]))[t] for i in rows]
            wanted.append(value - (sum(w * returns[i][t] for i, w in zip(rows, weights, strict=True)) / sum(weights)))
    torch.testing.assert_close(found[mask], torch.tensor(wanted), rtol=1e-5, atol=1e-6)
    assert not found[~mask].any()


def test_equal_returns_and_tokens_alone_at_their_place_leave_exactly_0() -> None:
    """Also where all weights are 0, as of tokens that are certain."""
    _, norms, mask, cu_seqlens = ragged(0)
    equal = torch.full(mask.shape, 0.1)
    given = placed(norms, mask), torch.zeros(mask.shape)
    for weights in given:
        assert not less_optimal_baseline(equal, weights, mask, cu_seqlens, group_of=torch.tensor(GROUPS)).any()
    alone = less_optimal_baseline(equal * torch.arange(len(mask)), given[0], mask, cu_seqlens, group_of=torch.arange(7))
    assert not alone.any()
    assert not less_optimal_baseline(equal, given[0], mask & False, cu_seqlens, group_of=torch.tensor(GROUPS)).any()


def test_of_all_baselines_it_has_the_least_variance_of_a_bandits_gradient() -> None:
    """A softmax over three arms, of probabilities 1/8, 2/8 and 5/8: a group that has each so often is the expectation.
    The variance of grad log pi (r - b), summed over the logits, is a parabola in b, by enumeration; its minimum is the
    vertex through three points of it. The mean reward, GRPO's, is elsewhere."""
    counts, rewards = torch.tensor([1, 2, 5]), torch.tensor([1.0, -0.3, 0.4], dtype=torch.float64)
    p = counts / counts.sum().double()
    scores = torch.eye(3, dtype=torch.float64) - p  # [arm, logit]

    def variance(b: float) -> float:
        gradients = scores * (rewards - b)[:, None]
        return float(p @ (gradients - p @ gradients).square().sum(1))

    at = [variance(b) for b in (-1.0, 0.0, 1.0)]
    best = (at[0] - at[2]) / (2 * (at[0] - 2 * at[1] + at[2]))
    arms = torch.repeat_interleave(torch.arange(3), counts)
    returns, norms = rewards[arms].float(), (1 - 2 * p + p.square().sum())[arms].float()
    every = torch.ones(8, dtype=torch.bool)
    advantages = less_optimal_baseline(returns, norms, every, torch.arange(9), group_of=torch.zeros(8).long())
    assert (returns - advantages).tolist() == pytest.approx([best] * 8, abs=1e-6)
    assert variance(best) < min(variance(best - 1e-3), variance(best + 1e-3))
    assert float(p @ rewards) == pytest.approx(0.3)
    assert abs(best - 0.3) > 0.03


def test_a_key_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lam=0\.5 does nothing: algorithm\.credit=optimal does not read it"):
        load_config("tiny_cpu", ["algorithm=otb", "algorithm.lam=0.5"])


def test_equal_rewards_teach_nothing_unless_returns_are_discounted() -> None:
    with pytest.raises(ConfigError, match=r"group_size=1 with algorithm\.credit=optimal: a group has no second"):
        config_of("otb", "rollout.group_size=1")
    with pytest.raises(ConfigError, match=r"but algorithm\.gamma=0\.9 learns from them too"):
        config_of("otb", "algorithm.gamma=0.9", "rollout.dynamic_sampling=refill")
    assert config_of("otb", "rollout.dynamic_sampling=refill").algorithm.needs_differences
    assert not config_of("otb", "algorithm.gamma=0.9").algorithm.needs_differences


def test_overlong_penalty_grows_over_the_buffer_before_the_limit() -> None:
    penalty = overlong_penalty(torch.tensor([100, 16384, 18432, 20480]), max_length=20480, buffer=4096)
    assert penalty.tolist() == [0.0, 0.0, -0.5, -1.0]
    of_a_fifth = overlong_penalty(torch.tensor([100, 16384, 18432, 20480]), max_length=20480, buffer=0.2)
    assert of_a_fifth.tolist() == pytest.approx([0.0, 0.0, -0.5, -1.0])
    assert overlong_penalty(torch.tensor([8, 9, 10]), max_length=10, buffer=1).tolist() == [0.0, 0.0, -1.0]
    assert overlong_penalty(torch.tensor([15, 20, 99]), max_length=20, buffer=10, factor=3).tolist() == [-1.5, -3, -3]


def test_truncated_sequences_leave_the_loss() -> None:
    mask = torch.tensor([False, True, True, True])
    assert drop_truncated(mask, torch.tensor([False, True]), torch.tensor([0, 2, 4])).tolist() == [0, 1, 0, 0]


def test_scores_of_the_unfinished() -> None:
    rewards = set_unfinished_rewards(torch.tensor([2.0, 2.0]), torch.tensor([True, False]), unfinished_reward=-1.0)
    assert rewards.tolist() == [2.0, -1.0]
