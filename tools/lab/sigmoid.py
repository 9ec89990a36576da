"""Fits ScaleRL's curve R(C) = R0 + (A - R0) / (1 + (Cmid / C)^B) to several seeds, with intervals (arXiv:2510.13786).

C is compute, R a pass rate; A is the ceiling, B and Cmid say how soon it is reached. The fit is by least squares over
all points of all seeds: a grid of (B, Cmid), each with its best R0 and A, then Levenberg-Marquardt in
(R0, A, log B, log Cmid).

Intervals are studentised over seeds, as seeds are what is independent: points of one run are not. To first order the
fit is the mean over seeds of influences G (J'J)^-1 J_s' e_s, whose spread gives the covariance (a sandwich, clustered
by seed), with Student's t of G - 1 degrees. They are of the mean curve over seeds. bench/fits.py measures how often
they hold the truth: 94 to 97 % of 500 synthetic studies of 5 seeds, for each parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_megatron.observability.intervals import Interval, t_quantile

Array = NDArray[np.float64]
NAMES = ("R0", "A", "B", "Cmid")
"""The parameters in their order."""
LEAST_SPAN, LEAST_POINTS = 4.0, 6
_STEEPNESS = (0.1, 10.0)  # of B
_STEPS = 200  # of the last search
_LEAST_SHARE = 0.75  # of the rise, by the last point: there the slope is 3/4 of the greatest
_LEAST_F = 7.0
_WORST_CONDITION = 1e14
_LARGEST = 700.0  # logarithm of what is still a number
_MOST_OF_CEILING = 0.5  # half the interval of A, of the rise that was seen


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedCurve:
    """One seed's points: compute > 0 and what was reached, [n] each."""

    compute: Array
    reached: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidFit:
    """The curve that fits best. ``covariance`` [4, 4] is of (R0, A, log B, log Cmid), without those ``at_bound``; None
    for a single seed, or where the points do not determine the parameters.
    """

    parameters: Array  # R0, A, B, Cmid
    covariance: Array | None
    at_bound: tuple[str, ...]
    seeds: int
    error: float  # root mean squared, of the points

    def intervals(self) -> dict[str, Interval]:
        """Of each parameter by name; B and Cmid are symmetric in their logarithms, and may have no upper end."""
        inner = _inner(self.parameters)
        found = {}
        for i, name in enumerate(NAMES):
            low = high = None
            if self.covariance is not None and name not in self.at_bound:
                half = t_quantile(self.seeds - 1) * float(np.sqrt(self.covariance[i, i]))
                low, high = float(inner[i] - half), float(inner[i] + half)
                if i > 1:
                    low, high = math.exp(low), math.exp(high) if high < _LARGEST else None
            found[name] = Interval(value=float(self.parameters[i]), low=low, high=high, count=self.seeds)
        return found

    def at(self, compute: Array) -> tuple[Array, Array | None]:
        """The curve at [n] and half the width of its pointwise band; no band for a single seed."""
        inner = _inner(self.parameters)
        values, slopes = _curve(inner, np.log(compute))
        if self.covariance is None:
            return values, None
        spread = np.einsum("ni,ij,nj->n", slopes, self.covariance, slopes)
        return values, t_quantile(self.seeds - 1) * np.sqrt(np.maximum(spread, 0.0))


def fit_sigmoid(curves: Sequence[SeedCurve], limits: tuple[float, float] | None = None) -> SigmoidFit:
    """The fit; R0 and A stay within ``limits``, as 0 and 1 of a pass rate. Needs no span: ask `why_not` first."""
    x = np.log(np.concatenate([curve.compute for curve in curves]))
    y = np.concatenate([curve.reached for curve in curves])
    inner = _polished(_on_grid(x, y, limits), x, y, limits)
    values, slopes = _curve(inner, x)
    residual, (low, high) = y - values, _bounds(x, limits)
    free = (inner > low) & (inner < high)
    return SigmoidFit(
        parameters=np.array([inner[0], inner[1], np.exp(inner[2]), np.exp(inner[3])]),
        covariance=_covariance(curves, residual, slopes, free),
        at_bound=tuple(name for name, inside in zip(NAMES, free, strict=True) if not inside),
        seeds=len(curves),
        error=float(np.sqrt(np.mean(residual**2))),
    )


