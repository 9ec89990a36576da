"""Charts as data: lines and bars, thinned and rounded, as charts.js draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rl_megatron.observability.history import Floats, number_text

LEAST_EQUAL, _LEAST_STRAIGHT = 3, 10
"""Values from which on a line counts as constant, or as straight."""
MAX_POINTS = 240
MAX_BARS = 60
MAX_MEANS = 100
_LEAST_POINTS = 30  # points of each line, however many lines there are
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
    low: Floats | None = None  # lower edge of a shaded band, to ``high``
    high: Floats | None = None
    mean: Floats | None = None  # the mean since the value before, of a thinned line
    each: int = 1  # a value is the mean of up to this many rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines, or stacked bars with the first part on top. ``axis`` names x; charts of one axis share their cursor.

    ``log`` is true if y begins on a logarithmic axis; `data` offers one for positive lines of ten times and more.
    """

    title: str
    unit: str
    series: Sequence[Series]
    axis: str = "step"
    bars: bool = False
    limits: tuple[float, float] | None = None
    warm: int = 0  # the last step of the warm start, if it is the same in all runs
    log: bool = False
    note: str = ""
    metric: str = ""

    @property
    def is_wide(self) -> bool:
        """True if the lines are positive, and the greatest value is ten times the least or more."""
        if self.bars or self.limits or any(s.low is not None for s in self.series):
            return False
        known = np.concatenate([s.y[np.isfinite(s.y)] for s in self.series])
        return bool(len(known) and known.min() > 0 and known.max() >= 10 * known.min())

    @property
    def summary(self) -> str:
        """The first and the last value of each line, for readers who do not see it."""

        def at(s: Series, place: int) -> str:
            where = "in the warm start" if s.x[place] < 0 else f"at {self.axis} {number_text(s.x[place])}"
            return f"{number_text(s.y[place])} {where}"

        ends = ((s, np.flatnonzero(~np.isnan(s.y))) for s in self.series)
        return "; ".join(f"{s.name}: {at(s, known[0])}, {at(s, known[-1])}" for s, known in ends if len(known))

    @property
    def data(self) -> dict[str, object]:
        """The input of charts.js. A line without ``x`` has the x of the first."""
        lines = [
            {
                "name": s.name,
                "style": s.style,
                **{
                    name: json_numbers(y)
                    for name in ("y", "low", "high", "mean")
                    if (y := getattr(s, name)) is not None
                },
                **({} if i and np.array_equal(s.x, series[0].x) else {"x": json_numbers(s.x, 12)}),
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
            "log": self.log if self.is_wide else None,
            "series": lines,
        }


def styles(count: int) -> list[tuple[int, int, int]]:
    """Gives ``count`` or more of color, px of line, of gap: solid, then dashed, then dotted; after 24 they repeat."""
    different = [(color, *dash) for dash in _DASHES for color in range(_COLORS)]
    return different * math.ceil(max(count, 1) / len(different))


def readable_unit(unit: str, series: Sequence[Series]) -> tuple[str, Sequence[Series]]:
    """Returns the unit of bytes in which the greatest number is at least 1, and the lines in it; other units stay."""
    if unit != "bytes":
        return unit, series
    most = max(np.nanmax(np.abs(s.y)) for s in series)
    size, unit = next(((size, unit) for size, unit in _SIZES if most >= size), (1.0, unit))
    bands = [tuple(None if y is None else y / size for y in (s.low, s.high)) for s in series]
    return unit, [replace(s, y=s.y / size, low=low, high=high) for s, (low, high) in zip(series, bands, strict=True)]


def stacked_bars(title: str, unit: str, steps: Floats, parts: Sequence[tuple[str, Floats]]) -> Chart:
    """Returns bars of each step's parts, the first one lowest; with many steps a bar shows the mean of several. A
    part's color is that of its place; parts that are 0 at all steps are left out."""
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
    """Returns x and values, with RL steps averaged to at most MAX_MEANS, and the number of rows of a mean: among many
    lines spikes hide the others."""
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
    """Keeps long lines at the places of their least and greatest values. All lines keep the same places, so that the
    values of all can be read there."""
    if all(len(s.x) <= MAX_POINTS + 2 for s in series):
        return series
    most = max(MAX_POINTS // len(series), _LEAST_POINTS)
    kept = np.unique(np.concatenate([s.x[_places_of_thinned(s.y, most)] for s in series]))
    places = [np.isin(s.x, kept) for s in series]
    drawn = [[None if y is None else y[at] for y in (s.low, s.high)] for s, at in zip(series, places, strict=True)]
    return [
        replace(s, x=s.x[at], y=s.y[at], low=low, high=high, mean=_means_between(s.y, np.flatnonzero(at)))
        for s, at, (low, high) in zip(series, places, drawn, strict=True)
    ]


def _means_between(values: Floats, places: NDArray[np.intp]) -> Floats:
    """Returns for each place the mean of the values after the place before, up to it; NaN if none is known."""
    starts = np.concatenate([[0], places[:-1] + 1])
    counts = np.add.reduceat(~np.isnan(values), starts, dtype=np.float64)
    sums: Floats = np.add.reduceat(np.nan_to_num(values, nan=0.0), starts)
    return sums / np.where(counts, counts, math.nan)


def _places_of_thinned(values: Floats, limit: int) -> list[int]:
    """Returns the indices of about ``limit`` values, finite or NaN: the least and the greatest of each bucket, so that
    no spike is lost, and both ends."""
    if len(values) <= limit + 2:
        return list(range(len(values)))
    size = math.ceil(2 * len(values) / limit)
    buckets = np.full((math.ceil((len(values) - 2) / size), size), math.nan)
    buckets.flat[: len(values) - 2] = values[1:-1]
    known = ~np.isnan(buckets)
    ends = np.where(known, buckets, math.inf).argmin(1), np.where(known, buckets, -math.inf).argmax(1)
    inner = (np.sort(np.stack(ends, 1), 1) + size * np.arange(len(buckets))[:, None])[known.any(1)] + 1
    return [0, *dict.fromkeys(inner.ravel().tolist()), len(values) - 1]


def json_numbers(values: Floats, digits: int = 6) -> list[float | None]:
    """Returns the numbers for JSON, with few digits: null for NaN and infinity."""
    return [
        None if not math.isfinite(v) else int(v) if v.is_integer() and abs(v) < 1e9 else float(f"{v:.{digits}g}")
        for v in values.tolist()
    ]


def equal_lines(lines: Sequence[Series]) -> str:
    """Names the lines that hide each other, because all their values are equal."""
    groups: dict[bytes, list[str]] = {}
    for line in lines:
        groups.setdefault(line.x.tobytes() + line.y.tobytes(), []).append(line.name)
    equal = [names for names in groups.values() if len(names) > 1]
    if equal and len(groups) == 1:
        return "All lines are equal to the bit."
    return " ".join(f"{', '.join(names)}: equal to the bit." for names in equal)


def unchanged_value(chart: Chart) -> str | None:
    """Describes a chart that shows nothing: all values are equal or 0, or lie on one straight line. None otherwise."""
    if chart.bars:
        return None
    x, y = (np.concatenate([getattr(s, name)[~np.isnan(s.y)] for s in chart.series]) for name in ("x", "y"))
    first, last = y[x.argmin()], y[x.argmax()]
    if (y == first).all() and (first == 0 or len(y) >= LEAST_EQUAL):
        return number_text(first)
    span = last - first
    straight = first + span * (x - x.min()) / max(np.ptp(x), 1)
    if len(y) >= _LEAST_STRAIGHT and abs(y - straight).max() <= 1e-6 * abs(span):
        return f"{number_text(first)} to {number_text(last)} in a straight line"
    return None
