"""The file that engine servers read is compared with what the learner's ranks hold, not with what arrived in it."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from launcher.controller.roles import WeightGroup
from launcher.hosts.local import LocalLauncher
from launcher.runs.folder import mirror_path
from rl_megatron.config.io import load_config
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.weights.checks.checksums import checksum
from rl_megatron.weights.checks.reports import sealed_by
from rl_megatron.weights.routes.mirror import read, shapes


async def test_a_bit_that_flips_between_learner_and_file_is_not_sealed(tmp_path: Path) -> None:
    keys = ("rollout=vllm", "rollout.python=python", f"weights.folder={tmp_path}", "learner.threads=1")
    config = load_config("tiny_cpu", [*keys, "learner.tp=2", "learner.pp=2", "learner.ep=2"])
    model = make_tiny_model(TinySizes(), tmp_path / "cache", seed=3)
    wanted = {n: checksum(t, tuple(t.shape)) for n, t in load_file(model / "model.safetensors").items()}
    path = mirror_path(config, tmp_path)
    async with LocalLauncher(model, tmp_path).start(config) as roles:
        assert isinstance(roles.weights, WeightGroup)
        await roles.weights.push(1)
        assert {name: checksum(t, tuple(t.shape)) for name, t in read(path, 1).items()} == wanted
        with path.open("r+b") as file:
            file.seek(path.stat().st_size - 1)
            (byte,) = file.read(1)
            file.seek(path.stat().st_size - 1)
            file.write(bytes([byte ^ 1]))
        assert sealed_by(await roles.weights.sums(), shapes(path)) == wanted
        found = {name: checksum(t, tuple(t.shape)) for name, t in read(path, 1).items()}
        assert len([name for name in wanted if found[name] != wanted[name]]) == 1
