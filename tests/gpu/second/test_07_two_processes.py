"""Two processes on the one GPU: weights by weights.transport=direct, through CUDA IPC. 40 seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rl_megatron.weights.checks.compare import compare
from rl_megatron.weights.checks.reports import seal_from_reports
from tests.distributed.pretended.ranks import World
from tests.distributed.test_engine_ends import HF
from tests.gpu import engine
from tests.gpu.machine import Machine, note

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("named", ["alike", "by its UUID in the second"])
def test_each_version_is_held_exactly(named: str, machine: Machine, tmp_path: Path) -> None:
    """The second process may know the GPU by another CUDA_VISIBLE_DEVICES. A flipped bit is refused."""
    if machine.pretended and named != "alike":
        pytest.skip("a pretended GPU has no UUID that CUDA_VISIBLE_DEVICES takes")
    uuid = "" if named == "alike" else f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    machine.run([World(main=engine.ipc_main, size=2, arguments=(tmp_path, uuid))])
    shapes = HF.local_shapes(0)
    for number in range(2):
        sent, came = (torch.load(tmp_path / f"{end} {number}", weights_only=False) for end in ("sent", "came"))
        assert len(compare(seal_from_reports([sent], shapes), shapes, [came], frozenset()).differing) == 1
    note(f"CUDA IPC between two processes, GPU named {named}: six pushes", f"{(tmp_path / 'seconds').read_text()} s")
