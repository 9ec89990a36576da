"""What the job's script does after an attempt, with stand-ins for Slurm's commands and for the run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

JOB = Path(__file__).resolve().parents[3] / "slurm" / "job.sh"
RUN = """#!/usr/bin/env bash
touch "$ATTEMPT/requeue"
[ -z "$STEP" ] || mkdir -p "$RUN/checkpoints/step_$STEP"
"""


def attempt(folder: Path, restart: int, step: str = "") -> tuple[int, str]:
    """The script's status and words after a run that asks to come back, with a checkpoint of ``step``."""
    commands, run = folder / "commands", folder / "run"
    commands.mkdir(exist_ok=True)
    for name, text in (("scontrol", "#!/bin/sh\n"), ("sleep", "#!/bin/sh\n"), ("python", RUN)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    text = f"RUN={run} PYTHON={commands}/python TRAIN=() REQUEUES=9 RESTARTS=3 EXCLUDE=\nexport RUN\n"
    slurm = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restart), "SLURM_JOB_NODELIST": "here"}
    own = {"PATH": f"{commands}:{os.environ['PATH']}", "STEP": step, "ATTEMPT": f"{run}/jobs/7-{restart}"}
    done = subprocess.run(
        ["bash"], input=text + JOB.read_text(), capture_output=True, text=True, env=os.environ | slurm | own, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


def test_a_run_that_twice_made_no_step_does_not_come_back(tmp_path: Path) -> None:
    steps = ["000002", "", "000004", "", ""]
    done = [attempt(tmp_path, restart, step) for restart, step in enumerate(steps)]
    assert [status for status, _ in done] == [0, 0, 0, 0, 1], done
    assert all("saved; comes back" in said for _, said in done[:4])
    assert "twice in a row its time was up before a step was made; raise slurm.time" in done[4][1]
    assert attempt(tmp_path, 5)[0] == 0  # sent again by a person
