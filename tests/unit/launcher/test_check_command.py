"""``rl-megatron scale --check`` and ``--calibrate`` as a user calls them: tables, JSON and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_megatron.config import yaml_text
from rl_megatron.scaling.machines.calibration import write_calibration
from tests.unit.launcher.commands import status_of
from tests.unit.scaling.test_machine_check import ROWS, config
from tests.unit.scaling.test_machines import calibrated


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml_text.write(config().model_dump(mode="json")))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    write_calibration(tmp_path / "machine.json", calibrated())
    return folder


def ended(*arguments: str) -> int | str | None:
    return status_of("scale", *arguments)


def test_it_prints_phases_terms_and_notes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not ended("--check", str(run), "--machine", str(run.parents[1] / "machine.json"))
    said = capsys.readouterr().out
    for words in ("steps 3 to 7: medians of 5", "train", "4.000", "between products", "optimizer", "note: a push"):
        assert words in said


def test_it_prints_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not ended("--check", str(run), "--machine", str(run.parents[1] / "machine.json"), "--json")
    tree = json.loads(capsys.readouterr().out)
    train = next(row for row in tree["phases"] if row["part"] == "train")
    assert train["measured"] == 4
    assert train["error"] == pytest.approx(train["predicted"] / 4 - 1)
    assert sum(tree["training"].values()) == pytest.approx(train["predicted"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--check", "nowhere"), "it has no config.yaml; give a run's folder"),
        (("--check", "RUN"), "--machine FILE.json"),
        (("--check", "RUN", "--machine", "h100"), "learner.device=cpu in the run, and h100 is a GPU"),
        (("--check", "RUN", "--machine", "nowhere.json"), "rl-megatron scale --calibrate FILE writes one"),
        (("--check", "RUN", "--calibrate", "a.json"), "--calibrate does nothing with --check; leave one of them out"),
        (("--calibrate", "a.yaml"), "give a file NAME.json"),
        (("--calibrate", "a.json", "--device", "tpu"), "must be cpu or cuda"),
    ],
)
def test_it_refuses(run: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str) -> None:
    code = ended(*(str(run) if each == "RUN" else each for each in arguments))
    captured = capsys.readouterr()
    assert code
    assert words in " ".join(f"{code} {captured.out} {captured.err}".split())
