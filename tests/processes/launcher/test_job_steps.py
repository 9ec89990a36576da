"""The steps of a job: which nodes each role gets, and the commands that start its tasks there.

These tests start processes.
"""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import pytest

from launcher.hosts.slurm.allocation import Allocation
from launcher.hosts.slurm.launcher import running_step
from rl_megatron.errors import ConfigError
from tests.unit.launcher.slurm_jobs import config_of


@pytest.mark.parametrize(
    ("scontrol", "nodes", "said"),
    [
        (None, "a[1-2]", "job 7: its nodes are not known: scontrol is not installed here"),
        ("echo no slurm.conf >&2; exit 1", "a[1-2]", "job 7: its nodes are not known: .* status 1: no slurm.conf"),
        (None, None, r"job 7: SLURM_JOB_NODELIST, the nodes of learner, is not set here: .*submit it, or set run\.lau"),
    ],
)
def test_a_job_that_does_not_tell_its_nodes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scontrol: str | None, nodes: str | None, said: str
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for name in ("SLURM_HET_SIZE", "SLURM_ARRAY_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    if nodes is not None:
        monkeypatch.setenv("SLURM_JOB_NODELIST", nodes)
    if scontrol is not None:
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{scontrol}\n")
        (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=said):
        Allocation.this(tmp_path, config_of())


async def test_a_step_that_does_not_end_is_killed_and_told_with_what_may_be_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A killed srun leaves its tasks to Slurm."""
    monkeypatch.setattr("launcher.hosts.slurm.launcher.STOP_SECONDS", 0.05)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as of the processes that are started
    try:
        async with running_step(["sleep", "600"], b"its muster\n", tmp_path) as step:
            pass
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert step.returncode in (-signal.SIGKILL, None)  # None: the system has not ended it in time
    told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert told[:2] == [f"srun has not ended in 0.05 s, and gets {how}: sleep 600" for how in ("SIGTERM", "SIGKILL")]
    assert told[-1] == "its step may go on, and keep its GPUs: `squeue --steps` names it, and `scancel` ends it"
