"""Makes the charts of reports: lines and bars of numbers, which the page gives to uPlot. Pure; no HTML, no files.

An x is a step or, in [-1, 0), a place in the warm start, which the page draws a fifth as wide as the chart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_POINTS = 240
MAX_BARS = 60
MAX_MEANS = 100
_LEAST_POINTS = 30  # of each line, however many there are
_COLORS, _DASHES = 8, ((99, 0), (9, 5), (1, 5))  # px of line and of gap
DOTTED = 2 * _COLORS  # added to a solid style: dots of the same color
_SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line, or one part of bars. ``style`` is an index into ``styles``."""

    name: str
    style: int
    x: Floats  # ascending
    y: Floats  # NaN breaks the line
    low: Floats | None = None  # to ``high``: a shaded band
    high: Floats | None = None
    each: int = 1  # a value is the mean of up to so many rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines, or stacked bars whose first part is on top. ``axis`` names x; charts of one axis share their cursor."""

    title: str
    unit: str
    series: Sequence[Series]
    axis: str = "step"
    bars: bool = False
    limits: tuple[float, float] | None = None
    warm: int = 0  # the last step of the warm start, if it is the same in all runs

    @property
    def summary(self) -> str:
        """The first and the last value of each line, for those who do not see it."""

        def at(s: Series, place: int) -> str:
            where = "in the warm start" if s.x[place] < 0 else f"at {self.axis} {number_text(s.x[place])}"
            return f"{number_text(s.y[place])} {where}"

        ends = ((s, np.flatnonzero(~np.isnan(s.y))) for s in self.series)
        return "; ".join(f"{s.name}: {at(s, known[0])}, {at(s, known[-1])}" for s, known in ends if len(known))

    @property
    def data(self) -> dict[str, object]:
        """What charts.js reads. A line without ``x`` has that of the first."""
        lines = [
            {
                "name": s.name,
                "style": s.style,
                **{name: _numbers(y) for name in ("y", "low", "high") if (y := getattr(s, name)) is not None},
                **({} if i and np.array_equal(s.x, series[0].x) else {"x": _numbers(s.x, 12)}),
            }
            for series in [_thinned(self.series)]
            for i, s in enumerate(series)
        ]
        each = max(s.each for s in self.series)
        return {
            "axis": self.axis,
            "bars": self.bars,
            "limits": self.limits,
            "warm": self.warm,
            "each": each,
            "series": lines,
        }


def styles(count: int) -> list[tuple[int, int, int]]:
    """At least ``count`` of color, px of line and px of gap: solid, then dashed, then dotted; after 24 they repeat."""
    different = [(color, *dash) for dash in _DASHES for color in range(_COLORS)]
    return different * math.ceil(max(count, 1) / len(different))


def number_text(value: float) -> str:
    """Format a number: four digits or more, thousands with a comma."""
    if value and (abs(value) < 1e-4 or abs(value) >= 1e7):
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def in_a_unit(unit: str, series: Sequence[Series]) -> tuple[str, Sequence[Series]]:
    """Of bytes the unit in which the greatest number is at least 1, and the lines in it; others as they are."""
    if unit != "bytes":
        return unit, series
    most = max(np.nanmax(np.abs(s.y)) for s in series)
    size, unit = next(((size, unit) for size, unit in _SIZES if most >= size), (1.0, unit))
    bands = [tuple(None if y is None else y / size for y in (s.low, s.high)) for s in series]
    return unit, [replace(s, y=s.y / size, low=low, high=high) for s, (low, high) in zip(series, bands, strict=True)]


def stacked_bars(title: str, unit: str, steps: Floats, parts: Sequence[tuple[str, Floats]]) -> Chart:
    """Bars of each step's parts, the first one lowest; with many steps a bar shows the mean of several. A part's
    colour is that of its place; parts that are 0 at all steps are left out."""
    size = math.ceil(len(steps) / MAX_BARS)
    starts = np.arange(0, len(steps), size)
    counts = np.diff([*starts, len(steps)])
    series = [
        Series(name=name, style=i, x=steps[starts] + (size - 1) / 2, y=np.add.reduceat(y, starts) / counts, each=size)
        for i, (name, y) in enumerate(parts)
        if y.any()
    ]
    return Chart(title=title, unit=unit, series=series[::-1], bars=True)


def averaged(x: Floats, y: Floats) -> tuple[Floats, Floats, int]:
    """The places and values, of the RL steps at most MAX_MEANS, each the mean of so many: among many lines spikes hide
    the others."""
    first = int((x < 0).sum())
    size = math.ceil((len(x) - first) / MAX_MEANS)
    if size <= 1:
        return x, y, 1
    starts = np.arange(first, len(x), size)
    known = np.add.reduceat(~np.isnan(y), starts, dtype=np.float64)
    means = np.add.reduceat(np.nan_to_num(y, nan=0.0), starts) / np.where(known, known, math.nan)
    places = np.add.reduceat(x, starts) / np.diff([*starts, len(x)])
    return np.concatenate([x[:first], places]), np.concatenate([y[:first], means]), size


def _thinned(series: Sequence[Series]) -> Sequence[Series]:
    """Those with the places of their least and greatest values, where any is long: all lines at the same places, so
    that the values of all can be read there."""
    if all(len(s.x) <= MAX_POINTS + 2 for s in series):
        return series
    most = max(MAX_POINTS // len(series), _LEAST_POINTS)
    kept = np.unique(np.concatenate([s.x[_places_of_thinned(s.y, most)] for s in series]))
    places = [np.isin(s.x, kept) for s in series]
    drawn = [[None if y is None else y[at] for y in (s.low, s.high)] for s, at in zip(series, places, strict=True)]
    return [
        replace(s, x=s.x[at], y=s.y[at], low=low, high=high)
        for s, at, (low, high) in zip(series, places, drawn, strict=True)
    ]


def _places_of_thinned(values: Floats, most: int) -> list[int]:
    """Of about ``most`` of them, finite or NaN: the least and the greatest of each bucket, so that no spike is lost,
    and both ends."""
    if len(values) <= most + 2:
        return list(range(len(values)))
    size = math.ceil(2 * len(values) / most)
    buckets = np.full((math.ceil((len(values) - 2) / size), size), math.nan)
    buckets.flat[: len(values) - 2] = values[1:-1]
    known = ~np.isnan(buckets)
    ends = np.where(known, buckets, math.inf).argmin(1), np.where(known, buckets, -math.inf).argmax(1)
    inner = (np.sort(np.stack(ends, 1), 1) + size * np.arange(len(buckets))[:, None])[known.any(1)] + 1
    return [0, *dict.fromkeys(inner.ravel().tolist()), len(values) - 1]


def _numbers(values: Floats, digits: int = 6) -> list[float | None]:
    """As JSON has them, with few digits: null for NaN and what is not finite."""
    return [
        None if not math.isfinite(v) else int(v) if v.is_integer() and abs(v) < 1e9 else float(f"{v:.{digits}g}")
        for v in values.tolist()
    ]
