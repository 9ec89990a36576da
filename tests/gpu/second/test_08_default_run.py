"""The default run with learner.device=cuda, to its last step. 5 minutes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rl_megatron.observability.files import read_jsonl
from rl_megatron.training.flops import find_peak
from tests.gpu.machine import Machine, note, versions

pytestmark = pytest.mark.gpu
LIMIT = 300.0


def test_it_learns(machine: Machine, tmp_path: Path) -> None:
    """Nothing trains on pretended GPUs by the command line: there it makes the first steps on the CPU."""
    keys = ["learner.device=cuda"]
    if machine.pretended:
        keys = ["warm_start.steps=2", "train.steps=2", "rollout.prompts_per_step=4", "rollout.group_size=4"]
    run = ("learner.ep=1", "run.name=default", "log.progress=plain", "log.sinks=[]")
    path = tmp_path / "runs" / "default" / "metrics.jsonl"
    try:
        machine.command("-m", "launcher", "train", *keys, *run, folder=tmp_path, seconds=LIMIT)
    except subprocess.TimeoutExpired:
        reached = [f"{row['phase']} {row['step']}" for row in read_jsonl(path)][-1:] if path.exists() else []
        note(f"default run, learner.device=cuda, not done in {LIMIT:g} s", f"last step: {', '.join(reached) or 'none'}")
        raise
    rows = [row for row in read_jsonl(path) if row["phase"] == "rl"]
    accuracy = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row][-1]
    last, seconds = rows[-1], sum(float(row.get("seconds/step", 0.0)) for row in rows)
    note("default run, learner.device=cuda", f"accuracy {accuracy:.3f} after {last['step']} steps, {seconds:.0f} s")
    for name in ("seconds/step", "seconds/rollout", "seconds/train", "seconds/weights", "mfu/train"):
        if name in last:
            note(f"default run, last step, {name}", f"{last[name]:.3g}")
    assert machine.pretended or accuracy > 0.9
    assert ("mfu/train" in last) == (not machine.pretended and find_peak(versions()[0]) is not None)
