"""pass@k and all@k against all subsets, maj@k against all ways to break a tie, intervals against simulated sets."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from rl_megatron.evaluation.figures import all_at, difference_interval, majority, pass_at, share_interval
from rl_megatron.evaluation.results import draws_of

SETS = 2000


@pytest.mark.parametrize("samples", range(1, 9))
def test_pass_at_and_all_at_are_the_shares_of_all_subsets(samples: int) -> None:
    for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        subsets = list(itertools.combinations([True] * right + [False] * (samples - right), k))
        some, every = Fraction(sum(map(any, subsets)), len(subsets)), Fraction(sum(map(all, subsets)), len(subsets))
        assert pass_at(right, samples, k) == pytest.approx(float(some), abs=1e-15)
        assert all_at(right, samples, k) == pytest.approx(float(every), abs=1e-15)


def test_pass_at_is_unbiased_and_stands_large_numbers() -> None:
    p, samples, k = 0.1, 8, 4
    weights = [math.comb(samples, c) * p**c * (1 - p) ** (samples - c) for c in range(samples + 1)]
    expected = math.fsum(w * pass_at(c, samples, k) for c, w in enumerate(weights))
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    exact = 1 - Fraction(math.comb(99_000, 500), math.comb(100_000, 500))  # its binomials are no floats
    assert pass_at(1_000, 100_000, 500) == pytest.approx(float(exact), rel=1e-12)


def test_what_cannot_be_is_refused() -> None:
    for right, samples, k in ((1, 4, 0), (1, 4, 5), (5, 4, 1), (-1, 4, 1)):
        with pytest.raises(ValueError, match="right of"):
            pass_at(right, samples, k)
        with pytest.raises(ValueError, match="right of"):
            all_at(right, samples, k)


@pytest.mark.parametrize("truth", ["", "a", "b"])
def test_the_majority_is_the_mean_over_all_ways_to_break_a_tie(truth: str) -> None:
    for answers in itertools.product(["a", "b", "c", ""], repeat=5):
        cast = [one for one in answers if one]
        counts = {one: cast.count(one) for one in cast}
        won = [one for one in counts if counts[one] == max(counts.values())]
        expected = Fraction(sum(one == truth for one in won), len(won)) if won else Fraction(0)
        assert majority(answers, [bool(truth) and one == truth for one in answers]) == pytest.approx(float(expected))


def test_an_answer_that_is_not_always_right_counts_by_its_share() -> None:
    assert majority(["7", "7", "8"], [True, False, True]) == 0.5


def drawn(rng: np.random.Generator, rate: float, likeness: float, problems: int, samples: int) -> NDArray[np.float64]:
    """Shares of right samples, [sets, problems]; the problems' rates are a beta's with mean ``rate``."""
    rates = rng.beta(rate * likeness, (1 - rate) * likeness, (SETS, problems))
    return rng.binomial(samples, rates) / samples


def covered(shares: NDArray[np.float64], rate: float, samples: int) -> float:
    intervals = [share_interval(row, samples=samples) for row in shares.tolist()]
    return float(np.mean([one.low is not None and one.low <= rate <= (one.high or 0.0) for one in intervals]))


@pytest.mark.parametrize(
    ("rate", "likeness", "problems", "samples"),
    [
        *((0.5, 0.5, 15, 4), (0.5, 2, 30, 16), (0.2, 2, 30, 4), (0.8, 10, 15, 16), (0.05, 2, 100, 4)),
        *((0.97, 10, 100, 8), (0.05, 0.5, 30, 16), (0.98, 0.5, 30, 16), (0.05, 0.5, 15, 16), (0.2, 0.5, 8, 4)),
    ],
)
def test_intervals_of_several_samples_hold_the_truth(rate: float, likeness: float, problems: int, samples: int) -> None:
    rng = np.random.default_rng([problems, samples, round(rate * 100)])
    assert covered(drawn(rng, rate, likeness, problems, samples), rate, samples) == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize(("rate", "problems"), [(0.5, 30), (0.2, 100), (0.05, 30), (0.98, 100)])
def test_intervals_of_one_sample_hold_the_truth_and_are_wilsons(rate: float, problems: int) -> None:
    hits = np.random.default_rng(problems).random((SETS, problems)) < rate
    assert covered(hits.astype(float), rate, 1) == pytest.approx(0.95, abs=0.02)
    one = share_interval([1.0] * 8 + [0.0] * 2)  # Newcombe (1998), Wilson's score interval of 8 in 10
    assert (one.low, one.high) == (pytest.approx(0.4902, abs=5e-5), pytest.approx(0.9433, abs=5e-5))


def test_where_the_interval_fails_is_what_its_module_says() -> None:
    rng = np.random.default_rng(7)
    always_or_never = covered(drawn(rng, 0.02, 0.5, 100, 16), 0.02, 16)
    assert 0.91 < always_or_never < 0.94
    alike = covered(drawn(rng, 0.02, 10, 8, 16), 0.02, 16)
    assert 0.97 < alike < 0.985
    shares = drawn(rng, 0.02, 0.5, 8, 4)
    assert 0.90 < covered(shares, 0.02, 4) < 0.93
    spread, half = shares.std(1, ddof=1), 2.3646 * shares.std(1, ddof=1) / math.sqrt(8)  # t of 7 degrees
    students = np.mean((abs(shares.mean(1) - 0.02) <= half) & (spread > 0))
    assert students < 0.3


def test_one_problem_of_several_samples_and_equal_problems_are_no_certainty() -> None:
    assert share_interval([0.5], samples=4).low is None
    solved = share_interval([1.0] * 20, samples=16)
    assert solved.value == 1.0
    assert solved.low is not None
    assert solved.low < 0.85


@pytest.mark.parametrize(("problems", "samples", "gap"), [(30, 1, 0.0), (100, 1, 0.2), (200, 8, 0.05), (100, 8, 0.0)])
def test_paired_intervals_hold_the_truth(problems: int, samples: int, gap: float) -> None:
    rng = np.random.default_rng([problems, samples])
    rates = rng.beta(1, 1, (SETS, problems)) * (1 - gap)
    first, second = rng.binomial(samples, rates) / samples, rng.binomial(samples, rates + gap) / samples
    found = [difference_interval(*pair, samples=samples) for pair in zip(first.tolist(), second.tolist(), strict=True)]
    inside = [one.low is not None and one.high is not None and one.low <= gap <= one.high for one in found]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize(
    ("k", "samples", "problems", "a", "b"),
    [(2, 4, 100, 1, 1), (4, 4, 100, 0.4, 1.6), (4, 16, 100, 1, 4), (8, 16, 400, 5, 5), (8, 16, 100, 0.04, 1.96)],
)
def test_paired_intervals_of_pass_at_k_hold_the_truth(k: int, samples: int, problems: int, a: float, b: float) -> None:
    """The second model solves a problem as the first in two tries, so its share that k samples miss is squared."""
    rng = np.random.default_rng([k, samples])
    rates = rng.beta(a, b, (SETS, problems))
    value = np.array([pass_at(right, samples, k) for right in range(samples + 1)])
    first, second = (value[rng.binomial(samples, one)] for one in (rates, 1 - (1 - rates) ** 2))
    once, twice = (math.prod((b + i) / (a + b + i) for i in range(tries)) for tries in (k, 2 * k))
    draws = draws_of(samples, k)
    found = [difference_interval(*pair, samples=draws) for pair in zip(first.tolist(), second.tolist(), strict=True)]
    inside = [one.low is not None and one.high is not None and one.low <= once - twice <= one.high for one in found]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)


def test_draws_are_the_steps_of_a_value() -> None:
    for samples, k in ((4, 1), (4, 3), (16, 8), (16, 16)):
        assert draws_of(samples, k) == len({pass_at(right, samples, k) for right in range(samples + 1)}) - 1


def test_models_that_differ_nowhere_are_not_shown_equal() -> None:
    same = difference_interval([1.0] * 30, [1.0] * 30)
    assert same.value == 0.0
    assert same.high == pytest.approx(1.95996 * math.sqrt(2 / 31 / 32), rel=1e-4)  # 30 gaps of 0, one of 1, one of -1
    with pytest.raises(ValueError, match="zip"):
        difference_interval([1.0], [1.0, 0.0])
