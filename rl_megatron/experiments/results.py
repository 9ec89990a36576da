"""What a study has found so far, from its runs' rows: results of arms, differences and fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rl_megatron.errors import DataError
from rl_megatron.experiments.cells import Cell
from rl_megatron.experiments.sigmoid import SeedCurve, SigmoidFit, fit_sigmoid, why_not
from rl_megatron.experiments.states import CellStanding, CellState
from rl_megatron.experiments.study import Study
from rl_megatron.observability.files import JsonRow, number
from rl_megatron.observability.history import Run
from rl_megatron.observability.intervals import Interval, contrast, mean_interval

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
