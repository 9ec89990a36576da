"""Hours and tokens of a run against hand-made rows.

These tests start processes.
"""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from launcher.build.roles import Parts
from launcher.programs import train
from launcher.runs.stop import Stop
from rl_megatron.config.io import load_config
from rl_megatron.observability.progress import Progress
from rl_megatron.rewards.classifiers.on_ranks import RewardModels
from tests.unit.launcher.test_spent import ROWS


@pytest.mark.parametrize(
    ("signals", "finished", "requeued", "reported"),
    [
        (["SIGUSR1"], False, True, False),  # the job's time is up, which a long run's report may take
        (["SIGTERM"], False, False, False),  # to its ranks: preemption
        (["SIGINT"], False, False, True),
        (["SIGUSR1"], True, False, True),  # in the last step
        ([], True, False, True),
    ],
)
def test_a_run_whose_job_ends_soon_makes_no_report(
    signals: list[str], finished: bool, requeued: bool, reported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def saved(parts: Parts, _: Progress, stop: Stop, *__: object) -> bool:
        for name in signals:
            stop.forward(name)
        (parts.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        return finished

    for name, value in {"ID": "7", "NODELIST": "here"}.items():
        monkeypatch.setenv(f"SLURM_JOB_{name}", value)
    monkeypatch.setattr("launcher.hosts.slurm.allocation._hosts", lambda *_: ("here",))  # asks scontrol
    monkeypatch.setattr(train, "_train", saved)
    config = load_config("tiny_cpu", ["run.launcher=slurm", "run.name=r", f"run.dir={tmp_path}"])
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGINT)}
    try:
        asyncio.run(train.train(config, lambda *_: 0.0, RewardModels(), resume=False))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (tmp_path / "r/jobs/7-0/requeue").is_file() == requeued
    assert (tmp_path / "r/report.html").is_file() == reported
