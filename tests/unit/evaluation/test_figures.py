"""pass@k, all@k, maj@k and mean@n by brute force over subsets; intervals by simulated sets and binomial tails."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.intervals import nearest
from rl_megatron.evaluation.figures import (
    FEW,
    all_at_k,
    beta_quantiles,
    chance_interval,
    difference_interval,
    majority,
    pass_at_k,
    rate_interval,
    share_interval,
)
from rl_megatron.evaluation.results import num_draws
from rl_megatron.observability.intervals import Interval, beta_quantile

SETS = 2000


@pytest.mark.parametrize("samples", range(1, 9))
def test_pass_at_and_all_at_are_the_shares_of_all_subsets(samples: int) -> None:
    for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        subsets = list(itertools.combinations([True] * right + [False] * (samples - right), k))
        some, every = Fraction(sum(map(any, subsets)), len(subsets)), Fraction(sum(map(all, subsets)), len(subsets))
        assert pass_at_k(right, samples, k) == pytest.approx(float(some), abs=1e-15)
        assert all_at_k(right, samples, k) == pytest.approx(float(every), abs=1e-15)


def test_pass_at_is_unbiased_and_refuses_what_cannot_be() -> None:
    p, samples, k = 0.1, 8, 4
    weights = [math.comb(samples, c) * p**c * (1 - p) ** (samples - c) for c in range(samples + 1)]
    expected = math.fsum(w * pass_at_k(c, samples, k) for c, w in enumerate(weights))
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    exact = 1 - Fraction(math.comb(99_000, 500), math.comb(100_000, 500))  # its binomials are no floats
    assert pass_at_k(1_000, 100_000, 500) == pytest.approx(float(exact), rel=1e-12)
    for right, samples, k in ((1, 4, 0), (1, 4, 5), (5, 4, 1), (-1, 4, 1)):
        with pytest.raises(ValueError, match="right of"):
            pass_at_k(right, samples, k)
        with pytest.raises(ValueError, match="right of"):
            all_at_k(right, samples, k)


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
    return rng.binomial(samples, rng.beta(rate * likeness, (1 - rate) * likeness, (SETS, problems))) / samples


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
    assert 0.91 < covered(drawn(rng, 0.02, 0.5, 100, 16), 0.02, 16) < 0.94
    assert 0.97 < covered(drawn(rng, 0.02, 10, 8, 16), 0.02, 16) < 0.985
    shares = drawn(rng, 0.02, 0.5, 8, 4)
    assert 0.90 < covered(shares, 0.02, 4) < 0.93
    spread, half = shares.std(1, ddof=1), 2.3646 * shares.std(1, ddof=1) / math.sqrt(8)  # t of 7 degrees
    assert np.mean((abs(shares.mean(1) - 0.02) <= half) & (spread > 0)) < 0.3


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
    value = np.array([pass_at_k(right, samples, k) for right in range(samples + 1)])
    first, second = (value[rng.binomial(samples, one)] for one in (rates, 1 - (1 - rates) ** 2))
    once, twice = (math.prod((b + i) / (a + b + i) for i in range(tries)) for tries in (k, 2 * k))
    draws = num_draws(samples, k)
    found = [difference_interval(*pair, samples=draws) for pair in zip(first.tolist(), second.tolist(), strict=True)]
    inside = [one.low is not None and one.high is not None and one.low <= once - twice <= one.high for one in found]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)


def test_draws_are_steps_and_equal_models_are_not_shown_equal() -> None:
    for samples, k in ((4, 1), (4, 3), (16, 8), (16, 16)):
        assert num_draws(samples, k) == len({pass_at_k(right, samples, k) for right in range(samples + 1)}) - 1
    same = difference_interval([1.0] * 30, [1.0] * 30)
    assert same.value == 0.0
    assert same.high == pytest.approx(1.95996 * math.sqrt(2 / 31 / 32), rel=1e-4)  # 30 gaps of 0, one of 1, one of -1
    with pytest.raises(ValueError, match="zip"):
        difference_interval([1.0], [1.0, 0.0])


# Quantiles of betas against binomial tails; intervals of pass@k, all@k and maj@n against draws and simulated sets.
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
def test_the_second_is_a_dirichlet(values: list[float], ones: tuple[float, float], zeros: tuple[float, float]) -> None:
    """``ones`` and ``zeros`` are what the problem of 1 and that of 0 count, for the low end and for the high one."""
    rng = np.random.default_rng(0)
    found, whole = (both_ends(rule(values, samples=8)) for rule in (chance_interval, share_interval))
    for end, quantile in enumerate((0.025, 0.975)):
        drawn = rng.dirichlet([*[1.0] * len(values), ones[end], zeros[end]], 200_000) @ np.array([*values, 1.0, 0.0])
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
        (pass_at_k, 2, 0.4, 1.6, 15),
        (pass_at_k, 8, 5, 5, 30),  # 0.823 by the spread alone, 0.987 of two samples a problem
        (pass_at_k, 8, 2, 8, 8),
        (all_at_k, 2, 1, 1, 100),
    ],
)
def test_chances_are_held(figure: Callable[[int, int, int], float], k: int, a: float, b: float, problems: int) -> None:
    """Of a beta's rates; all of k are right in the product of (a + i) / (a + b + i), i from 0 to k - 1."""
    every = [math.prod((one + i) / (a + b + i) for i in range(k)) for one in (a, b)]
    truth = every[0] if figure is all_at_k else 1 - every[1]
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


# The posterior of a beta's mean against sums in plain Python and binomial tails; mean@n's intervals by simulation.
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
        more, front = range(hits + 1, problems + 2), math.lgamma(problems + 2)
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


def mean_covered(right: NDArray[np.int64], samples: int, truth: float) -> float:
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
    assert mean_covered(rng.binomial(samples, rates), samples, rate) == pytest.approx(0.95, abs=0.02)


def test_intervals_hold_the_truth_of_what_is_no_beta() -> None:
    rng = np.random.default_rng(1)
    right = rng.binomial(16, rng.choice([0.0, 0.9], p=[0.7, 0.3], size=(500, 400)))
    assert mean_covered(right, 16, 0.27) == pytest.approx(0.95, abs=0.02)
    ends = np.array([beta_quantiles(row, samples=16) for row in right.tolist()])
    assert np.mean((ends[:, 0] <= 0.27) & (ends[:, 1] >= 0.27)) < 0.1  # why a beta's are not taken alone
