"""The table of metrics, the places a row goes, its columns, and rates of phases."""

from __future__ import annotations

import json
import logging
import math
import random
from pathlib import Path

import pytest

from rl_megatron.feature import features
from rl_megatron.observability import timeline
from rl_megatron.observability.files import JsonValue, finite
from rl_megatron.observability.history import MetricColumns
from rl_megatron.observability.metrics import (
    COSTS,
    ENVIRONMENTS,
    EXPERTS,
    LEARNING,
    METRICS,
    PHASE_SECONDS,
    SAMPLING,
    checked_row,
    deterministic,
    render_docs,
)
from rl_megatron.observability.recorder import MetricsWriter, Stopwatch

ROW = {"step": 3, "phase": "rl", "loss": 0.25, "reward/mean": 0.5, "seconds/step": 1.5, "tokens_per_second/train": 9.0}
WARM = {"step": 0, "phase": "warm_start", "warm_start/step": 40, "warm_start/loss": 1.25, "eval/accuracy": 0.5}


def _rows(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_docs_are_the_table_of_one_row_a_metric() -> None:
    docs = Path(__file__).parents[3] / "docs" / "metrics.md"
    assert docs.read_text() == render_docs(), "run python -m rl_megatron.observability.metrics > docs/metrics.md"
    table = [line.replace(r"\|", "") for line in render_docs().splitlines() if line.startswith("| `")]
    assert len(table) == len(METRICS)
    assert all(line.count("|") == 4 for line in table)


def test_names_units_and_meanings_are_well_formed() -> None:
    own = [one.metrics for one in features().values()]
    assert len(METRICS) == sum(map(len, (LEARNING, SAMPLING, ENVIRONMENTS, EXPERTS, COSTS, *own)))  # no name twice
    for name, metric in METRICS.items():
        assert metric.name == name
        assert name == name.lower()
        assert metric.meaning
        assert ("seconds" in name) == (metric.unit == "s")
    assert {f"seconds/{phase}" for phase in PHASE_SECONDS} == {n for n in METRICS if n.startswith("seconds/")} - {
        "seconds/step",
        "seconds/verify",
        "seconds/pause",
    }


def test_a_row_is_one_line_as_it_was(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for row in (WARM, ROW):
        assert writer.write(row) == row
    writer.close()
    assert _rows(tmp_path) == [WARM, ROW]


@pytest.mark.parametrize(
    ("name", "near"), [("los", "loss"), ("rewards/mean", "reward/mean"), ("seconds/trian", "seconds/train")]
)
def test_an_undocumented_name_is_refused_with_a_near_one_and_not_written(tmp_path: Path, name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*did you mean '{near}'"):
        MetricsWriter(tmp_path).write({**ROW, name: 1.0})
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_family_of_names_is_documented_once_and_taken_by_each_name() -> None:
    row = {**ROW, "reward/part/style_2": 0.5}
    assert checked_row(row) == row
    assert deterministic(row)["reward/part/style_2"] == 0.5
    assert "| `reward/part/<name>` |" in render_docs()


@pytest.mark.parametrize(
    "name", ["reward/part/", "reward/part/<name>", "reward/part/A", "reward/part/a/b", "reward/parts/a"]
)
def test_a_name_outside_the_family_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not documented"):
        checked_row({**ROW, name: 1.0})


@pytest.mark.parametrize(
    "row", [{"phase": "rl"}, {"step": 1}, {"step": 1.0, "phase": "rl"}, {"step": 1, "phase": "sleep"}]
)
def test_a_row_without_step_or_phase_is_refused(row: dict[str, float | str]) -> None:
    with pytest.raises(ValueError, match="integer step and a phase"):
        checked_row(row)


def test_values_that_are_not_finite_become_null_are_counted_and_warned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        out = checked_row({**ROW, "loss": float("nan"), "grad_norm": float("-inf")})
    assert out["loss"] is None
    assert out["grad_norm"] is None
    assert (out["metrics/non_finite"], out["reward/mean"]) == (2, 0.5)
    assert "step 3 (rl): not finite: loss=nan, grad_norm=-inf" in caplog.text
    assert "metrics/non_finite" not in checked_row(ROW)


def test_deterministic_leaves_out_the_clock_alone() -> None:
    assert deterministic(ROW) == {"step": 3, "phase": "rl", "loss": 0.25, "reward/mean": 0.5}
    assert deterministic({"tokens/rollout": 5, "weights/bytes": 8}) == {"tokens/rollout": 5, "weights/bytes": 8}
    units, names = render_docs().split("Metrics in ")[1].split("depend on the clock")[0].split(", and those of ")
    for name, metric in METRICS.items():
        assert metric.is_timing == (metric.unit in units.split(", ") or f"`{name.split('/')[0]}/`" in names), name


def made(folder: Path) -> Path:
    """A run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_a_resume_writes_the_rows_of_a_run_that_was_never_stopped(tmp_path: Path) -> None:
    def steps(first: int, last: int) -> list[dict[str, float | str]]:
        return [{"step": s, "phase": "rl", "loss": 1.0 / s} for s in range(first, last + 1)]

    whole, killed = MetricsWriter(made(tmp_path / "whole")), MetricsWriter(made(tmp_path / "killed"))
    for row in [WARM, *steps(1, 5)]:
        whole.write(row)
    for row in [WARM, *steps(1, 4)]:
        killed.write(row)
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "pha')
    resumed = MetricsWriter(tmp_path / "killed")
    assert resumed.truncate_after(2) == 2
    for row in steps(3, 5):
        resumed.write(row)
    assert (tmp_path / "killed" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("row", [WARM, {**ROW, "step": 0}, ROW])
def test_a_row_written_again_replaces_its_step_and_phase_alone(row: dict[str, float | str], tmp_path: Path) -> None:
    """Not that of the warm start at step 0, nor that of an evaluation beside the steps, whichever was first."""
    before = [{**WARM, "warm_start/step": 20}] if row is WARM else [WARM]
    beside = [] if row is WARM else [{"step": row["step"], "phase": "eval", "eval/accuracy": 0.25}]
    for number, rows in enumerate([[*before, row, *beside], [*before, *beside, row], [*before, *beside]]):
        writer = MetricsWriter(made(tmp_path / str(number)))
        for each in rows:
            writer.write(each)
        writer.write({**row, "eval/accuracy": 0.75}, again=True)
        assert _rows(tmp_path / str(number)) == [*before, *beside, {**row, "eval/accuracy": 0.75}]


# Rows of metrics by column against the same rows as they are.
VALUES: tuple[JsonValue, ...] = (0, 0.5, -1e300, None, "learner ep=2", True, 10**400, math.inf, -math.inf, math.nan, 7)


def test_rows_of_any_names_are_read_back_as_numbers_and_none() -> None:
    """With names that come late, and values that are put into a row later."""
    rng, rows, columns, seen = random.Random(0), list[dict[str, JsonValue]](), MetricColumns(), dict[str, None]()
    for step in range(1500):
        names = [name for at, name in enumerate("abcde") if rng.random() < 0.7 and step > 400 * (at - 1)]
        rows.append({"step": step, **{name: rng.choice(VALUES) for name in names}})
        columns.append(rows[-1])
        seen |= dict.fromkeys(rows[-1])
        if step in (700, 1499):
            seen["late"] = None
            for at in (3, step):
                rows[at] |= {"late": float(step), "step": -step}
                columns.put(at, {"late": float(step), "step": -step})
    assert (len(columns), columns.names) == (1500, list(seen))
    for name in (*columns.names, "none"):
        assert columns.recorded(name).tolist() == [at for at, row in enumerate(rows) if name in row]
        known = [None if math.isnan(value) else value for value in columns.values(name).tolist()]
        assert known == [finite(row.get(name)) for row in rows]
    few = columns.rows("step", "b", "none")
    assert few == [{name: finite(row[name]) for name in ("step", "b") if name in row} for row in rows]


# Rates of phases: over their own seconds, or over the step's where a phase goes on beside the others.
@pytest.mark.parametrize(("beside", "rate"), [(False, 600.0 / 2), (True, 600.0 / 10)])
def test_what_goes_on_beside_other_phases_has_the_seconds_of_the_step(
    monkeypatch: pytest.MonkeyPatch, beside: bool, rate: float
) -> None:
    times = iter([0, 1, 3, 10])  # the start, the phase, the row
    monkeypatch.setattr(timeline, "now", lambda: next(times) * 10**9)
    watch = Stopwatch()
    with watch("rollout"):
        pass
    watch.count("rollout", 600, in_background=beside)
    row = watch.row()
    assert row["tokens_per_second/rollout"] == rate
    assert (row["seconds/rollout"], row["seconds/step"]) == (2.0, 10.0)
