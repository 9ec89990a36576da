"""Fits and intervals: against scipy's stored answers, tables, textbooks, and studies of known truth."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from rl_megatron.observability.intervals import contrast, mean_interval, t_quantile
from tools.lab.report import NAMES, SeedCurve, SigmoidFit, find_fit_problem, fit_sigmoid

SCIPY = json.loads(Path(__file__).with_name("scipy_fits.json").read_text())
"""Made points and what scipy 1.17.1's curve_fit found for them, started at the truth, tolerances of 1e-14."""
TRUTH = (0.2, 0.7, 1.5, 8.0)  # R0, A, B, Cmid
COMPUTE = np.linspace(1, 40, 40)
RATE = (0.0, 1.0)


def sigmoid(compute: np.ndarray, floor: float, ceiling: float, steepness: float, middle: float) -> np.ndarray:
    return np.asarray(floor + (ceiling - floor) / (1 + (middle / compute) ** steepness))


def seeds_of(
    rng: np.random.Generator, compute: np.ndarray = COMPUTE, *, count: int = 5, noise: float = 0.02
) -> list[SeedCurve]:
    """Seeds whose four parameters differ, with noise of an evaluation on 512 problems."""
    curves = []
    for _ in range(count):
        floor, ceiling = np.array(TRUTH[:2]) + rng.normal(size=2) * (0.02, 0.03)
        steepness, middle = np.array(TRUTH[2:]) * np.exp(rng.normal(size=2) * (0.1, 0.15))
        reached = sigmoid(compute, floor, ceiling, steepness, middle) + noise * rng.normal(size=len(compute))
        curves.append(SeedCurve(compute=compute, reached=reached))
    return curves


@pytest.mark.parametrize("case", SCIPY, ids=lambda case: f"{len(case['curves'])} seeds")
def test_fits_are_those_of_scipy(case: dict[str, list]) -> None:  # type: ignore[type-arg]
    curves = [SeedCurve(compute=np.array(c["compute"]), reached=np.array(c["reached"])) for c in case["curves"]]
    np.testing.assert_allclose(fit_sigmoid(curves).parameters, case["fit"], rtol=1e-4)


@pytest.mark.parametrize("count", [3, 5])
def test_intervals_hold_the_truth_as_often_as_they_say(count: int) -> None:
    """40 studies of one seed of the generator; bench/fits.py has 500 of several designs."""
    rng, held = np.random.default_rng(5), dict.fromkeys(NAMES, 0)
    for _ in range(40):
        found = fit_sigmoid(seeds_of(rng, COMPUTE[::2], count=count), RATE).intervals()
        for name, truth in zip(NAMES, TRUTH, strict=True):
            low, high = found[name].low, found[name].high
            held[name] += low is not None and high is not None and low <= truth <= high
    assert all(36 <= count <= 40 for count in held.values()), held


def test_with_little_noise_the_covariance_is_that_of_fits_of_single_seeds() -> None:
    """Their sample covariance over the number of seeds: so it is for a mean, and little noise makes the fit linear."""
    rng = np.random.default_rng(8)
    curves = [
        SeedCurve(compute=COMPUTE, reached=sigmoid(COMPUTE, *TRUTH) + 1e-6 * rng.normal(size=40)) for _ in range(6)
    ]
    alone = np.array([fit_sigmoid([curve]).parameters for curve in curves])
    alone[:, 2:] = np.log(alone[:, 2:])
    np.testing.assert_allclose(fit_sigmoid(curves).covariance, np.cov(alone.T, ddof=1) / 6, rtol=0.02)


def test_the_band_is_that_of_the_parameters() -> None:
    """By finite differences of the curve along each parameter."""
    fit = fit_sigmoid(seeds_of(np.random.default_rng(2)), RATE)
    inner = np.array([*fit.parameters[:2], *np.log(fit.parameters[2:])])
    values, half = fit.at(COMPUTE)

    def at(moved: np.ndarray) -> np.ndarray:
        return sigmoid(COMPUTE, moved[0], moved[1], float(np.exp(moved[2])), float(np.exp(moved[3])))

    slopes = np.stack([(at(inner + d) - at(inner - d)) / 2e-6 for d in 1e-6 * np.eye(4)], axis=1)
    spread = np.sqrt(np.sum((slopes @ fit.covariance) * slopes, axis=1))
    np.testing.assert_allclose(values, at(inner), rtol=1e-12)
    np.testing.assert_allclose(half, 2.7764451 * spread, rtol=1e-5)


def test_one_seed_has_a_fit_and_no_interval() -> None:
    fit = fit_sigmoid([SeedCurve(compute=COMPUTE, reached=sigmoid(COMPUTE, *TRUTH))])
    np.testing.assert_allclose(fit.parameters, TRUTH, rtol=1e-6)
    assert fit.at(COMPUTE)[1] is None
    assert {(found.low, found.high) for found in fit.intervals().values()} == {(None, None)}


def test_an_interval_beyond_all_numbers_has_no_upper_end() -> None:
    """Of two seeds, t of one degree is 12.7: 12.7 times a spread of 100 in log Cmid is beyond floats' 1e308."""
    spread = np.diag([1e-4, 1e-4, 0.01, 1e4])
    found = SigmoidFit(parameters=np.array(TRUTH), covariance=spread, at_bound=(), seeds=2, error=0.0).intervals()
    assert (found["Cmid"].low, found["Cmid"].high) == (pytest.approx(0.0), None)
    assert found["B"].high == pytest.approx(1.5 * np.exp(12.706205 * 0.1))


