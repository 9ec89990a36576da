"""Ranks as Ray actors on this machine: the same run to the bit, and the same words when one dies."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.processes import Place, Run, alive, eventually

pytest.importorskip("ray")

SRUN = f"""#!{sys.executable}
# A head of Ray that answers nothing: it ends once it is asked, or with the run.
import json, os, socket, sys
call = json.loads(sys.stdin.readline())
listener = socket.create_server(("", call["port"]))  # Ray takes another address of this machine than loopback
kept = listener.accept()
if os.environ["HEAD"] == "dies":
    sys.exit(3)
sys.stdin.read()
"""
RAYS_PATIENCE = 600.0  # seconds; with such a head ray.init takes longer
KEYS = ("learner.ep=2", "reward.function=my_rewards:even")


def ranks(run: Run) -> list[psutil.Process]:
    """Its actors' processes, which Ray names so; in no order."""
    children = psutil.Process(run.process.pid).children(recursive=True)
    return [child for child in children if "RankActor" in " ".join(child.cmdline())]


def test_actors_train_as_processes_do_and_a_dead_one_ends_the_run_by_name(place: Place) -> None:
    local = place.start("local", *KEYS)
    local.finish()
    run = place.start("actors", *KEYS, "run.launcher=ray")
    run.finish()
    assert run.record() == local.record()

    run = place.start("actors", *KEYS, "run.launcher=ray", "train.steps=100000", resume=True)
    run.until_row(step=7)
    started = psutil.Process(run.process.pid).children(recursive=True)
    victim = ranks(run)[0]
    victim.kill()
    assert run.end() == 1
    assert f"(pid {victim.pid} on " in run.text()
    assert "hung up: it was killed, crashed or lost its node; rank-" in run.text()
    assert "Ray: The actor died unexpectedly before finishing this task. The actor is dead because" in run.text()
    assert "Traceback" not in run.text()
    eventually(lambda: not any(map(alive, started)), "Ray's processes to end", 60)


@pytest.mark.parametrize(
    ("head", "seconds", "why"),
    [
        ("dies", 3600, "srun ended with status 3 before Ray was up; ray-*.txt in "),
        ("is silent", 10, "learner.timeout_seconds=10 passed before Ray was up; ray-*.txt in "),
    ],
)
def test_a_head_that_does_not_come_up_is_not_waited_for(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str, seconds: int, why: str
) -> None:
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho here\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for name, value in (("JOB_ID", "7"), ("JOB_NODELIST", "here"), ("RESTART_COUNT", "0")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURMD_NODENAME", "here")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HEAD", head)
    began = time.monotonic()
    run = place.start(f"head-{seconds}", *KEYS, "run.launcher=ray", f"learner.timeout_seconds={seconds}")
    assert run.end() == 1
    assert time.monotonic() - began < RAYS_PATIENCE
    assert f"error: {why}" in run.text()
    assert "Traceback" not in run.text()
