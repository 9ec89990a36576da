"""``rl-megatron doctor --gpu``: its step on a pretended GPU beside the CPU's, its bounds, and a node without a GPU."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from launcher.programs import gpu, gpu_step
from rl_megatron.errors import ConfigError
from rl_megatron.scaling.hardware import GB
from tests.distributed.pretended.ranks import World, run_worlds


def rank_main(rank: int, folder: Path) -> None:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
    seen = gpu_step.steps("cuda", 3, small=True)
    (folder / "seen.json").write_text(json.dumps({**seen, "tf32": torch.backends.cuda.matmul.allow_tf32}))


def test_two_steps_are_those_of_a_process_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """15 seconds. Other kernels round otherwise. The process's libraries print to file descriptor 1, as NCCL does."""
    (tmp_path / "sitecustomize.py").write_text("import atexit, os\natexit.register(os.write, 1, b'NCCL version\\n')\n")
    run_worlds([World(main=rank_main, size=1, arguments=(tmp_path,))])
    found: dict[str, Any] = json.loads((tmp_path / "seen.json").read_text())
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    cpu = gpu_step.ask("cpu", small=True)
    assert (found["device"], found["gpu"]) == ("cuda:3", "a pretended GPU")
    assert not found["tf32"]
    assert [fits for fits, _ in gpu.compared(found, cpu)] == [True, True]
    assert cpu["losses"][0] > cpu["losses"][1] > 5
    assert cpu["losses"][0] == pytest.approx(5.545, abs=0.05)  # log(256): it knows nothing yet


@pytest.mark.parametrize(
    ("loss", "norm", "fits"),
    [
        (9e-6, 9e-5, [True, True]),
        (2e-5, 0, [False, True]),
        (0, 2e-4, [True, False]),
        (math.nan, 0, [False, True]),
        (0, math.inf, [True, False]),
    ],
)
def test_a_difference_above_the_bound_is_named(loss: float, norm: float, fits: list[bool]) -> None:
    cpu = {"losses": [5.0, 4.0], "norms": [1.0, 2.0]}
    seen = {"losses": [5.0, 4.0 * (1 + loss)], "norms": [1.0 - norm, 2.0]}
    assert [fit for fit, _ in gpu.compared(seen, cpu)] == fits


@pytest.mark.parametrize(("gigabytes", "fits"), [(0.0, False), (1.5, False), (3.0, True), (8.0, False)])
def test_memory_that_is_not_near_its_plan_is_named(gigabytes: float, fits: bool) -> None:
    """180 million parameters in float32: 16 bytes each with gradients and AdamW's moments, 2.9 GB, and activations."""
    ((found, told),) = gpu.remembered({"bytes": gigabytes * GB})
    assert found == fits
    assert f"held {gigabytes:.2f} GB; planned 3." in told


def test_a_gpu_whose_steps_fail_is_named_in_a_line() -> None:
    """5 seconds: here the process finds no GPU."""
    ((fits, told),) = gpu.stepped(5, {}, small=True)
    assert not fits
    assert told.startswith("GPU 5: a step with learner.device=cuda failed:\n")


def test_steps_that_do_not_end_are_ended_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_step._SECONDS, "cuda", 0.5)
    ((fits, told),) = gpu.stepped(1, {}, small=True)
    assert not fits
    assert told.startswith("GPU 1: a step with learner.device=cuda has not ended in 0.5 s:")


def test_a_driver_that_does_not_answer_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho No devices were found\nexit 6\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 29, 7))
    assert "driver not asked: nvidia-smi: No devices were found" in list(gpu._versions())


def test_links_between_ranks_that_it_starts_are_measured() -> None:
    """8 seconds, over gloo."""
    told = list(gpu.linked(2, "cpu"))
    assert all(fits for fits, _ in told)
    assert re.fullmatch(r"gloo, an all-reduce of 2 ranks \(dp\): \d+\.\d GB/s that each sends", told[0][1])
    assert "matrix products: " in told[-1][1]


def test_one_gpu_has_no_links() -> None:
    assert list(gpu.linked(1)) == [(True, "NCCL between GPUs: not measured, because this node has one GPU")]


def test_without_a_gpu_it_says_what_was_seen_and_what_is_needed() -> None:
    said = r"sees no GPU; the driver has 0; CUDA_VISIBLE_DEVICES is ''\. It needs an NVIDIA driver, a torch .* docs/"
    with pytest.raises(ConfigError, match=said.replace(" docs/", r" \(docs/install\.md\)")):
        gpu.examine()
