"""Writes a study's results so far: the page over its runs, results as JSON and CSV, and fits.

Results of arms, differences and fits are computed from the runs' rows. A fit is of ScaleRL's curve
R(C) = R0 + (A - R0) / (1 + (Cmid / C)^B) to several seeds, with intervals (arXiv:2510.13786). C is compute, R a pass
rate; A is the ceiling, B and Cmid say how soon it is reached. It is by least squares over all points of all seeds: a
grid of (B, Cmid), each with its best R0 and A, then Levenberg-Marquardt in (R0, A, log B, log Cmid).

Intervals are studentized over seeds, because seeds are independent and points of one run are not. To first order the
fit is the mean over seeds of influences G (J'J)^-1 J_s' e_s. Their spread gives the covariance (a sandwich, clustered
by seed), with Student's t of G - 1 degrees. They describe the mean curve over seeds. bench/fits.py measures how often
they hold the truth: 94 to 97 % of 500 synthetic studies of 5 seeds, for each parameter.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_megatron.errors import DataError
from rl_megatron.feature import Curve
from rl_megatron.files import write_atomically
from rl_megatron.observability.charts import DOTTED, Chart, Series
from rl_megatron.observability.files import JsonRow, number
from rl_megatron.observability.history import Run, load_runs, number_text
from rl_megatron.observability.intervals import Interval, contrast, mean_interval, t_quantile
from rl_megatron.observability.metrics import documented
from rl_megatron.observability.report import Arm, Panel, arms_chart, group_runs, write_page
from tools.lab.states import CellStanding, CellState, describe_drift, find_states
from tools.lab.study import Cell, Study, study_arms

COUNTED = (CellState.DONE, CellState.SPENT)
"""The states of cells with results that are compared and fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRun:
    """A cell that has recorded steps. ``points`` are (step, compute, value) of the study's metric."""

    standing: CellStanding
    run: Run
    points: Sequence[tuple[float, float, float]]

    @property
    def counted(self) -> bool:
        """True if the cell has ended, so that its result is compared."""
        return self.standing.state in COUNTED

    def spent(self) -> Iterator[dict[str, float | None]]:
        """Yields compute up to each of the run's rows of RL, by every measure."""
        return compute_spent(self.standing.cell, self.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFit:
    """An arm's fit, or the reason that there is none."""

    refused: str | None
    fit: SigmoidFit | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResults:
    """A study's results, by arm in its order; ``differences`` by their names."""

    results: Mapping[str, Mapping[int, float]]  # arm -> seed -> result
    means: Mapping[str, Interval]
    differences: Mapping[str, Interval | None]
    fits: Mapping[str, ArmFit]

    def document(self, study: Study, found: Sequence[CellStanding]) -> dict[str, Any]:
        """Returns the results as JSON values, with the state of every cell."""
        return {
            "metric": study.evaluation.metric,
            "compute": study.evaluation.compute,
            "cells": [
                {
                    "arm": each.cell.arm,
                    "seed": each.cell.seed,
                    "run": each.cell.name,
                    "state": each.state.value,
                    "step": each.step,
                    "result": self.results.get(each.cell.arm, {}).get(each.cell.seed),
                    "seconds": each.seconds,
                    "reason": each.reason,
                }
                for each in found
            ],
            "arms": {arm: _interval_document(interval) for arm, interval in self.means.items()},
            "paired": study.paired,
            "differences": {name: found and _interval_document(found) for name, found in self.differences.items()},
            "fits": {arm: _fit_document(each) for arm, each in self.fits.items()},
        }


SPENT = {"tokens": "tokens/rollout", "device_seconds": "seconds/step", "flops": "flops/train"}
"""The measures of compute that add up over steps, each with the metric of one step."""


def curve_points(study: Study, cell: Cell, run: Run) -> list[tuple[float, float, float]]:
    """Returns (step, compute, value) of RL's rows with the study's metric. Raises DataError if compute was not
    recorded; FLOPs must be in every row of a step that trained."""
    name, rows = study.evaluation.compute, _rows(run)
    made = [row for row in rows if number(row, "step")]
    if name != "steps" and made and not any(SPENT[name] in row for row in made):
        raise DataError(
            f"{cell.folder}: evaluation.compute={name}, but no row has {SPENT[name]}, as those of older versions; take "
            "another measure, or run the cell again"
        )
    without = [f"{number(row, 'step'):.0f}" for row in made if name == "flops" and _uncounted(cell, row)]
    if without:
        raise DataError(
            f"{cell.folder}: evaluation.compute=flops, but {len(without)} of {len(made)} rows have no {SPENT[name]}, "
            f"the first of step {without[0]}, as those of older versions; take another measure, or run the cell again"
        )
    return [
        (spent["steps"] or 0.0, spent[name] or 0.0, value)
        for value, spent in zip(run.rl.values(study.evaluation.metric).tolist(), compute_spent(cell, run), strict=True)
        if not math.isnan(value)
    ]


def compute_spent(cell: Cell, run: Run) -> Iterator[dict[str, float | None]]:
    """Yields compute up to each row, by every measure. FLOPs are None from the first row that lacks them, and tokens if
    the job samples none."""
    total: dict[str, float | None] = dict.fromkeys(SPENT, 0.0)
    if not cell.config.kind.samples:
        total["tokens"] = None
    for row in _rows(run):
        for name, metric in SPENT.items():
            factor, so_far = cell.processes if name == "device_seconds" else 1, total[name]
            known = so_far is not None and not (name == "flops" and _uncounted(cell, row))
            total[name] = (so_far or 0.0) + factor * (number(row, metric) or 0.0) if known else None
        yield {"steps": number(row, "step") or 0.0, **total}


def _rows(run: Run) -> list[JsonRow]:
    return run.rl.rows("step", "tokens/train", *SPENT.values())


def _uncounted(cell: Cell, row: JsonRow) -> bool:
    """True if the row's step trained the policy, and its FLOPs are not recorded."""
    step, algorithm = number(row, "step") or 0.0, cell.config.algorithm
    trained = step > (algorithm.critic.only_steps if algorithm.needs_critic else 0) and row.get("tokens/train") != 0
    return trained and number(row, SPENT["flops"]) is None


def make_results(study: Study, arms: Sequence[str], runs: Sequence[CellRun]) -> StudyResults:
    """Compares and fits the runs that have ended."""
    of = {arm: [each for each in runs if each.standing.cell.arm == arm] for arm in arms}
    lasts = {arm: {e.standing.cell.seed: _last(study, e) for e in of[arm] if e.counted} for arm in arms}
    results = {arm: {s: last for s, last in by_seed.items() if last is not None} for arm, by_seed in lasts.items()}
    return StudyResults(
        results=results,
        means={arm: mean_interval(list(by_seed.values())) for arm, by_seed in results.items() if by_seed},
        differences={
            name: contrast(results, weights, paired=study.paired) for name, weights in _contrasts(study, arms)
        },
        fits={arm: _fit(study, [each for each in of[arm] if each.counted]) for arm in arms},
    )


def curves_for_fit(study: Study, runs: Sequence[CellRun]) -> list[SeedCurve]:
    """Returns the points of each run that a fit uses."""
    kept = [points_for_fit(study, each) for each in runs]
    return [
        SeedCurve(compute=np.array([c for _, c, _ in points]), reached=np.array([v for _, _, v in points]))
        for points in kept
        if points
    ]


def points_for_fit(study: Study, each: CellRun) -> list[tuple[float, float, float]]:
    """Returns (step, compute, value) of those points; none if the run's last values are not finite."""
    if _last(study, each) is None:
        return []
    return [point for point in each.points if point[1] > 0 and point[1] >= study.evaluation.from_compute]


def _contrasts(study: Study, arms: Sequence[str]) -> Iterator[tuple[str, Mapping[str, float]]]:
    reference = study.reference or arms[0]
    for arm in arms:
        if arm != reference:
            yield f"{arm} - {reference}", {arm: 1.0, reference: -1.0}
    yield from study.contrasts.items()


def _last(study: Study, each: CellRun) -> float | None:
    """Returns the mean of a run's last values; None if it has none, or if one is not finite (a diverged run)."""
    rows, metric = each.run.rl, study.evaluation.metric
    values = rows.values(metric)[rows.recorded(metric)][-study.evaluation.last :].tolist()
    return sum(values) / len(values) if values and not any(map(math.isnan, values)) else None


def _fit(study: Study, runs: Sequence[CellRun]) -> ArmFit:
    curves, limits = curves_for_fit(study, runs), study.evaluation.limits
    refused = find_fit_problem(curves, limits) if runs else "none of its runs has ended"
    return ArmFit(refused=refused, fit=None if refused else fit_sigmoid(curves, limits))


def _interval_document(interval: Interval) -> dict[str, Any]:
    """Returns the interval as JSON values, without ends if all seeds are equal."""
    return asdict(interval) | ({"low": None, "high": None} if interval.all_equal else {})


def _fit_document(each: ArmFit) -> dict[str, Any]:
    fit = each.fit
    return {
        "refused": each.refused,
        "parameters": None if fit is None else {name: asdict(found) for name, found in fit.intervals().items()},
        "at_bound": [] if fit is None else list(fit.at_bound),
        "rms_error": None if fit is None else fit.error,
    }


_UNITS = {
    "steps": "RL steps",
    "tokens": "sampled tokens",
    "device_seconds": "process seconds",
    "flops": "FLOPs of training",
}
_PAIRS = range(2, 101)
_POINTS = 60  # points of a fitted curve


def write_study_report(study: Study, cells: Sequence[Cell], out: Path) -> Path:
    """Writes the page ``out``, and results.json, results.csv and curves.csv to its folder. Returns the page.

    Cells may still run, wait or have failed: the page names them. Raises DataError if none has recorded a step.
    """
    found = find_states(study, cells)
    names = list(study_arms(study))
    begun = sorted((each for each in found if each.recorded), key=lambda each: names.index(each.cell.arm))
    if not begun:
        raise DataError(f"{study.folder}: no cell has recorded a step yet; start them with rl-megatron experiment run")
    loaded = load_runs([each.cell.folder for each in begun])
    runs = [
        CellRun(standing=each, run=run, points=curve_points(study, each.cell, run))
        for each, run in zip(begun, loaded, strict=True)
    ]
    results = make_results(study, names, runs)
    arms = group_runs(loaded, [each.cell.arm for each in begun])
    style = dict(zip(dict.fromkeys(each.cell.arm for each in begun), (arm.style for arm in arms), strict=True))
    drawn = _drawn(study, results, runs, arms, style)
    panels = _panels(study, found, results, runs, drawn, style)
    write_page(arms, out, title=f"Study {study.folder.name if study.folder else out.stem}", panels=panels)
    document = json.dumps(results.document(study, found), indent=1)
    write_atomically(out.with_name("results.json"), f"{document}\n".encode())
    write_atomically(out.with_name("results.csv"), _results_csv(results, found, runs).encode())
    write_atomically(out.with_name("curves.csv"), _curves_csv(study, runs).encode())
    return out


def _drawn(
    study: Study, results: StudyResults, runs: Sequence[CellRun], arms: Sequence[Arm], style: Mapping[str, int]
) -> dict[str, Chart]:
    """Returns charts by their names: the metric, and each fit."""
    metric = study.evaluation.metric
    curves = arms_chart(Curve("Results", metric, metric=metric, limits=study.evaluation.limits), arms)
    charts = {"curves": curves} if curves else {}
    for arm, each in results.fits.items():
        if each.fit is not None:
            counted = [run for run in runs if run.standing.cell.arm == arm and run.counted]
            charts[f"fit {arm}"] = _fit_chart(study, arm, each, counted, style[arm])
    return charts


def _fit_chart(study: Study, arm: str, each: ArmFit, runs: Sequence[CellRun], style: int) -> Chart:
    assert each.fit is not None
    curves, unit = curves_for_fit(study, runs), _UNITS[study.evaluation.compute]
    at = np.linspace(min(c.compute.min() for c in curves), max(c.compute.max() for c in curves), _POINTS)
    values, half = each.fit.at(at)
    low, high = (None, None) if half is None else (values - half, values + half)
    by_step = sorted(point for run in runs for point in points_for_fit(study, run))
    at_step = (list(points) for _, points in itertools.groupby(by_step, key=lambda point: point[0]))
    x, means = np.array([np.mean([point[1:] for point in points], axis=0) for points in at_step]).T
    lines = [
        Series(name="fit, with its 95 % band", style=style, x=at, y=values, low=low, high=high),
        Series(name="mean of runs (dotted)", style=style % (DOTTED // 2) + DOTTED, x=x, y=means),
    ]
    title, limits = f"{arm}: {study.evaluation.metric} by {unit}", study.evaluation.limits
    return Chart(title=title, unit="", series=lines, axis=unit, limits=limits)


def _panels(
    study: Study,
    found: Sequence[CellStanding],
    results: StudyResults,
    runs: Sequence[CellRun],
    drawn: Mapping[str, Chart],
    style: Mapping[str, int],
) -> list[Panel]:
    panels = [_results_panel(study, found, results, runs, drawn, style)]
    if results.differences:
        rows = [
            [
                name,
                str(i.count if i else 0),
                number_text(i.value) if i else "-",
                _ends(i),
                _describe_difference(i, study.paired),
            ]
            for name, i in results.differences.items()
        ]
        how = "seed by seed, by Student's t" if study.paired else "between arms, by Welch's interval"
        notes = [
            f"Differences are taken {how}. Intervals are not corrected for their number: if 20 differences were 0, "
            "expect one interval to exclude 0."
        ]
        if any(found is not None and found.all_equal for found in results.differences.values()):
            notes.append(
                "If all values are equal, for example because a metric has few levels, there is no interval: their "
                "spread does not predict the next seed."
            )
        columns = ["Difference", "Pairs" if study.paired else "Runs", "Value", "95 % interval", "In words"]
        panels.append(Panel(title="Differences", notes=notes, columns=columns, rows=rows))
    panels.append(_fits_panel(study, results, [chart for name, chart in drawn.items() if name.startswith("fit ")]))
    return panels


def _results_panel(
    study: Study,
    found: Sequence[CellStanding],
    results: StudyResults,
    runs: Sequence[CellRun],
    drawn: Mapping[str, Chart],
    style: Mapping[str, int],
) -> Panel:
    metric = documented(study.evaluation.metric)
    last = study.evaluation.last
    which = "the last value" if last == 1 else f"the mean of the last {last} values"
    notes = [f"A run's result is {which} of {study.evaluation.metric}: {metric.meaning if metric else ''}."]
    measured = {run.standing.cell.name for run in runs if run.points}
    notes += [note for each in found if (note := _remark(study, results, each, measured))]
    notes += [
        f"{each.cell.name}: {line}" for each in found if each.state in COUNTED if (line := describe_drift(each.cell))
    ]
    notes.append("The last three columns: a run's tokens sampled, seconds times learner processes, and training FLOPs.")
    rows = []
    for arm, by_seed in results.results.items():
        interval = results.means.get(arm)
        each_one = " ".join(number_text(by_seed[seed]) for seed in sorted(by_seed))
        mean = number_text(interval.value) if interval else "-"
        mine = [list(run.spent())[-1] for run in runs if run.standing.cell.arm == arm and run.counted]
        spent = [_mean([s[name] for s in mine]) for name in SPENT]
        rows.append([arm, str(len(by_seed)), mean, _ends(interval, study.evaluation.limits), each_one or "-", *spent])
    columns = ["Arm", "Runs", "Mean", "95 % interval", "Each run", "Tokens", "Process seconds", "FLOPs of training"]
    return Panel(
        title="Results",
        notes=notes,
        columns=columns,
        rows=rows,
        styles=[style.get(arm) for arm in results.results],
        charts=[drawn["curves"]] if "curves" in drawn else [],
    )


def _remark(study: Study, results: StudyResults, each: CellStanding, measured: Set[str]) -> str | None:
    """Returns a note on a cell with a result that is not of a whole run. Cells in ``measured`` have a finite value."""
    at = f" at step {each.step} of {each.cell.config.train.steps}" if each.recorded else ""
    why = f": {each.reason}" if each.reason else ""
    named = f"{each.cell.name} ({each.state}{at}{why})"
    if each.state not in COUNTED:
        return f"Not in means, differences and fits: {named}"
    if each.cell.seed not in results.results[each.cell.arm]:
        lacks = "finite last values" if each.cell.name in measured else "a value"
        return f"Without {lacks} of {study.evaluation.metric}, so not in means, differences and fits: {named}"
    return f"Counted as it is: {named}" if each.state is CellState.SPENT else None


def _fits_panel(study: Study, results: StudyResults, charts: Sequence[Chart]) -> Panel:
    rows, refused = [], []
    for arm, each in results.fits.items():
        cells = ["no fit", *["-"] * (len(NAMES) - 1)]
        if each.refused:
            refused.append(f"{arm}: no fit ({each.refused}).")
        if each.fit is not None:
            cells = [
                f"{number_text(i.value)}" + (" (bound)" if name in each.fit.at_bound else f" ({_ends(i)})")
                for name, i in each.fit.intervals().items()
            ]
        rows.append([arm, *cells])
    notes = [
        f"R(C) = R0 + (A - R0) / (1 + (Cmid / C)^B) (ScaleRL), C in {_UNITS[study.evaluation.compute]}; 95 % intervals "
        "are by Student's t over seeds. An arm has no fit if its runs cannot determine one.",
        *refused,
    ]
    return Panel(title="Fits", notes=notes, columns=["Arm", *NAMES], rows=rows, charts=charts)


def _mean(values: Sequence[float | None]) -> str:
    """Returns the mean of values if all are known, otherwise a dash."""
    known = [value for value in values if value is not None]
    return number_text(sum(known) / len(known)) if known and len(known) == len(values) else "-"


def _ends(interval: Interval | None, limits: tuple[float, float] | None = None) -> str:
    """Returns the ends of an interval, cut at the ``limits`` of the metric."""
    if interval is None or interval.low is None or interval.high is None:
        return "-"
    if interval.all_equal:
        return f"none: all {interval.count} are equal"
    least, most = limits or (-math.inf, math.inf)
    return f"{number_text(max(interval.low, least))} to {number_text(min(interval.high, most))}"


def _describe_difference(interval: Interval | None, paired: bool) -> str:
    """Returns what a reader may conclude: higher, lower, or the number of pairs that would show such a difference."""
    if interval is None or interval.low is None or interval.high is None or interval.all_equal:
        return "-"
    if interval.excludes_zero:
        return "higher" if interval.value > 0 else "lower"
    if not paired or interval.value == 0:
        return "no difference seen"
    spread = (interval.high - interval.value) * math.sqrt(interval.count) / t_quantile(interval.count - 1)
    pairs = next((n for n in _PAIRS if t_quantile(n - 1) * spread <= abs(interval.value) * math.sqrt(n)), None)
    enough = f"about {pairs}" if pairs else f"more than {_PAIRS[-1]}"
    return f"no difference seen; {enough} pairs would show one of this size"


def _results_csv(results: StudyResults, found: Sequence[CellStanding], runs: Sequence[CellRun]) -> str:
    spent = {each.standing.cell.name: list(each.spent())[-1] for each in runs}
    rows = [
        [
            *(e.cell.arm, e.cell.seed, e.cell.name, e.state.value, e.step),
            results.results[e.cell.arm].get(e.cell.seed, ""),
            *(spent[e.cell.name][name] if e.cell.name in spent else "" for name in SPENT),
        ]
        for e in found
    ]
    return _csv(["arm", "seed", "run", "state", "step", "result", *SPENT], rows)


def _curves_csv(study: Study, runs: Sequence[CellRun]) -> str:
    rows = []
    for each in runs:
        at = {spent["steps"]: spent for spent in each.spent()}
        cell = each.standing.cell
        rows += [[cell.arm, cell.seed, int(s), *(at[s][name] for name in SPENT), v] for s, _, v in each.points]
    return _csv(["arm", "seed", "step", *SPENT, study.evaluation.metric], rows)


def _csv(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue()


Array = NDArray[np.float64]
NAMES = ("R0", "A", "B", "Cmid")
"""The parameters in their order."""
LEAST_SPAN, LEAST_POINTS = 4.0, 6
_STEEPNESS = (0.1, 10.0)  # bounds of B
_STEPS = 200  # the most steps of the last search
_LEAST_SHARE = 0.75  # share of the rise by the last point: there the slope is 3/4 of the greatest
_LEAST_F = 7.0
_WORST_CONDITION = 1e14
_LARGEST = 700.0  # logarithm of the largest finite number
_MOST_OF_CEILING = 0.5  # half the interval of A, as a share of the observed rise


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedCurve:
    """One seed's points: compute > 0 and the values reached, [n] each."""

    compute: Array
    reached: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidFit:
    """The curve that fits best. ``covariance`` [4, 4] is of (R0, A, log B, log Cmid), without those ``at_bound``; None
    for a single seed, or if the points do not determine the parameters.
    """

    parameters: Array  # R0, A, B, Cmid
    covariance: Array | None
    at_bound: tuple[str, ...]
    seeds: int
    error: float  # root mean squared error of the points

    def intervals(self) -> dict[str, Interval]:
        """Returns intervals by parameter; B's and Cmid's are symmetric in logarithms, and may lack an upper end."""
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
        """Returns the curve at [n] and half the width of its pointwise band; no band for a single seed."""
        inner = _inner(self.parameters)
        values, slopes = _curve(inner, np.log(compute))
        if self.covariance is None:
            return values, None
        spread = np.einsum("ni,ij,nj->n", slopes, self.covariance, slopes)
        return values, t_quantile(self.seeds - 1) * np.sqrt(np.maximum(spread, 0.0))


def fit_sigmoid(curves: Sequence[SeedCurve], limits: tuple[float, float] | None = None) -> SigmoidFit:
    """Fits the curve; R0 and A stay within ``limits``, as 0 and 1 of a pass rate. Call `find_fit_problem` first."""
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


def find_fit_problem(curves: Sequence[SeedCurve], limits: tuple[float, float] | None) -> str | None:
    """Returns the reason that the points cannot support this fit, in words for the reader; None if they can."""
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
        return "no bend yet: a straight line in the logarithm of compute fits as well"
    last = max(float(curve.compute.max()) for curve in curves)
    share = float(_share(fit.parameters[2], np.log(fit.parameters[3]), np.log(last)))
    if share < _LEAST_SHARE:
        return f"no bend yet: at the last point {share:.0%} of the fitted rise is done; {_LEAST_SHARE:.0%} is needed"
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
    """True if the curve fits better than a straight line in log C, by an F of 7 on (2, n - 2 G - 2).

    The part that a separate line for each seed explains is left out on both sides: differences of seeds are not a bend.
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
    """Returns the sum of squares that no straight line in x explains."""
    return float(np.sum((left - np.polyval(np.polyfit(x, left, 1), x)) ** 2))


def _inner(parameters: Array) -> Array:
    return np.array([parameters[0], parameters[1], np.log(parameters[2]), np.log(parameters[3])])


def _curve(inner: Array, x: Array) -> tuple[Array, Array]:
    """Returns values [n] and slopes [n, 4] by R0, A, log B and log Cmid, at x = log C."""
    floor, ceiling, steepness = inner[0], inner[1], np.exp(inner[2])
    share = _share(steepness, inner[3], x)
    slope = (ceiling - floor) * share * (1 - share) * steepness
    return floor + (ceiling - floor) * share, np.stack([1 - share, share, slope * (x - inner[3]), -slope], axis=1)


def _share(steepness: Array | float, middle: Array | float, x: Array) -> Array:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * steepness * (x - middle))))


def _on_grid(x: Array, y: Array, limits: tuple[float, float] | None) -> Array:
    """Returns the best point of a grid of B and Cmid, with the least-squares R0 and A of each."""
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
    """Returns the lowest and highest values of the inner parameters."""
    ends, steep, middles = limits or (-np.inf, np.inf), np.log(_STEEPNESS), _middles(x)
    low, high = ([ends[side], ends[side], steep[side], middles[side]] for side in (0, 1))
    return np.array(low), np.array(high)


def _polished(inner: Array, x: Array, y: Array, limits: tuple[float, float] | None) -> Array:
    """Runs Levenberg-Marquardt within the bounds; a parameter at a bound that the step would cross stays there."""
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
    """Returns the covariance of the free inner parameters, clustered by seed, others 0; None if it is undetermined."""
    count, out, slopes = len(curves), np.zeros((4, 4)), slopes[:, free]
    normal = slopes.T @ slopes
    if count < 2 or not free.any() or np.linalg.cond(normal) > _WORST_CONDITION:
        return None
    ends = np.cumsum([len(curve.compute) for curve in curves])[:-1]
    parts = zip(np.split(slopes, ends), np.split(residual, ends), strict=True)
    influences = np.array([count * np.linalg.solve(normal, part.T @ left) for part, left in parts])
    out[np.ix_(free, free)] = influences.T @ influences / (count * (count - 1))
    return out
