"""Quantiles of betas against binomial tails; intervals of pass@k, all@k and maj@n against draws and simulated sets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from bench.intervals import nearest
from rl_megatron.evaluation.figures import all_at, chance_interval, majority, pass_at, share_interval
from rl_megatron.observability.intervals import Interval, beta_quantile

SETS = 2000


@pytest.mark.parametrize(("a", "b"), [(1, 1), (1, 30), (2, 7), (9, 3), (31, 371), (400, 2), (200, 203)])
def test_quantiles_of_a_beta_are_those_of_a_binomials_tail(a: int, b: int) -> None:
    """A beta is below x as often as a + b - 1 draws of chance x have a hits or more."""
    for share in (0.025, 0.5, 0.975):
        x, n = beta_quantile(share, a, b), a + b - 1
        tail = math.fsum(math.comb(n, c) * x**c * (1 - x) ** (n - c) for c in range(a, n + 1))
        assert tail == pytest.approx(share, abs=1e-8)


def test_quantiles_of_a_beta_of_small_parameters() -> None:
    for share in (0.025, 0.4, 0.975):
        assert beta_quantile(share, 0.5, 0.5) == pytest.approx(math.sin(math.pi * share / 2) ** 2, rel=1e-8)  # arcsine
        assert beta_quantile(share, 0.3, 1) == pytest.approx(share ** (1 / 0.3), rel=1e-8)
    assert beta_quantile(0.025, 1e-5, 9) == 0.0  # 0.025 ** 100,000 and less
    assert beta_quantile(0.975, 9, 1e-5) == 1.0


def both_ends(found: Interval) -> tuple[float, float]:
    assert found.low is not None
    assert found.high is not None
    return found.low, found.high


@pytest.mark.parametrize(
    ("values", "ones", "zeros"),
    [
        ([0.0] * 5 + [0.1, 0.2, 0.7, 0.9, 1.0], (1.0, 1.0), (1.0, 1.0)),
        ([0.0] * 20 + [0.05, 0.2], (0.25, 1.0), (1.0, 1.0)),  # all values together are 0.25
        ([1.0] * 11 + [0.9, 0.9], (1.0, 1.0), (1.0, 0.2)),
    ],
)
def test_the_second_rule_is_the_beta_like_draws_of_a_dirichlet(
    values: list[float], ones: tuple[float, float], zeros: tuple[float, float]
) -> None:
    """``ones`` and ``zeros`` are what the problem of 1 and that of 0 count, for the low end and for the high one."""
    rng = np.random.default_rng(0)
    found, whole = (both_ends(rule(values, samples=8)) for rule in (chance_interval, share_interval))
    for end, quantile in enumerate((0.025, 0.975)):
        weights = [*[1.0] * len(values), ones[end], zeros[end]]
        drawn = rng.dirichlet(weights, 200_000) @ np.array([*values, 1.0, 0.0])
        mean, like = drawn.mean(), drawn.mean() * (1 - drawn.mean()) / drawn.var() - 1
        beta = np.quantile(rng.beta(mean * like, (1 - mean) * like, 400_000), quantile)
        assert 2 * found[end] - whole[end] == pytest.approx(beta, abs=2e-3)


def test_right_and_wrong_are_treated_alike() -> None:
    rng = np.random.default_rng(3)
    for _ in range(100):
        values = rng.choice([0.0, 0.01, 0.4, 0.99, 1.0], int(rng.integers(2, 40)), p=rng.dirichlet([0.5] * 5)).tolist()
        one, other = (chance_interval(each, samples=16) for each in (values, [1 - value for value in values]))
        low, high = both_ends(one)
        assert both_ends(other) == (pytest.approx(1 - high, abs=1e-9), pytest.approx(1 - low, abs=1e-9))
        assert 0 <= low <= one.value <= high <= 1


def test_sets_of_one_kind_and_of_tiny_values() -> None:
    none, every = chance_interval([0.0] * 20, samples=16), chance_interval([1.0] * 20, samples=16)
    assert (none.value, none.low, every.value, every.high) == (0.0, 0.0, 1.0, 1.0)
    assert none.high is not None
    assert 0.05 < none.high < 0.25
    tiny = chance_interval([0.0] * 20 + [1e-4], samples=16).low
    assert tiny is not None
    assert tiny < 1e-6
    assert chance_interval([0.5], samples=4).low is None
    with pytest.raises(ValueError, match="no problems"):
        chance_interval([], samples=4)


def held(
    rates: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    value: Callable[[int], float],
    truth: float,
    interval: Callable[[Sequence[float]], Interval],
) -> float:
    """The share of sets, rows of ``rates``, whose interval of the figure holds ``truth``; 16 samples a problem."""
    values = [value(right) for right in range(17)]
    right = np.random.default_rng(1).binomial(16, rates).tolist()
    ends = [both_ends(interval([values[one] for one in row])) for row in right]
    return float(np.mean([low <= truth <= high for low, high in ends]))


@pytest.mark.parametrize(
    ("figure", "k", "a", "b", "problems"),
    [
        (pass_at, 2, 0.4, 1.6, 15),
        (pass_at, 8, 5, 5, 30),  # 0.823 by the spread alone, 0.987 of two samples a problem
        (pass_at, 8, 2, 8, 8),
        (all_at, 2, 1, 1, 100),
    ],
)
def test_intervals_of_chances_hold_the_truth(
    figure: Callable[[int, int, int], float], k: int, a: float, b: float, problems: int
) -> None:
    """Of a beta's rates; all of k are right in the product of (a + i) / (a + b + i), i from 0 to k - 1."""
    every = [math.prod((one + i) / (a + b + i) for i in range(k)) for one in (a, b)]
    truth = every[0] if figure is all_at else 1 - every[1]
    rates = np.random.default_rng([k, problems]).beta(a, b, (SETS, problems))
    found = held(rates, lambda c: figure(c, 16, k), truth, lambda values: chance_interval(values, samples=16))
    assert found == pytest.approx(0.95, abs=0.02)


def test_ties_of_votes_are_less_than_a_vote_of_one_sample() -> None:
    """A tie counts one half, and so a set varies less than one whose problems are solved or not."""
    rates = np.full((SETS, 30), 0.5)
    vote = [majority(["a"] * c + ["b"] * (16 - c), [i < c for i in range(16)]) for c in range(17)]
    found = held(rates, vote.__getitem__, 0.5, lambda values: share_interval(values, samples=16))
    as_one = held(rates, vote.__getitem__, 0.5, share_interval)
    assert found == pytest.approx(0.95, abs=0.02)
    assert as_one > found


@pytest.mark.parametrize("counts", [[97, 3], [92, 8], [90, 6, 3, 1], [60, 25, 7, 4, 4], [1] * 15, [100]])
def test_the_nearest_that_any_rule_can_be_is_the_nearest_of_all_subsets(counts: list[int]) -> None:
    """What bench.intervals leaves out: a rule holds the truth in all sets that are alike, or in none of them."""
    sums = [sum(some) for n in range(len(counts) + 1) for some in itertools.combinations(counts, n)]
    best = min(abs(one / sum(counts) - 0.95) for one in sums)
    assert abs(nearest(counts) - 0.95) == pytest.approx(best, abs=1e-12)
