"""The file between learner and engine servers: safetensors that others read, and what is wrong with it is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl_megatron.errors import CorruptionError, SyncError
from rl_megatron.weights.mirror import Mirror, Reader

SHAPES = {"a.weight": (3, 4), "b.bias": (5,)}


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    config = tmp_path / "config.json"
    config.write_text("{}")
    made = Mirror(tmp_path / "weights" / "model.safetensors", SHAPES, torch.bfloat16, config)
    for name, tensor in made.tensors.items():
        tensor.copy_(torch.randn(SHAPES[name]))
    return made


def test_what_is_served_is_read_and_is_a_hugging_face_folder(mirror: Mirror) -> None:
    mirror.serve(3)
    for tensors in (dict(Reader(mirror.path, 3)), load_file(mirror.path)):
        assert tensors.keys() == SHAPES.keys()
        assert all(torch.equal(tensors[name], mirror.tensors[name]) for name in SHAPES)
    assert mirror.path.with_name("config.json").read_text() == "{}"


def test_a_version_that_is_not_there_is_refused(mirror: Mirror) -> None:
    mirror.serve(3)
    with pytest.raises(SyncError, match="holds version 3, not 4"):
        Reader(mirror.path, 4)
    mirror.withdraw()
    with pytest.raises(SyncError, match="holds version None, not 3"):
        Reader(mirror.path, 3)


def test_one_flipped_bit_is_named(mirror: Mirror) -> None:
    mirror.serve(3)
    mirror.tensors["b.bias"].view(torch.uint8)[1] ^= 1
    with pytest.raises(CorruptionError, match=r"version 3: b\.bias has other bytes"):
        dict(Reader(mirror.path, 3))
