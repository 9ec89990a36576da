"""Computes the geometry of the report's charts: points to SVG paths, ticks and tooltips. Pure; no HTML, no files.

Lengths are units of the viewBox, W x H. An x position is an RL step or, in [-1, 0), a fraction of the warm start,
whose part has a fixed width, so that hundreds of supervised steps do not squeeze the RL curve.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

W, H = 400.0, 210.0
LEFT, RIGHT, TOP, BOTTOM = 42.0, 392.0, 10.0, 186.0
FRAME = {"w": W, "h": H, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM}  # for the template
MAX_POINTS = 240
MAX_BARS = 60
MAX_MEANS = 100
_COLORS, _DASHES = 8, ((99, 0), (9, 5), (1, 5))  # px of line and of gap
DOTTED = 2 * _COLORS  # added to a solid style: dots of the same color
_WARM_SHARE = 0.2
_MOST_DIGITS = 7  # of a tick, which has room for so many
_SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A value at x; None breaks the line there. ``low`` and ``high`` bound a shaded band."""

    x: float
    y: float | None
    label: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line. ``style`` is an index into ``styles``."""

    label: str
    style: int
    points: Sequence[Point]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A grid line at ``at`` with its text."""

    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A drawn element: a line, a band or the bars of one part of a stack, as an SVG path."""

    kind: str  # line | band | bar
    style: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Everything that a template needs. ``hover`` is [[x, label, [[series, y, text], ...]], ...] by ascending x."""

    title: str
    unit: str
    summary: str
    y_ticks: Sequence[Tick]
    x_ticks: Sequence[Tick]
    warm_end: float | None  # right end of the shaded warm start
    marks: Sequence[Mark]
    names: Sequence[tuple[str, int]]  # label and style of each series
    hover: Sequence[tuple[float, str, list[tuple[int, float, str]]]]


def styles(count: int) -> list[tuple[int, int, int]]:
    """At least ``count`` of color, px of line and px of gap: solid, then dashed, then dotted; after 24 they repeat."""
    different = [(color, *dash) for dash in _DASHES for color in range(_COLORS)]
    return different * math.ceil(max(count, 1) / len(different))


def number_text(value: float, digits: int = 4) -> str:
    """Format a number: four ``digits`` or more, thousands with a comma."""
    if value and (abs(value) < 1e-4 or abs(value) >= 1e7):
        mantissa, exponent = f"{value:.{digits - 2}e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.{digits - 4}f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def line_chart(title: str, unit: str, series: Sequence[Series], limits: tuple[float, float] | None = None) -> Chart:
    """Lines with bands over a shared axis. At least one point must have a value. Bytes are shown in GB, MB or kB."""
    series = [replace(s, points=thinned(s.points, lambda p: p.y)) for s in series]
    if unit == "bytes" and limits is None:
        unit, series = _of_a_thousand(series)
    points = [p for s in series for p in s.points]
    values = [v for p in points for v in (p.y, p.low, p.high) if v is not None]
    y_ticks, y = _y_axis(*(limits or _y_limits(min(values), max(values))))
    x_ticks, x, warm_end = _x_axis([p.x for p in points])
    marks = [Mark(kind="band", style=s.style, path=path) for s in series if (path := _band(s.points, x, y))]
    marks += [Mark(kind="line", style=s.style, path=_line(s.points, x, y)) for s in series]
    hover: dict[float, tuple[str, list[tuple[int, float, str]]]] = {}
    for index, s in enumerate(series):
        for p in s.points:
            if p.y is not None:
                spread = (
                    f" ({number_text(p.low)} to {number_text(p.high)})"
                    if p.low is not None and p.high is not None
                    else ""
                )
                hover.setdefault(p.x, (p.label, []))[1].append((index, y(p.y), number_text(p.y) + spread))
    ends = [(s.label, [p for p in s.points if p.y is not None]) for s in series]
    told = [
        f"{name}: {number_text(p[0].y or 0)} at {p[0].label}, {number_text(p[-1].y or 0)} at {p[-1].label}"
        for name, p in ends
        if p
    ]
    return Chart(
        title=title,
        unit=unit,
        summary="; ".join(told),
        y_ticks=y_ticks,
        x_ticks=x_ticks,
        warm_end=warm_end,
        marks=marks,
        names=[(s.label, s.style) for s in series],
        hover=[(_r(x(at)), label, values) for at, (label, values) in sorted(hover.items())],
    )


