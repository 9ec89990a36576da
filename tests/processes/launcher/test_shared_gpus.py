"""What a GPU must hold that the learner shares with servers, and whether it shares one: by closed forms.

These tests start processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.preflight import job_memory
from launcher.preflight.subject import Subject
from rl_megatron.config.io import load_config
from tests.unit.launcher.test_memory import folder_of
from tests.unit.launcher.test_shared_gpus import ONE_MACHINE


@pytest.mark.parametrize(
    ("gpus", "keys", "shared"),
    [
        (8, ("slurm.gpus_per_node=8",), False),
        (8, ("slurm.gpus_per_node=0",), False),
        (8, ("slurm.gpus_per_node=6", "slurm.engines.nodes=1"), False),
        (8, ("slurm.gpus_per_node=6",), False),
        (6, ("slurm.gpus_per_node=8",), True),
        (6, ("slurm.gpus_per_node=0",), True),
        (6, ("slurm.gpus_per_node=6", "slurm.engines.nodes=1"), True),
        (0, ("slurm.gpus_per_node=8",), False),  # a machine whose GPUs are not known is as the keys say
        (0, ("slurm.gpus_per_node=7",), True),
    ],
)
def test_on_one_machine_servers_share_gpus_where_ranks_leave_too_few(
    gpus: int, keys: tuple[str, ...], shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six ranks and a server of two: it has 0.85 of each of its GPUs, with which the learner's part does not fit."""
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\n" + "".join(f"echo 'GPU {i}: H100'\n" for i in range(gpus)))
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    given = ["run.launcher=local", f"model.path={folder_of(tmp_path)}", "slurm.engines.nodes=0", *ONE_MACHINE, *keys]
    config = load_config("qwen3_30b_a3b_disaggregated", given)
    found = [one.text for one in job_memory.check(Subject(config, for_job=False)) if one.kind == "problem"]
    assert any("Largest: engine" in text for text in found) == shared
