"""A run of learner.device=cpu on a machine whose GPU is visible: ranks hide it from megatron. 20 seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_megatron.observability.files import read_jsonl
from tests.gpu.machine import Machine

pytestmark = pytest.mark.gpu
SMALL = (
    *("rollout.prompts_per_step=4", "rollout.group_size=4", "warm_start.steps=0", "train.steps=2", "eval.every=0"),
    *("checkpoint.every=0", "log.sinks=[]", "learner.threads=1", "log.progress=plain"),
)


def test_two_steps(machine: Machine, tmp_path: Path) -> None:
    machine.command("-m", "launcher", "train", *SMALL, "run.name=cpu", folder=tmp_path)
    rows = [row for row in read_jsonl(tmp_path / "runs" / "cpu" / "metrics.jsonl") if row["step"]]
    assert [row["step"] for row in rows] == [1, 2]
    assert all("mfu/train" not in row for row in rows)
