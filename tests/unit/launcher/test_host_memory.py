"""The host's memory that a node must have for what the learner keeps off its GPUs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from launcher.preflight import job_memory
from launcher.preflight.subject import Subject
from rl_megatron.config.io import load_config
from rl_megatron.models.named import NAMED


@pytest.mark.parametrize(
    ("has_gb", "asked", "for_job", "message"),
    [
        (300, None, False, "needs 369.4 GB of a node's memory for what the learner keeps off its GPUs, but this mach"),
        (400, None, False, None),
        (300, "350G", True, None),
        (
            300,
            "340G",
            True,
            "needs 369.4 GB of a node's memory for what the learner keeps off its GPUs, but slurm.",
        ),
        (300, "0", True, "not known"),
        (300, None, True, "not known"),
    ],
)
def test_a_node_without_the_memory_that_leaves_gpus_is_told_so(
    has_gb: int, asked: str | None, for_job: bool, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """369.4 GB: 8 ranks of 43 GiB, which is what tests/unit/launcher/test_memory.py computes by hand."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=has_gb * 10**9))
    keys = ["model.path=/models/given", "run.launcher=slurm", *([f"slurm.memory_per_node={asked}"] if asked else [])]
    config = load_config("qwen3_30b_a3b_80gb", keys)
    subject = Subject(config, for_job)
    subject.__dict__["shape"] = NAMED["qwen3-30b-a3b"]  # without the model's folder
    found = list(job_memory.check(subject))
    if message == "not known":
        assert [(one.kind, one.text) for one in found] == [
            ("unchecked", "that a node has 369 GB of memory for learner.offload")
        ]
    else:
        told = [one.text for one in found if one.kind == "problem"]
        assert [message in text and "learner.offload.while_sampling=optimizer" in text for text in told] == (
            [True] if message else []
        )
