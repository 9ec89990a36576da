"""A run on this machine with a reward server of its own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.processes import Place
from tests.exposure import check_secrets, check_sockets, family, ports_of

REPO = Path(__file__).resolve().parents[2]
KEYS = (
    *("reward.function=service:judge/score", "warm_start.steps=0", "train.steps=1", "eval.every=0"),
    *("rollout.prompts_per_step=4", "rollout.group_size=4", "learner.ep=1", "log.tensorboard=false"),
    f"services.judge.command={sys.executable} {REPO}/tests/judge.py",
)


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the judge writes its pid."""
    monkeypatch.setenv("JUDGE_STARTS", str(tmp_path / "starts"))
    return tmp_path / "starts"


def pid_of_judge(starts: Path) -> int:
    return int(starts.read_text().split()[0])


def test_a_run_is_rewarded_by_its_service_and_ends_it(place: Place, starts: Path) -> None:
    """By Ray's actors, where Ray is there: its service is no actor."""
    launcher = "ray" if importlib.util.find_spec("ray") else "local"
    run = place.fork_alone("judged", *KEYS, f"run.launcher={launcher}").finish()
    assert "starting services: judge" in run.text()
    (row,) = [row for row in run.rows() if row["phase"] == "rl" and row["step"]]
    assert 0 <= row["reward/mean"] <= 1
    assert not psutil.pid_exists(pid_of_judge(starts))


def test_a_killed_trainer_leaves_no_service(place: Place, starts: Path) -> None:
    run = place.fork_alone("killed", *KEYS, "train.steps=1000")
    run.until(lambda: starts.exists() and "\n" in starts.read_text(), "the judge")
    judge = psutil.Process(pid_of_judge(starts))
    run.until(lambda: bool(ports_of(judge)), "its port")
    processes, key = family(run.process.pid), judge.environ()["SERVICE_KEY"]
    assert check_sockets(processes)["A service of the run"] == 1
    assert key in check_secrets(processes, run.folder)
    run.kill()
    judge.wait(60)
