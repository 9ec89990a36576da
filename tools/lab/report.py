"""Writes what a study has found so far: the page over its runs, results as JSON and CSV, and figures as SVG.

Results of arms, differences and fits are computed from the runs' rows.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_megatron.errors import DataError
from rl_megatron.feature import Curve
from rl_megatron.files import write_atomically
from rl_megatron.observability.arms import Arm, group_runs
from rl_megatron.observability.files import JsonRow, number
from rl_megatron.observability.history import Run, load_runs, number_text
from rl_megatron.observability.intervals import Interval, contrast, mean_interval
from rl_megatron.observability.metrics.table import documented
from rl_megatron.observability.report import DOTTED, Chart, Panel, Series, arms_chart, write_page
from tools.lab.sigmoid import NAMES, SeedCurve, SigmoidFit, fit_sigmoid, why_not
from tools.lab.states import CellStanding, CellState, Queued, drift_of, find_states
from tools.lab.study import Cell, Study, arms_of

COUNTED = (CellState.DONE, CellState.SPENT)
"""The states of cells whose results are compared and fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRun:
    """A cell that has recorded steps. ``points`` are (step, compute, value) of the study's metric."""

    standing: CellStanding
    run: Run
    points: Sequence[tuple[float, float, float]]

    @property
    def counted(self) -> bool:
        """Whether it has ended, so that its result is compared."""
        return self.standing.state in COUNTED

    def spent(self) -> Iterator[dict[str, float | None]]:
        """Compute up to each of its rows of RL, by every measure."""
        return spent_of(self.standing.cell, self.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFit:
    """An arm's fit, or why there is none."""

    refused: str | None
    fit: SigmoidFit | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResults:
    """By arm, in the study's order; ``differences`` by their names."""

    results: Mapping[str, Mapping[int, float]]  # by arm and seed
    means: Mapping[str, Interval]
    differences: Mapping[str, Interval | None]
    fits: Mapping[str, ArmFit]

    def document(self, study: Study, found: Sequence[CellStanding]) -> dict[str, Any]:
        """The results as JSON values, with what has become of every cell."""
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


def points_of(study: Study, cell: Cell, run: Run) -> list[tuple[float, float, float]]:
    """(step, compute, value) of RL's rows with the study's metric. Raises DataError if compute was not recorded, of
    FLOPs in any row whose step trained."""
    name, made = study.evaluation.compute, [row for row in run.rl if number(row, "step")]
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
        for row, spent in zip(run.rl, spent_of(cell, run), strict=True)
        if (value := number(row, study.evaluation.metric)) is not None
    ]


def spent_of(cell: Cell, run: Run) -> Iterator[dict[str, float | None]]:
    """Compute up to each row, by every measure; FLOPs are None from the first row on that lacks them, and tokens where
    the job samples none."""
    total: dict[str, float | None] = dict.fromkeys(SPENT, 0.0)
    if not cell.config.kind.samples:
        total["tokens"] = None
    for row in run.rl:
        for name, metric in SPENT.items():
            factor, so_far = cell.processes if name == "device_seconds" else 1, total[name]
            known = so_far is not None and not (name == "flops" and _uncounted(cell, row))
            total[name] = (so_far or 0.0) + factor * (number(row, metric) or 0.0) if known else None
        yield {"steps": number(row, "step") or 0.0, **total}


def _uncounted(cell: Cell, row: JsonRow) -> bool:
    """Whether the row's step trained the policy, and its FLOPs are not recorded."""
    step, algorithm = number(row, "step") or 0.0, cell.config.algorithm
    trained = step > (algorithm.critic.only_steps if algorithm.needs_critic else 0) and row.get("tokens/train") != 0
    return trained and number(row, SPENT["flops"]) is None


def results_of(study: Study, arms: Sequence[str], runs: Sequence[CellRun]) -> StudyResults:
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
    """The points of each run that a fit takes."""
    kept = [points_for_fit(study, each) for each in runs]
    return [
        SeedCurve(compute=np.array([c for _, c, _ in points]), reached=np.array([v for _, _, v in points]))
        for points in kept
        if points
    ]


def points_for_fit(study: Study, each: CellRun) -> list[tuple[float, float, float]]:
    """(step, compute, value) of those points; none of a run whose last values are not finite."""
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
    """The mean of its last values; None where it has none, or one of them is not finite, as after it diverged."""
    metric = study.evaluation.metric
    found = [number(row, metric) for row in each.run.rl if metric in row][-study.evaluation.last :]
    values = [value for value in found if value is not None]
    return sum(values) / len(values) if values and len(values) == len(found) else None


def _fit(study: Study, runs: Sequence[CellRun]) -> ArmFit:
    curves, limits = curves_for_fit(study, runs), study.evaluation.limits
    refused = why_not(curves, limits) if runs else "none of its runs has ended"
    return ArmFit(refused=refused, fit=None if refused else fit_sigmoid(curves, limits))


def _interval_document(interval: Interval) -> dict[str, Any]:
    """Without ends where all seeds are equal."""
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
