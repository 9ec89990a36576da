"""Two processes on the one GPU: weights through CUDA IPC, over gloo groups. 40 seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.pretended.ranks import World
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
    note(f"cuda_ipc between two processes, GPU named {named}: four pushes", f"{(tmp_path / 'seconds').read_text()} s")