def test_a_fit_of_many_points_is_of_bounded_memory() -> None:
    """5,000 points are 40 KB; a matrix of their pairs would be 200 MB."""
    rng, compute = np.random.default_rng(1), np.linspace(1, 40, 5000)
    reached = sigmoid(compute, *TRUTH) + 0.02 * rng.normal(size=len(compute))
    tracemalloc.start()
    try:
        assert find_fit_problem([SeedCurve(compute=compute, reached=reached)], RATE) is None
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()


def test_a_ceiling_at_its_limit_has_no_interval() -> None:
    rng = np.random.default_rng(0)
    curves = [
        SeedCurve(compute=COMPUTE, reached=sigmoid(COMPUTE, 0.1, 1.1, 1.5, 8.0) + 0.01 * rng.normal(size=40))
        for _ in range(3)
    ]
    found = fit_sigmoid(curves, RATE)
    assert found.at_bound == ("A",)
    assert (found.intervals()["A"].value, found.intervals()["A"].low) == (1.0, None)
    assert found.intervals()["B"].low is not None


LOG = 0.2 + 0.1 * np.log(COMPUTE)


@pytest.mark.parametrize(
    ("compute", "reached", "why"),
    [
        (COMPUTE[10:40], sigmoid(COMPUTE[10:40], *TRUTH), r"^compute spans 3\.6x; it must span 4x or more"),
        (COMPUTE[::10], sigmoid(COMPUTE[::10], *TRUTH), r"^a run has 4 values; a fit of 4 parameters needs 6"),
        (COMPUTE, LOG, r"^no bend yet: a straight line in the logarithm"),
        (COMPUTE, 0.05 * COMPUTE**0.6, r"^no bend yet: at the last point \d+% of the fitted rise is done; 75%"),
        (COMPUTE, sigmoid(COMPUTE, 0.1, 0.8, 1.5, 60.0), r"^no bend yet: at the last point"),
        (COMPUTE, np.full(40, 0.3), r"^no bend yet: a straight line"),
    ],
)
def test_a_fit_is_refused_where_the_data_cannot_carry_it(compute: np.ndarray, reached: np.ndarray, why: str) -> None:
    rng = np.random.default_rng(7)
    curves = [
        SeedCurve(compute=compute, reached=reached + 0.01 * rng.normal() + 0.01 * rng.normal(size=len(compute)))
        for _ in range(5)
    ]
    with pytest.raises(ValueError, match=why):
        raise ValueError(find_fit_problem(curves, RATE))


def test_a_fit_is_not_refused_where_they_can() -> None:
    rng = np.random.default_rng(3)
    assert [find_fit_problem(seeds_of(rng), RATE) for _ in range(10)] == [None] * 10
    assert find_fit_problem([], RATE) == "no run has values to fit"


@pytest.mark.parametrize("reached", [np.zeros(40), np.ones(40), (COMPUTE > 30.0).astype(float)], ids="01s")
def test_seeds_that_never_leave_a_limit_are_refused_with_a_reason(reached: np.ndarray) -> None:
    """All four parameters of zeros are at bounds."""
    assert find_fit_problem([SeedCurve(compute=COMPUTE, reached=reached)] * 3, RATE) is not None


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (120, 1.980), (10_000, 1.960)],
)
def test_quantiles_are_those_of_the_table(degrees: int, quantile: float) -> None:
    assert t_quantile(degrees) == pytest.approx(quantile, abs=5e-4)


def test_a_quantile_is_computed_once() -> None:
    """A page asks for one at each point: of 35 runs of 150 steps, 50,000 times."""
    t_quantile(4)
    before = t_quantile.cache_info().misses
    for count in (5, 5, 5):
        mean_interval([0.1] * count)
    assert t_quantile.cache_info().misses == before


def test_differences_are_those_of_scipy() -> None:
    """scipy 1.17.1: ttest_rel(...).confidence_interval(0.95), and ttest_ind(..., equal_var=False)."""
    a, b = [0.61, 0.58, 0.66, 0.63, 0.6], [0.5, 0.57, 0.52, 0.49, 0.61, 0.55]
    results = {"a": dict(enumerate(a)), "b": dict(enumerate(b)), "none": {}}
    paired = contrast(results, {"a": 1, "b": -1}, paired=True)
    apart = contrast(results, {"a": 1, "b": -1}, paired=False)
    assert (paired.value, paired.low, paired.high) == pytest.approx((0.078, -0.012138306967539, 0.168138306967539))
    assert (apart.value, apart.low, apart.high) == pytest.approx((0.076, 0.0234964320084664, 0.1285035679915335))
    assert (paired.count, paired.excludes_zero, apart.excludes_zero) == (5, False, True)
    assert contrast(results, {"a": 1, "none": -1}, paired=True) is None
    equal = contrast({"a": {0: 0.3, 1: 0.4}, "b": {0: 0.2, 1: 0.3}}, {"a": 1, "b": -1}, paired=True)
    assert (equal.all_equal, equal.excludes_zero, paired.all_equal) == (True, False, False)
    alone = mean_interval([0.5])
    assert (alone.value, alone.low, alone.high) == (0.5, None, None)


@pytest.mark.parametrize("alone", ["a", "b", "c", "d"])
def test_a_difference_without_an_interval_is_that_of_all_arms_whichever_has_one_seed(alone: str) -> None:
    weights = {"a": 1.0, "b": -1.0, "c": -1.0, "d": 1.0}
    means = {"a": 0.8, "b": 0.7, "c": 0.625, "d": 0.5}
    results = {arm: {0: m} if arm == alone else {1: m - 0.125, 2: m + 0.125} for arm, m in means.items()}
    found = contrast(results, weights, paired=False)
    assert found.value == pytest.approx(0.8 - 0.7 - 0.625 + 0.5)
    assert (found.low, found.high, found.count) == (None, None, 7)