def why_not(curves: Sequence[SeedCurve], limits: tuple[float, float] | None) -> str | None:
    """Why the points cannot carry this fit, in words for the reader; None where they can."""
    if not curves:
        return "no run has values to fit"
    for curve in curves:
        if len(curve.compute) < LEAST_POINTS:
            return f"a run has {len(curve.compute)} values; a fit of 4 parameters needs {LEAST_POINTS} of each"
        span = float(curve.compute.max() / curve.compute.min())
        if span < LEAST_SPAN:
            return f"compute spans {span:.1f}x; it must span {LEAST_SPAN:g}x or more"
    fit = fit_sigmoid(curves, limits)
    if not _bends(curves, fit):
        return "it has not bent: a straight line in the logarithm of compute fits as well"
    last = max(float(curve.compute.max()) for curve in curves)
    share = float(_share(fit.parameters[2], np.log(fit.parameters[3]), np.log(last)))
    if share < _LEAST_SHARE:
        return (
            f"it has not bent: at the last point {share:.0%} of the fitted rise are done; {_LEAST_SHARE:.0%} are needed"
        )
    if {"B", "Cmid"} & set(fit.at_bound):
        return f"B = {fit.parameters[2]:.3g} or Cmid = {fit.parameters[3]:.3g} is at its bound: a step or a flat line"
    if len(curves) > 1 and fit.covariance is None:
        return "the points do not determine the four parameters"
    ceiling, rise = fit.intervals()["A"], float(np.ptp(np.concatenate([curve.reached for curve in curves])))
    if ceiling.high is not None and ceiling.high - ceiling.value > _MOST_OF_CEILING * rise:
        half = ceiling.high - ceiling.value
        return f"the ceiling is not determined: A = {ceiling.value:.3g} ± {half:.2g}, for a rise of {rise:.3g} seen"
    return None


def _bends(curves: Sequence[SeedCurve], fit: SigmoidFit) -> bool:
    """Whether it fits better than a straight line in log C, by an F of 7 on (2, n - 2 G - 2).

    What a line of a seed's own explains is left out on both sides: seeds that differ are no bend.
    """
    x = np.log(np.concatenate([curve.compute for curve in curves]))
    line = np.polyfit(x, np.concatenate([curve.reached for curve in curves]), 1)
    straight = bent = 0.0
    for curve in curves:
        own = np.log(curve.compute)
        straight += _beyond_line(own, curve.reached - np.polyval(line, own))
        bent += _beyond_line(own, curve.reached - fit.at(curve.compute)[0])
    return (straight - bent) * (len(x) - 2 * len(curves) - 2) > 2 * _LEAST_F * bent


def _beyond_line(x: Array, left: Array) -> float:
    """The sum of squares that no straight line in x explains."""
    return float(np.sum((left - np.polyval(np.polyfit(x, left, 1), x)) ** 2))


def _inner(parameters: Array) -> Array:
    return np.array([parameters[0], parameters[1], np.log(parameters[2]), np.log(parameters[3])])


def _curve(inner: Array, x: Array) -> tuple[Array, Array]:
    """Values [n] and slopes [n, 4] by R0, A, log B and log Cmid, at x = log C."""
    floor, ceiling, steepness = inner[0], inner[1], np.exp(inner[2])
    share = _share(steepness, inner[3], x)
    slope = (ceiling - floor) * share * (1 - share) * steepness
    return floor + (ceiling - floor) * share, np.stack([1 - share, share, slope * (x - inner[3]), -slope], axis=1)


