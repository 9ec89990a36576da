"""The optimal token baseline (arXiv:2602.07078): its closed form in plain loops, and the variance that it minimises."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from rl_megatron.algorithms.returns import less_optimal_baseline
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError
from tests.rows import config_of

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
    found = less_optimal_baseline(
        placed(returns, mask), placed(norms, mask), mask, cu_seqlens, group_of=torch.tensor(GROUPS)
    )
    wanted = []
    for mine, own in zip(GROUPS, returns, strict=True):
        for t, value in enumerate(own):
            rows = [i for i, group in enumerate(GROUPS) if group == mine and LENGTHS[i] > t]
            weights = [list(accumulate(norms[i]))[t] for i in rows]
            mean = sum(w * returns[i][t] for i, w in zip(rows, weights, strict=True)) / sum(weights)
            wanted.append(value - mean)
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
    nobody = less_optimal_baseline(equal, given[0], mask & False, cu_seqlens, group_of=torch.tensor(GROUPS))
    assert not nobody.any()


def test_of_all_baselines_it_has_the_least_variance_of_a_bandits_gradient() -> None:
    """A softmax over three arms, of probabilities 1/8, 2/8 and 5/8: a group that has each so often is the expectation.

    The variance of grad log pi (r - b), summed over the logits, is a parabola in b, by enumeration; its minimum is the
    vertex through three points of it. The mean reward, GRPO's, is elsewhere.
    """
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
    advantages = less_optimal_baseline(
        returns, norms, every, torch.arange(9), group_of=torch.zeros(8, dtype=torch.int64)
    )
    baselines = returns - advantages
    assert baselines.tolist() == pytest.approx([best] * 8, abs=1e-6)
    assert variance(best) < min(variance(best - 1e-3), variance(best + 1e-3))
    assert float(p @ rewards) == pytest.approx(0.3)
    assert abs(best - 0.3) > 0.03


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["whiten=true", "reward_scale=2"], "reward_scale=2.0 does nothing: a later comparison"),
        (["lam=0.5"], "lam=0.5 does nothing: algorithm.credit=optimal does not read it"),
    ],
)
def test_keys_without_effect_are_refused(keys: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", ["algorithm=otb", *(f"algorithm.{key}" for key in keys)])


def test_equal_rewards_teach_nothing_unless_returns_are_discounted() -> None:
    with pytest.raises(ConfigError, match=r"group_size=1 with algorithm\.credit=optimal: a group has no second"):
        config_of("otb", "rollout.group_size=1")
    with pytest.raises(ConfigError, match=r"from which algorithm\.gamma=0\.9 learns too"):
        config_of("otb", "algorithm.gamma=0.9", "rollout.dynamic_sampling=refill")
    assert config_of("otb", "rollout.dynamic_sampling=refill").algorithm.needs_differences
    assert not config_of("otb", "algorithm.gamma=0.9").algorithm.needs_differences
