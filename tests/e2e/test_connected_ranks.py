"""Ranks that another program starts, and that connect back, as under Slurm; tests/cluster has a real one."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.processes import LIMIT, Place, Run, eventually

SRUN = """#!/usr/bin/env bash
# As srun does for a step of one task.
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
BROKEN = """
import launcher.worker.learner_rank

def broken(*given):
    raise KeyError("planted")

launcher.worker.learner_rank.Worker.backward = broken
"""
OUTPUT = re.compile(r"/rank-(\d+)\.txt$")
KEYS = (
    "learner.ep=2",
    "reward.function=my_rewards:even",
    "run.launcher=slurm",
    "train.steps=1000",
    "checkpoint.every=0",
)


@pytest.fixture
def allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One node, by the variables of a job and the two commands that a run calls."""
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho here\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in (("JOB_ID", "7"), ("JOB_NODELIST", "here"), ("RESTART_COUNT", "0")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURMD_NODENAME", "here")


def ranks(run: Run) -> dict[int, psutil.Process]:
    found = {}
    for process in psutil.Process(run.process.pid).children(recursive=True):
        if "launcher.worker.node" in process.cmdline() and (
            output := OUTPUT.search(os.readlink(f"/proc/{process.pid}/fd/1"))
        ):
            found[int(output[1])] = process
    return found


@pytest.mark.usefixtures("allocation")
def test_they_serve_the_run_save_for_a_requeue_and_are_named_when_they_die(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    planted, path = tmp_path / "sitecustomize.py", os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), path))))
    run = place.fork("connected", *KEYS)
    run.until_row(step=1)
    both = ranks(run)
    assert len(both) == 2
    attempt = run.folder / "jobs" / "7-0"
    run.process.send_signal(signal.SIGUSR1)
    run.finish()
    assert (attempt / "requeue").exists()
    assert not list(run.folder.glob("hf_step_*"))
    eventually(lambda: not any(p.is_running() for p in both.values()), "the ranks to end", LIMIT)

    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    last = run.rows()[-1]["step"]
    run = place.fork("connected", *KEYS, resume=True)
    run.until_row(step=last + 1)
    pid = ranks(run)[1].pid
    ranks(run)[1].kill()
    assert run.end() == 1
    assert f"error: rank 1 (pid {pid} on here) hung up" in run.text()
    assert "Traceback" not in run.text()
    attempt = run.folder / "jobs" / "7-1"
    assert (attempt / "failed_node").read_text() == "here\n"
    assert not (attempt / "requeue").exists()

    planted.write_text(BROKEN)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    run = place.fork("connected", *KEYS, resume=True)
    assert run.end() == 1
    assert ") raised " in run.text()
    assert "KeyError: 'planted'" in run.text()
    assert not list((run.folder / "jobs" / "7-2").glob("failed_node"))  # another node would raise it too


@pytest.mark.usefixtures("allocation")
def test_told_of_preemption_by_its_ranks_it_saves_and_exports_nothing(place: Place) -> None:
    """Slurm tells them alone. Whether the job comes back, its script asks Slurm: after scancel it does not."""
    run = place.fork("preempted", *KEYS)
    run.until_row(step=1)
    for rank in ranks(run).values():
        rank.terminate()
    run.finish()
    assert "stopped and saved" in run.text()
    assert list(run.folder.glob("checkpoints/step_*"))
    assert not list(run.folder.glob("hf_step_*"))
    assert not (run.folder / "jobs" / "7-0" / "requeue").exists()


def test_without_a_job_it_says_what_to_do(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    run = place.fork("no-job", *KEYS)
    assert run.end() == 1
    assert "error: run.launcher=slurm, but this is not a Slurm job; use rl-megatron submit" in run.text()