def _share(steepness: Array | float, middle: Array | float, x: Array) -> Array:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * steepness * (x - middle))))


def _on_grid(x: Array, y: Array, limits: tuple[float, float] | None) -> Array:
    """The best of a grid of B and Cmid, with the least-squares R0 and A of each."""
    middles, best, least = np.linspace(*_middles(x), 48), np.zeros(4), np.inf
    for steepness in np.geomspace(*_STEEPNESS, 24):  # one at a time, for memory: a study may have 100,000 points
        share = _share(steepness, middles[:, None], x)
        design = np.stack([1 - share, share], axis=-1)  # [Cmid, n, 2]
        normal = np.einsum("bni,bnj->bij", design, design) + 1e-12 * np.eye(2)
        ends = np.linalg.solve(normal, np.einsum("bni,n->bi", design, y)[..., None])[..., 0]
        if limits is not None:
            ends = np.clip(ends, *limits)
        error = np.sum((y - np.einsum("bni,bi->bn", design, ends)) ** 2, axis=-1)
        at = int(np.argmin(error))
        if error[at] < least:
            best, least = np.array([*ends[at], np.log(steepness), middles[at]]), float(error[at])
    return best


def _middles(x: Array) -> tuple[float, float]:
    return float(x.min() - np.log(4.0)), float(x.max() + np.log(4.0))


def _bounds(x: Array, limits: tuple[float, float] | None) -> tuple[Array, Array]:
    """Lowest and highest values of the inner parameters."""
    ends, steep, middles = limits or (-np.inf, np.inf), np.log(_STEEPNESS), _middles(x)
    low, high = ([ends[side], ends[side], steep[side], middles[side]] for side in (0, 1))
    return np.array(low), np.array(high)


def _polished(inner: Array, x: Array, y: Array, limits: tuple[float, float] | None) -> Array:
    """Levenberg-Marquardt within the bounds; a parameter at a bound that the step would cross keeps its place."""
    low, high = _bounds(x, limits)
    inner, damping = np.clip(inner, low, high), 1e-3
    values, slopes = _curve(inner, x)
    error = float(np.sum((y - values) ** 2))
    for _ in range(_STEPS):
        gradient, normal = slopes.T @ (y - values), slopes.T @ slopes
        free = ~(((inner <= low) & (gradient < 0)) | ((inner >= high) & (gradient > 0)))
        step = np.zeros(4)
        part = normal[np.ix_(free, free)]
        step[free] = np.linalg.solve(part + np.diag(damping * np.diag(part) + 1e-15), gradient[free])
        tried = np.clip(inner + step, low, high)
        new_values, new_slopes = _curve(tried, x)
        new_error = float(np.sum((y - new_values) ** 2))
        if new_error <= error:
            small = bool(np.all(np.abs(tried - inner) < 1e-10 * (1 + np.abs(inner))))
            inner, values, slopes, error, damping = tried, new_values, new_slopes, new_error, damping / 5
            if small:
                break
        else:
            damping *= 4
            if damping > 1e12:
                break
    return inner


def _covariance(curves: Sequence[SeedCurve], residual: Array, slopes: Array, free: NDArray[np.bool_]) -> Array | None:
    """Of the free inner parameters, clustered by seed, zeros for the others; None where none is free, or determined."""
    count, out, slopes = len(curves), np.zeros((4, 4)), slopes[:, free]
    normal = slopes.T @ slopes
    if count < 2 or not free.any() or np.linalg.cond(normal) > _WORST_CONDITION:
        return None
    ends = np.cumsum([len(curve.compute) for curve in curves])[:-1]
    parts = zip(np.split(slopes, ends), np.split(residual, ends), strict=True)
    influences = np.array([count * np.linalg.solve(normal, part.T @ left) for part, left in parts])
    out[np.ix_(free, free)] = influences.T @ influences / (count * (count - 1))
    return out
