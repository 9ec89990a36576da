"""Models that are served side by side, each by a server of the embedded engine and without a learner."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from launcher.build.alone import _FolderWeights, engine_alone
from launcher.build.trained import of_folder
from rl_megatron.config.io import load_config
from rl_megatron.config.run import TinyModelSection
from rl_megatron.config.sections.weights import NODE_MEMORY
from rl_megatron.models.tiny import make_tiny_model
from rl_megatron.weights.checks.checksums import checksum
from rl_megatron.weights.checks.whole import sealed_by
from rl_megatron.weights.layouts.families import read_shape
from rl_megatron.weights.servers.leftovers import in_use
from tests.family_models import save_model


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder of this test in the node's memory."""
    with tempfile.TemporaryDirectory(dir=NODE_MEMORY) as folder:
        yield Path(folder)


def test_models_served_from_one_folder_have_a_file_of_weights_each(tmp_path: Path, memory: Path) -> None:
    """What a killed process left in the node's memory goes; what another still serves stays."""
    config = load_config("tiny_cpu", ["rollout.server.replicas=1", f"weights.folder={memory}"])
    models = [make_tiny_model(TinyModelSection(), tmp_path / "models", seed) for seed in (0, 1)]
    shape = read_shape(models[0])

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in memory.glob("*/model.safetensors")}

    async def served(model: Path, *beside: Path) -> None:
        before = files()
        async with engine_alone(of_folder(config, model), model, shape, tmp_path / "eval"):
            now = files()
            assert len({*now.values()}) == len(now) == len(before) + 1
            assert before.items() <= now.items()
            if beside:
                await served(*beside)
                assert files() == now
        assert files() == before

    left = memory / "rl_megatron-left"
    left.mkdir()
    with in_use(left):
        pass
    (tmp_path / "eval").mkdir()
    asyncio.run(served(*models))
    assert not list(memory.iterdir())


def test_a_selection_bias_is_served_as_the_folder_has_it(tmp_path: Path) -> None:
    """In float32 beside weights in bfloat16, with the checksums of what is served."""
    save_model("hy_v3", tmp_path / "model")
    given, path = load_file(tmp_path / "model" / "model.safetensors"), tmp_path / "w" / "model.safetensors"
    config = load_config("tiny_cpu", ["rollout=vllm", "learner.dtype=bfloat16"])
    with contextlib.ExitStack() as ends:
        weights = _FolderWeights(config, tmp_path / "model", read_shape(tmp_path / "model"), path, ends)
        asyncio.run(weights.push(0))
        sums = sealed_by(asyncio.run(weights.sums()), {name: tuple(tensor.shape) for name, tensor in given.items()})
    served = load_file(path)
    assert sum(torch.equal(tensor, given[name]) for name, tensor in served.items()) == 3  # a layer with experts each
    assert all(torch.equal(t, given[name]) for name, t in served.items() if name.endswith("mlp.expert_bias"))
    assert sums == {name: checksum(tensor, tuple(tensor.shape)) for name, tensor in served.items()}