def stacked_bars(title: str, unit: str, steps: Sequence[int], parts: Sequence[tuple[str, Sequence[float]]]) -> Chart:
    """Stacked bars of each step's parts, first part lowest; with many steps a bar shows the mean of several. A part's
    colour is that of its place; parts that are 0 at all steps are left out."""
    colors = [i for i, (_, values) in enumerate(parts) if any(values)] or list(range(len(parts)))
    parts, size = [parts[i] for i in colors], math.ceil(len(steps) / MAX_BARS)
    starts = range(0, len(steps), size)
    means = [[sum(v[i : i + size]) / len(v[i : i + size]) for i in starts] for _, v in parts]
    y_ticks, y = _y_axis(0.0, max(map(sum, zip(*means, strict=True))) or 1.0)
    slot = (RIGHT - LEFT) / len(starts)
    paths: list[list[str]] = [[] for _ in parts]
    hover = []
    for bar, start in enumerate(starts):
        left, base = LEFT + bar * slot, 0.0
        first, last = steps[start], steps[min(start + size, len(steps)) - 1]
        values = []
        for index, mean in enumerate(means):
            bottom, top = y(base), y(base + mean[bar])
            paths[index].append(f"M{_r(left + slot * 0.08)} {bottom}V{top}h{_r(slot * 0.84)}V{bottom}Z")
            values.append((index, top, number_text(mean[bar])))
            base += mean[bar]
        label = f"step {first}" if first == last else f"steps {first}-{last}, mean"
        hover.append((_r(left + slot / 2), label, values[::-1]))
    x_ticks = [
        Tick(at=_r(LEFT + ((t - steps[0]) / size + 0.5) * slot), text=number_text(t))
        for t in _ticks(steps[0], steps[-1], 5)
    ]
    return Chart(
        title=title,
        unit=unit,
        summary="; ".join(f"{name}: {number_text(sum(v) / len(v))} on average" for name, v in parts),
        y_ticks=y_ticks,
        x_ticks=[t for t in x_ticks if LEFT <= t.at <= RIGHT],
        warm_end=None,
        marks=[Mark(kind="bar", style=i, path="".join(p)) for i, p in zip(colors, paths, strict=True)],
        names=[(name, i) for i, (name, _) in zip(colors, parts, strict=True)],
        hover=hover,
    )


def thinned(points: Sequence[T], value: Callable[[T], float | None]) -> Sequence[T]:
    """Those of `places_of_thinned`."""
    if len(points) <= MAX_POINTS + 2:
        return points
    values = [math.nan if (found := value(point)) is None else found for point in points]
    return [points[i] for i in places_of_thinned(np.array(values))]


def places_of_thinned(values: NDArray[np.float64]) -> list[int]:
    """Of about MAX_POINTS of them, finite or NaN: the least and the greatest of each bucket, so that no spike is lost,
    and both ends."""
    if len(values) <= MAX_POINTS + 2:
        return list(range(len(values)))
    size = math.ceil(2 * len(values) / MAX_POINTS)
    buckets = np.full((math.ceil((len(values) - 2) / size), size), math.nan)
    buckets.flat[: len(values) - 2] = values[1:-1]
    known = ~np.isnan(buckets)
    ends = np.where(known, buckets, math.inf).argmin(1), np.where(known, buckets, -math.inf).argmax(1)
    inner = (np.sort(np.stack(ends, 1), 1) + size * np.arange(len(buckets))[:, None])[known.any(1)] + 1
    return [0, *dict.fromkeys(inner.ravel().tolist()), len(values) - 1]


def averaged(values: Sequence[tuple[float, str, float | None]]) -> list[Point]:
    """Points of (x, label, value). Of the RL steps at most MAX_MEANS, each the mean of several: among many lines spikes
    hide the others."""
    warm, rest = [one for one in values if one[0] < 0], [one for one in values if one[0] >= 0]
    size = math.ceil(len(rest) / MAX_MEANS)
    if size <= 1:
        return [Point(x=x, y=value, label=label) for x, label, value in values]
    means = [Point(x=x, y=value, label=label) for x, label, value in warm]
    for part in (rest[i : i + size] for i in range(0, len(rest), size)):
        there = [value for _, _, value in part if value is not None]
        mean = math.fsum(there) / len(there) if there else None
        x = math.fsum(x for x, _, _ in part) / len(part)
        means.append(Point(x=x, y=mean, label=f"{part[0][1]} to {part[-1][1]}, mean"))
    return means


def histogram_chart(title: str, unit: str, what: str, weights: Sequence[float]) -> Chart:
    """A bar for each of 0, 1, 2 and on: its share of ``what``. Some weight is above 0."""
    shares = [weight / sum(weights) for weight in weights]
    y_ticks, y = _y_axis(0.0, max(shares))
    slot = (RIGHT - LEFT) / len(shares)
    centers = [LEFT + (place + 0.5) * slot for place in range(len(shares))]
    boxes = (
        f"M{_r(at - slot * 0.42)} {BOTTOM}V{y(share)}h{_r(slot * 0.84)}V{BOTTOM}Z"
        for at, share in zip(centers, shares, strict=True)
    )
    ages = [t for t in _ticks(0, len(shares) - 1, 8) if t == int(t)]
    told = [f"{share:.1%}" for share in shares]
    return Chart(
        title=title,
        unit=unit,
        summary="; ".join(f"{place}: {text}" for place, text in enumerate(told)),
        y_ticks=y_ticks,
        x_ticks=[Tick(at=_r(centers[int(t)]), text=number_text(t)) for t in ages],
        warm_end=None,
        marks=[Mark(kind="bar", style=0, path="".join(boxes))],
        names=[(what, 0)],
        hover=[(_r(at), f"staleness {i}", [(0, y(shares[i]), told[i])]) for i, at in enumerate(centers)],
    )


