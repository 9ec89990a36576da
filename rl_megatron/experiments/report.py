"""Writes what a study has found: the page over its runs, and results as JSON and CSV."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import numpy as np

from rl_megatron.durable import write_atomically
from rl_megatron.errors import DataError
from rl_megatron.experiments.cells import Cell, arms_of
from rl_megatron.experiments.queued import Queued
from rl_megatron.experiments.results import (
    COUNTED,
    SPENT,
    ArmFit,
    CellRun,
    StudyResults,
    curves_for_fit,
    points_for_fit,
    points_of,
    results_of,
)
from rl_megatron.experiments.sigmoid import NAMES
from rl_megatron.experiments.states import CellStanding, CellState, drift_of, find_states
from rl_megatron.experiments.study import Study
from rl_megatron.observability.arms import Arm, group_runs
from rl_megatron.observability.charts import DOTTED, Chart, Series, number_text
from rl_megatron.observability.history import load_runs
from rl_megatron.observability.intervals import Interval
from rl_megatron.observability.metrics.curve import Curve
from rl_megatron.observability.metrics.table import documented
from rl_megatron.observability.report import Panel, arms_chart, write_page

_UNITS = {
    "steps": "RL steps",
    "tokens": "sampled tokens",
    "device_seconds": "process seconds",
    "flops": "FLOPs of training",
}
_POINTS = 60  # of a fitted curve


def write_study_report(
    study: Study, cells: Sequence[Cell], out: Path, queue: Mapping[str, Queued] | None = None
) -> Path:
    """Write the page to ``out``, and beside it results.json, results.csv and curves.csv. Returns the page.

    Cells may still run, wait or have failed: the page names them. ``queue`` is what Slurm says of those sent to it,
    None if it was not asked. Raises DataError if none has recorded a step.
    """
    found = find_states(study, cells, queue)
    names = list(arms_of(study))
    begun = sorted((each for each in found if each.recorded), key=lambda each: names.index(each.cell.arm))
    if not begun:
        raise DataError(f"{study.folder}: no cell has recorded a step yet; start them with rl-megatron experiment run")
    loaded = load_runs([each.cell.folder for each in begun])
    runs = [
        CellRun(standing=each, run=run, points=points_of(study, each.cell, run))
        for each, run in zip(begun, loaded, strict=True)
    ]
    results = results_of(study, names, runs)
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
            [name, str(i.count if i else 0), number_text(i.value) if i else "-", _ends(i), _verdict(i)]
            for name, i in results.differences.items()
        ]
        how = "seed by seed, by Student's t" if study.paired else "of arms with seeds of their own, by Welch's interval"
        notes = [f"Differences are taken {how}. Each interval is of one difference alone: of 20 zeros, one excludes 0."]
        if any(found is not None and found.all_equal for found in results.differences.values()):
            notes.append(
                "Where all values are equal, as where a metric has few levels, their spread says nothing of the next "
                "seed's: there is no interval, and nothing is said of 0."
            )
        columns = ["Difference", "Pairs" if study.paired else "Runs", "Value", "95 % interval", "Excludes 0"]
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
    notes += [f"{each.cell.name}: {line}" for each in found if each.state in COUNTED if (line := drift_of(each.cell))]
    notes.append("The last three columns: a run's tokens sampled, seconds times learner processes, and training FLOPs.")
    rows = []
    for arm, by_seed in results.results.items():
        interval = results.means.get(arm)
        each_one = " ".join(number_text(by_seed[seed]) for seed in sorted(by_seed))
        mean = number_text(interval.value) if interval else "-"
        mine = [list(run.spent())[-1] for run in runs if run.standing.cell.arm == arm and run.counted]
        spent = [_mean([s[name] for s in mine]) for name in SPENT]
        rows.append([arm, str(len(by_seed)), mean, _ends(interval), each_one or "-", *spent])
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
    """What a reader must know of a cell whose result is not that of a whole run; ``measured`` have a finite value."""
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
        cells = ["refused", *["-"] * (len(NAMES) - 1)]
        if each.refused:
            refused.append(f"{arm}: refused, as {each.refused}.")
        if each.fit is not None:
            cells = [
                f"{number_text(i.value)}" + (" (bound)" if name in each.fit.at_bound else f" ({_ends(i)})")
                for name, i in each.fit.intervals().items()
            ]
        rows.append([arm, *cells])
    notes = [
        f"R(C) = R0 + (A - R0) / (1 + (Cmid / C)^B) (ScaleRL), C in {_UNITS[study.evaluation.compute]}; 95 % intervals "
        "are studentised over seeds. A fit that the data cannot carry is refused.",
        *refused,
    ]
    return Panel(title="Fits", notes=notes, columns=["Arm", *NAMES], rows=rows, charts=charts)


def _mean(values: Sequence[float | None]) -> str:
    """Of values all of which are known."""
    known = [value for value in values if value is not None]
    return number_text(sum(known) / len(known)) if known and len(known) == len(values) else "-"


def _ends(interval: Interval | None) -> str:
    if interval is None or interval.low is None or interval.high is None:
        return "-"
    if interval.all_equal:
        return f"none: all {interval.count} are equal"
    return f"{number_text(interval.low)} to {number_text(interval.high)}"


def _verdict(interval: Interval | None) -> str:
    if interval is None or interval.low is None or interval.all_equal:
        return "-"
    return "yes" if interval.excludes_zero else "no"


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
