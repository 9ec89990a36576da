"""Survival of runs up to a collapse: the Kaplan-Meier curve with Greenwood's errors. Pure; no files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_Z = 1.959963984540054  # of the normal distribution, 95 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """A run's last step; ``collapsed`` there, or it had not by then (it is censored)."""

    steps: float
    collapsed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """From this step on, the share of runs that have not collapsed; ``at_risk`` ran up to it.

    ``low`` and ``high`` are None where none is left: no error can be estimated from that.
    """

    step: float
    share: float
    low: float | None
    high: float | None
    at_risk: int


def kaplan_meier(lifetimes: Sequence[Lifetime]) -> list[Survival]:
    """The curve from step 0 on, one row for each step with a collapse, and the last step.

    The interval is pointwise, by log(-log) of the share, so that it stays in [0, 1] (Kalbfleisch and Prentice).
    """
    rows = [Survival(step=0.0, share=1.0, low=1.0, high=1.0, at_risk=len(lifetimes))]
    share, greenwood = 1.0, 0.0
    for step in sorted({each.steps for each in lifetimes if each.collapsed}):
        at_risk = sum(each.steps >= step for each in lifetimes)
        collapsed = sum(each.collapsed and each.steps == step for each in lifetimes)
        share *= 1 - collapsed / at_risk
        if share == 0:
            rows.append(Survival(step=step, share=0.0, low=None, high=None, at_risk=at_risk))
            break
        greenwood += collapsed / (at_risk * (at_risk - collapsed))
        width = math.exp(_Z * math.sqrt(greenwood) / abs(math.log(share)))
        rows.append(Survival(step=step, share=share, low=share**width, high=share ** (1 / width), at_risk=at_risk))
    last = max((each.steps for each in lifetimes), default=0.0)
    if rows[-1].step < last:
        end = rows[-1]
        left = sum(each.steps >= last for each in lifetimes)
        rows.append(Survival(step=last, share=end.share, low=end.low, high=end.high, at_risk=left))
    return rows


def lifetime(points: Sequence[tuple[float, float]], *, below: float, least: float) -> Lifetime | None:
    """When the values of (step, value) first fall below ``below`` times the greatest so far, if that is ``least``.

    None without a value: nothing is known of such a run.
    """
    best = -math.inf
    for step, value in points:
        if best >= least and value < below * best:
            return Lifetime(steps=step, collapsed=True)
        best = max(best, value)
    return Lifetime(steps=points[-1][0], collapsed=False) if points else None