def _r(value: float) -> float:
    return round(value, 1)


def _of_a_thousand(series: Sequence[Series]) -> tuple[str, list[Series]]:
    """The unit in which the greatest number of bytes is at least 1, and the lines in it."""
    most = max(abs(p.y) for s in series for p in s.points if p.y is not None)
    size, unit = next(((size, unit) for size, unit in _SIZES if most >= size), (1.0, "bytes"))

    def scaled(value: float | None) -> float | None:
        return None if value is None else value / size

    def point(p: Point) -> Point:
        return replace(p, y=scaled(p.y), low=scaled(p.low), high=scaled(p.high))

    return unit, [replace(s, points=[point(p) for p in s.points]) for s in series]


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers in [low, high], about ``count`` of them, 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / count or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    digits = 1 - math.floor(math.log10(step))  # 3 * 0.1 is 0.3
    return [round(i * step, digits) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _texts(ticks: Sequence[float]) -> list[str]:
    """Each tick as a number, of as many digits as it has."""
    apart = min((b - a for a, b in itertools.pairwise(ticks)), default=math.inf)

    def of(digits: int) -> list[str]:
        return [number_text(t, digits) for t in ticks]

    def is_exact(texts: Sequence[str]) -> bool:
        return all(abs(float(text.replace(",", "")) - t) < 0.01 * apart for text, t in zip(texts, ticks, strict=True))

    return next(filter(is_exact, map(of, range(4, _MOST_DIGITS))), of(_MOST_DIGITS))


def _y_limits(low: float, high: float) -> tuple[float, float]:
    """Limits with a margin above and below; from zero if zero is near."""
    if low == high:
        pad = abs(low) * 0.5 or 1.0
        return (0.0, high + pad) if low >= 0 else (low - pad, high + pad)
    pad = (high - low) * 0.06
    return (0.0 if 0 <= low < 0.5 * high else low - pad), (high + pad if high > 0 or low >= 0 else min(high + pad, 0.0))


def _y_axis(low: float, high: float) -> tuple[list[Tick], Callable[[float], float]]:
    def place(value: float) -> float:  # within the frame, as a band may leave the limits
        value = min(max(value, low), high)
        return _r(BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP))

    ticks = _ticks(low, high, 5)
    return [Tick(at=place(t), text=text) for t, text in zip(ticks, _texts(ticks), strict=True)], place


def _x_axis(xs: Sequence[float]) -> tuple[list[Tick], Callable[[float], float], float | None]:
    warm = min(xs) < 0
    first, last = (0.0, max(*xs, 0.0)) if warm else (min(xs), max(xs))
    start = LEFT + (RIGHT - LEFT) * (_WARM_SHARE if warm else 0.0)
    if warm and last == 0:  # nothing but a warm start
        start = RIGHT

    def place(x: float) -> float:
        if x < 0:
            return LEFT + (1 + x) * (start - LEFT)
        return start + (x - first) / ((last - first) or 1.0) * (RIGHT - start)

    ticks = [Tick(at=_r(place(t)), text=number_text(t)) for t in _ticks(first, last, 5) if t == int(t)]
    return ticks, place, _r(start) if warm else None


def _line(points: Sequence[Point], x: Callable[[float], float], y: Callable[[float], float]) -> str:
    out, pen = [], "M"
    for i, p in enumerate(points):
        if p.y is None:
            pen = "M"
            continue
        alone = pen == "M" and (i + 1 == len(points) or points[i + 1].y is None)
        out.append(f"{pen}{_r(x(p.x))} {y(p.y)}" + ("h0" if alone else ""))  # a round line cap makes h0 a dot
        pen = "L"
    return "".join(out)


def _band(points: Sequence[Point], x: Callable[[float], float], y: Callable[[float], float]) -> str:
    inside = [(x(p.x), p.low, p.high) for p in points if p.low is not None and p.high is not None]
    if len(inside) < 2:
        return ""
    upper = [f"{_r(at)} {y(high)}" for at, _, high in inside]
    lower = [f"{_r(at)} {y(low)}" for at, low, _ in reversed(inside)]
    return f"M{'L'.join([*upper, *lower])}Z"
