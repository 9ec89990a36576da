"""Models that are served side by side, each by a server of the embedded engine and without a learner."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typing_extensions import override

from launcher.build.alone import _FolderWeights, engine_alone
from launcher.build.trained import of_folder
from launcher.hosts.sites import sites_alone
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.weights import NODE_MEMORY
from rl_megatron.errors import ConfigError
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.rollout.servers.adapter import Command, StartOptions
from rl_megatron.rollout.servers.embedded.adapter import EmbeddedAdapter
from rl_megatron.weights.checks.checksums import checksum
from rl_megatron.weights.checks.reports import sealed_by
from rl_megatron.weights.layouts.families import read_shape
from rl_megatron.weights.servers.leftovers import in_use
from tests.family_models import save_model
from tests.processes.launcher.test_half_started import FOREIGN, PORT


class SaysItsGpus(EmbeddedAdapter):
    """Its servers say which GPUs they see, and answer that they are none."""

    module = "rl_megatron"

    @override
    def command(self, options: StartOptions) -> Command:
        said = "import os; print('GPUs', os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\n"
        return Command(
            arguments=(sys.executable, "-c", said + PORT + FOREIGN, "--port", str(options.port)), environment={}
        )


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder of this test in the node's memory."""
    with tempfile.TemporaryDirectory(dir=NODE_MEMORY) as folder:
        yield Path(folder)


async def test_models_served_from_one_folder_have_a_file_of_weights_each(tmp_path: Path, memory: Path) -> None:
    """What a killed process left in the node's memory goes; what another still serves stays."""
    config = load_config("tiny_cpu", ["rollout.server.replicas=1", f"weights.folder={memory}"])
    models = [make_tiny_model(TinySizes(), tmp_path / "models", seed) for seed in (0, 1)]
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
    await served(*models)
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


async def test_each_server_sees_gpus_of_its_own(tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5a,6,7")
    engine = f"rollout.engine={__name__}:{SaysItsGpus.__name__}"
    keys = ("rollout.server.replicas=2", "rollout.server.tp=2", "learner.device=cuda", f"weights.folder={memory}")
    model = make_tiny_model(TinySizes(), tmp_path / "models", seed=0)
    config = of_folder(load_config("tiny_cpu", [engine, *keys]), model)
    (tmp_path / "eval").mkdir()
    with pytest.raises(ConfigError, match="answers as no server"):
        async with engine_alone(config, model, read_shape(model), tmp_path / "eval"):
            pass
    logs = sorted((tmp_path / "eval").glob("*.log"))
    assert [re.findall("^GPUs (.*)$", log.read_text(), re.M) for log in logs] == [["3,GPU-5a"], ["6,7"]]


@pytest.mark.parametrize(
    ("keys", "seen"),
    [
        (("replicas=2",), [(0,), (1,)]),
        (("replicas=2", "tp=2", "nodes=2"), [(0, 1), (2, 3)]),
        (("replicas=5", "memory_fraction=0.5"), [(0,), (1,), (2,), (3,), (0,)]),
        (("tp=2",), [()]),  # its engine takes the first
        (("replicas=5", "memory_fraction=0.6"), "replicas=5 of tp=1 need 5 GPUs, and this machine has 4; lower them, "),
        (("replicas=13",), "or let 4 share a GPU by rollout.server.memory_fraction=0.25"),
        (("replicas=2", "tp=8"), "replicas=2 of tp=8 need 16 GPUs, and this machine has 4; lower them"),
    ],
)
def test_which_gpus_are_a_servers_own(
    keys: tuple[str, ...], seen: Sequence[tuple[int, ...]] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first on, whatever ranks the configuration has."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5a,6,7")
    given = ("rollout=vllm", "learner.dp=2", "learner.ep=1")
    given += tuple(f"rollout.server.{key}" for key in keys)
    config = load_config("tiny_cpu", [*given, "learner.device=cuda"])
    if isinstance(seen, str):
        with pytest.raises(ConfigError, match=re.escape(seen.replace("tp=", "rollout.server.tp="))):
            sites_alone(config)
    else:
        assert [site.gpus for (site,) in sites_alone(config)] == seen
    assert not any(site.gpus for (site,) in sites_alone(load_config("tiny_cpu", given)))
