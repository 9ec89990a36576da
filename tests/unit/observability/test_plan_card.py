"""What a plan predicted stands beside the medians of the steps since the run's last start."""

from __future__ import annotations

import json
from pathlib import Path

from rl_megatron.observability.history import load_runs
from rl_megatron.observability.metrics.writer import MetricsWriter
from rl_megatron.observability.plan_card import make_plan_card
from rl_megatron.observability.report import write_report
from tests.unit.observability.report_pages import a_run

PLAN = {"seconds/train": 10.0, "seconds/weights": 3.0, "memory/peak": 60e9, "response/length_mean": 3584.0}


def run_with_steps(folder: Path, seconds: list[float], *, start: int = 0) -> Path:
    metrics = MetricsWriter(a_run(folder, steps=0, warm=0, train={"steps": 20, "max_staleness": 1}))
    for step, each in enumerate(seconds, 1):
        row = {"seconds/train": each, "memory/peak": 5e10 + step, "response/length_mean": 1792.0}
        metrics.write({"phase": "rl", "step": step, **row})
    metrics.close()
    (folder / "starts.jsonl").write_text(json.dumps({"step": start}) + "\n")
    return folder


def test_each_part_that_was_predicted_and_measured_has_a_row(tmp_path: Path) -> None:
    folder = run_with_steps(tmp_path / "a", [99.0, 99.0, 99.0, 50.0, 20.0, 4.0, 9.0, 5.0], start=3)
    (folder / "plan.json").write_text(json.dumps(PLAN))
    card = make_plan_card(load_runs([folder])[0])
    assert card is not None
    assert card.rows == [
        ("train", "10 s", "5 s", "2.00"),
        ("memory", "60 GB", "50 GB", "1.20"),
        ("length of a completion", "3,584 tokens", "1,792 tokens", "2.00"),
    ]
    assert "steps 6 to 8" in card.notes[0]
    assert "Sampling overlaps training" in card.notes[1]
    text = write_report([folder], tmp_path / "r.html").read_text()
    assert "<h2>Predicted beside measured</h2>" in text
    assert "<td>50 GB</td>" in text


def test_without_predicted_seconds_or_with_too_few_steps_there_is_no_card(tmp_path: Path) -> None:
    few, whole = run_with_steps(tmp_path / "few", [5.0] * 4), run_with_steps(tmp_path / "whole", [5.0] * 5)
    (few / "plan.json").write_text(json.dumps(PLAN))
    assert make_plan_card(load_runs([few])[0]) is None
    assert make_plan_card(load_runs([whole])[0]) is None
    (whole / "plan.json").write_text('{"memory/peak": 6e10}')
    assert make_plan_card(load_runs([whole])[0]) is None
    assert "Predicted beside" not in write_report([whole], tmp_path / "r.html").read_text()
