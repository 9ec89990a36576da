"""Errors of extrapolation: over the last third of compute, not seen by the fit, by curve, power law and last value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rl_megatron.experiments.sigmoid import Array, SeedCurve, fit_sigmoid, why_not

HELD_OUT = 1 / 3
"""The last share of compute that is held out."""
_Law = Callable[[Array], Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Mean absolute error on the points held out, by what foretold them; None where the sigmoid's fit is refused."""

    cut: float  # compute of the last point seen, at most
    held_out: int  # points
    errors: Mapping[str, float | None]
    reason: str | None  # why the sigmoid was refused on the points before


def forecast(curves: Sequence[SeedCurve], limits: tuple[float, float] | None = None) -> Forecast | None:
    """Fit what lies below two thirds of the greatest compute, and compare with the rest. None where either is empty."""
    cut = (1 - HELD_OUT) * max(float(curve.compute.max()) for curve in curves)
    seen = [SeedCurve(compute=c.compute[c.compute <= cut], reached=c.reached[c.compute <= cut]) for c in curves]
    seen = [curve for curve in seen if len(curve.compute)]
    x = np.concatenate([c.compute[c.compute > cut] for c in curves])
    y = np.concatenate([c.reached[c.compute > cut] for c in curves])
    if not len(x) or not seen:
        return None
    reason = why_not(seen, limits)
    last = float(np.mean([curve.reached[np.argmax(curve.compute)] for curve in seen]))
    laws: dict[str, _Law | None] = {
        "sigmoid": None if reason else (lambda c: fit_sigmoid(seen, limits).at(c)[0]),
        "power law": power_law(seen, limits),
        "last value": lambda c: np.full(len(c), last),
    }
    errors = {name: float(np.mean(np.abs(law(x) - y))) if law else None for name, law in laws.items()}
    return Forecast(cut=cut, held_out=len(x), errors=errors, reason=reason)


def power_law(curves: Sequence[SeedCurve], limits: tuple[float, float] | None) -> _Law | None:
    """R = A - D / C^B by least squares, B of a grid from 0.01 to 10, A within ``limits``. None below three points."""
    x = np.concatenate([curve.compute for curve in curves])
    y = np.concatenate([curve.reached for curve in curves])
    if len(x) < 3:
        return None
    scale, best = float(x.max()), (np.inf, 0.0, 0.0, 0.0)
    for exponent in np.geomspace(0.01, 10.0, 200):
        falls = (x / scale) ** -exponent
        design = np.stack([np.ones(len(x)), -falls], axis=1)
        ceiling, drop = np.linalg.lstsq(design, y, rcond=None)[0]
        if limits is not None and not limits[0] <= ceiling <= limits[1]:
            ceiling = float(np.clip(ceiling, *limits))
            drop = float(falls @ (ceiling - y) / (falls @ falls))
        error = float(np.sum((ceiling - drop * falls - y) ** 2))
        best = min(best, (error, float(exponent), float(ceiling), float(drop)))
    _, exponent, ceiling, drop = best
    return lambda c: np.asarray(ceiling - drop * (c / scale) ** -exponent)
