"""The card at the top of a run's report: its verdicts, each with a small curve of the metric that it is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rl_megatron.observability.history import WITH_GRADIENT, Run
from rl_megatron.observability.verdicts import READS, Verdict, read_run

_WIDTH, _HEIGHT = 120, 28  # px
_MAX_POINTS = 60
_PAGE_CHARTS = {"groups": (WITH_GRADIENT,)}  # charts of figures that rows lack, by topic


@dataclass(frozen=True, slots=True, kw_only=True)
class CardLine:
    """A verdict with the curve of its first metric."""

    verdict: Verdict
    title: str  # the metric's chart
    anchor: str  # id of that chart on the page; empty if the page does not have it
    points: str  # the curve, as points of SVG


def make_card(run: Run, charts: Mapping[str, str], *, needs_differences: bool) -> list[CardLine]:
    """Returns the verdicts on a run with their curves. ``charts``: metric -> title, of the charts on the page.
    ``needs_differences`` as in `read_run`."""
    return [_make_line(run, verdict, charts) for verdict in find_verdicts(run, needs_differences=needs_differences)]


def find_verdicts(run: Run, *, needs_differences: bool) -> list[Verdict]:
    """Returns the verdicts on a run. ``needs_differences`` as in `read_run`."""
    dtype = run.config.get("learner.dtype", "float32")
    return read_run(run.rl.rows(*READS), plan=run.plan, needs_differences=needs_differences, dtype=dtype)


def _make_line(run: Run, verdict: Verdict, charts: Mapping[str, str]) -> CardLine:
    metrics = (*_PAGE_CHARTS.get(verdict.topic, ()), *verdict.charts)
    shown = next((name for name in metrics if name in charts), None)
    drawn = next(name for name in (shown, *verdict.charts) if name is not None and run.numbers(name))
    return CardLine(
        verdict=verdict,
        title=charts[shown] if shown else verdict.topic,
        anchor=f"chart:{shown}" if shown else "",
        points=_curve(run.numbers(drawn)),
    )


def _curve(values: list[float]) -> str:
    """Returns at most 60 points, each the mean of some values."""
    parts = np.array_split(np.array(values), min(len(values), _MAX_POINTS))
    means = np.array([part.mean() for part in parts])
    low, high = means.min(), means.max()
    y = _HEIGHT - 2 - (means - low) / (high - low or 1.0) * (_HEIGHT - 4)
    x = np.linspace(0, _WIDTH, len(means))
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
