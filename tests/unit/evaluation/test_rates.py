"""The posterior of a beta's mean against sums in plain Python and binomial tails; mean@n's intervals by simulation."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from rl_megatron.evaluation.figures import FEW, beta_quantiles, chance_interval, rate_interval, share_interval

SETS = 2000


def log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def summed(right: Sequence[int], samples: int, at: Sequence[float]) -> list[float]:
    """The posterior's distribution function at these means, by the beta-binomial's own formula, cell by cell."""
    cells, steps = 800, 48
    logs = np.full((cells, steps), 0.0)
    for i, j in itertools.product(range(cells), range(steps)):
        mean, like = (i + 0.5) / cells, 0.1 * 1000 ** ((j + 0.5) / steps)
        a, b = mean * like, (1 - mean) * like
        prior = log_beta(a, b)
        logs[i, j] = math.fsum(n * (log_beta(a + c, b + samples - c) - prior) for c, n in Counter(right).items())
    density = np.exp(logs - logs.max()).sum(axis=1)
    below = np.concatenate([[0.0], density.cumsum()]) / density.sum()
    return [float(one) for one in np.interp(at, np.linspace(0, 1, cells + 1), below)]


@pytest.mark.parametrize(
    ("right", "samples"),
    [
        ([0, 0, 0, 1, 0, 0, 0, 0], 4),
        ([0, 1, 2, 3, 4, 4, 4, 2], 4),
        ([16, 16, 16, *[0] * 12], 16),
        ([5] * 12, 16),
        ([3, 64], 64),
        ([0] * 8, 4),
        ([9] * 5, 9),
    ],
)
def test_quantiles_are_those_of_the_posterior_by_its_formula(right: list[int], samples: int) -> None:
    assert summed(right, samples, beta_quantiles(right, samples=samples)) == pytest.approx([0.025, 0.975], abs=1e-3)


@pytest.mark.parametrize(("hits", "problems"), [(0, 8), (3, 8), (30, 1_000), (50_000, 100_000), (100_000, 100_000)])
def test_quantiles_of_one_sample_are_those_of_a_beta(hits: int, problems: int) -> None:
    """A beta(c + 1, P - c + 1) is below x as often as P + 1 draws of chance x have more than c hits."""
    chances = []
    for x in beta_quantiles([1] * hits + [0] * (problems - hits), samples=1):
        more = range(hits + 1, problems + 2)
        front = math.lgamma(problems + 2)
        logs = [
            front
            - math.lgamma(c + 1)
            - math.lgamma(problems + 2 - c)
            + c * math.log(x)
            + (problems + 1 - c) * math.log1p(-x)
            for c in more
        ]
        chances.append(math.fsum(math.exp(one) for one in logs))
    assert chances == pytest.approx([0.025, 0.975], abs=1e-3)


def test_right_and_wrong_are_treated_alike_and_so_is_every_order_of_problems() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        problems, samples = int(rng.integers(2, 40)), int(rng.integers(2, 20))
        right = rng.choice([0, 1, samples // 2, samples], problems, p=rng.dirichlet([0.5] * 4)).tolist()
        one = rate_interval(right, samples=samples)
        other = rate_interval([samples - c for c in right], samples=samples)
        assert one.low is not None
        assert one.high is not None
        assert (other.low, other.high) == (
            pytest.approx(1 - one.high, abs=1e-15),
            pytest.approx(1 - one.low, abs=1e-15),
        )
        assert one.low <= one.value <= one.high
        assert rate_interval(sorted(right), samples=samples) == one


def test_ends_are_means_of_two_rules_by_how_many_problems_say_something() -> None:
    right = [0, 0, 0, 0, 0, 1, 4, 4]  # three have a right sample
    found, low = rate_interval(right, samples=4), beta_quantiles(right, samples=4)[0]
    whole = chance_interval([one / 4 for one in right], samples=4).low
    assert whole is not None
    assert found.low == pytest.approx((3 * whole + FEW * low) / (3 + FEW), rel=1e-12)
    assert (found.value, found.count) == (9 / 32, 8)


@pytest.mark.parametrize("problems", [2, 30, 400])
@pytest.mark.parametrize(("samples", "right"), [(64, 1), (128, 1), (256, 2), (1024, 1), (1024, 3)])
def test_an_interval_holds_its_own_value_however_few_samples_are_right(problems: int, samples: int, right: int) -> None:
    """One problem has all of them, which a beta takes for a sign that others are sometimes solved, too."""
    rare = [right, *[0] * (problems - 1)]
    for given in (rare, [samples - one for one in rare]):
        found = rate_interval(given, samples=samples)
        assert found.low is not None
        assert found.high is not None
        assert found.low <= found.value <= found.high


def test_sets_of_one_kind() -> None:
    none, every = rate_interval([0] * 20, samples=16), rate_interval([16] * 20, samples=16)
    assert (none.value, none.low, every.value, every.high) == (0.0, 0.0, 1.0, 1.0)
    assert none.high is not None
    assert 0.01 < none.high < 0.2
    assert rate_interval([1, 0, 1], samples=1) == share_interval([1.0, 0.0, 1.0])
    assert rate_interval([2], samples=4).low is None
    with pytest.raises(ValueError, match="no problems"):
        rate_interval([], samples=4)
    with pytest.raises(ValueError, match="from 1 to 5 of 4"):
        rate_interval([1, 5], samples=4)


def held(right: NDArray[np.int64], samples: int, truth: float) -> float:
    """How often intervals of these sets hold the truth; sets that differ in the order of problems have one interval."""
    inside = 0
    for row, count in Counter(map(tuple, np.sort(right).tolist())).items():
        found = rate_interval(row, samples=samples)
        inside += count * (found.low is not None and found.low <= truth <= (found.high or 0.0))
    return inside / len(right)


@pytest.mark.parametrize(
    ("rate", "likeness", "problems", "samples"),
    [
        *((0.02, 10, 8, 16), (0.8, 2, 8, 16), (0.2, 0.5, 15, 16), (0.98, 10, 15, 16)),
        *((0.5, 10, 100, 4), (0.02, 2, 100, 16)),
    ],
)
def test_intervals_hold_the_truth_of_betas(rate: float, likeness: float, problems: int, samples: int) -> None:
    rng = np.random.default_rng([problems, samples, round(rate * 100)])
    rates = rng.beta(rate * likeness, (1 - rate) * likeness, (SETS, problems))
    assert held(rng.binomial(samples, rates), samples, rate) == pytest.approx(0.95, abs=0.02)


def test_intervals_hold_the_truth_of_what_is_no_beta() -> None:
    rng = np.random.default_rng(1)
    right = rng.binomial(16, rng.choice([0.0, 0.9], p=[0.7, 0.3], size=(500, 400)))
    assert held(right, 16, 0.27) == pytest.approx(0.95, abs=0.02)
    ends = np.array([beta_quantiles(row, samples=16) for row in right.tolist()])
    assert np.mean((ends[:, 0] <= 0.27) & (ends[:, 1] >= 0.27)) < 0.1  # why a beta's are not taken alone
