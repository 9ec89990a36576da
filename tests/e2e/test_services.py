"""A run on this machine with a reward server of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from rl_megatron.observability.files import read_jsonl

REPO = Path(__file__).resolve().parents[2]
KEYS = (
    *("run.name=judged", "reward.function=service:judge/score", "warm_start.steps=0", "train.steps=1", "eval.every=0"),
    *("rollout.prompts_per_step=4", "rollout.group_size=4", "learner.ep=1", "log.tensorboard=false"),
    f"services.judge.command={sys.executable} {REPO}/tests/judge.py",
)


def train(folder: Path, *keys: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "launcher", "train", *KEYS, *keys]
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPO),
        "OMP_NUM_THREADS": "1",
        "JUDGE_STARTS": str(folder / "starts"),
    }
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def pid_of_judge(folder: Path) -> int:
    return int((folder / "starts").read_text().split()[0])


def test_a_run_is_rewarded_by_its_service_and_ends_it(tmp_path: Path) -> None:
    """By Ray's actors, where Ray is there: its service is no actor."""
    launcher = "ray" if importlib.util.find_spec("ray") else "local"
    said, _ = (run := train(tmp_path, f"run.launcher={launcher}")).communicate(timeout=300)
    assert run.returncode == 0, said
    assert "starting services: judge" in said
    (row,) = [row for row in read_jsonl(tmp_path / "runs/judged/metrics.jsonl") if row["phase"] == "rl" and row["step"]]
    assert 0 <= row["reward/mean"] <= 1
    assert not psutil.pid_exists(pid_of_judge(tmp_path))


def test_a_killed_trainer_leaves_no_service(tmp_path: Path) -> None:
    with train(tmp_path, "train.steps=1000") as run:
        end = time.monotonic() + 120
        while not (tmp_path / "starts").exists() or not (tmp_path / "starts").read_text():
            assert run.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        judge = psutil.Process(pid_of_judge(tmp_path))
        run.kill()
        run.communicate(timeout=60)
    judge.wait(60)
