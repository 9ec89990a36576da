"""What learner ranks write for servers that hold adapters beside their model: the frozen model to the bit, whatever the
adapters are, and a folder of these; for an export the merged model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.weights.adapters.files import PREFIX
from rl_megatron.weights.servers.beside import ADAPTERS, adapters_folder
from tests.distributed.ranks import run_ranks
from tests.distributed.test_lora import LORA, Drawn, adapters_in_files, merged_by_formula
from tests.family_models import save_model

pytestmark = pytest.mark.slow
KEYS = ("rollout=vllm", "learner.tp=2", "learner.ep=2", "learner.threads=1", "weights.push=adapters")


def config_of(root: Path) -> RunConfig:
    lora = [f"learner.lora.{key}={value}" for key, value in LORA.items()]
    return load_config("tiny_cpu", [*KEYS, *lora, "seed=3", f"weights.folder={root}"])


def rank_main(rank: int, root: Path) -> None:
    from launcher.wire.greetings import Setup
    from launcher.worker.learner_rank import Worker
    from rl_megatron.weights.checkpoints import made_up

    made_up.Untrained = Drawn  # type: ignore[misc]
    setup = Setup(
        config=config_of(root), model_folder=root / "model", run_folder=root, rendezvous=f"file://{root}/rendezvous"
    )
    worker = Worker(setup, rank, None)
    for version, name in enumerate(("run-v0", "run-v1", "run-v2")):
        worker.name_adapters(name, ("run-v1",))
        assert not isinstance(worker.stage_adapters(version), Exception)
        worker.commit_adapters(version)
    for version, merges in enumerate((False, True, False)):
        worker.merge(merges)
        assert not isinstance(worker.stage(version), Exception)
        worker.commit(version)
        if rank == 0:
            worker.export(root / f"export-{version}")
    worker.close()


def test_the_model_stays_frozen_in_pushes_and_adapters_are_beside_it(tmp_path: Path) -> None:
    """Two ranks, tp and ep 2. 20 seconds."""
    save_model("qwen3_moe", tmp_path / "model")
    run_ranks(rank_main, 2, tmp_path)
    (mirror,) = tmp_path.glob("rl_megatron-*/model.safetensors")
    wanted = adapters_in_files(tmp_path / "model")
    for name in ("run-v1", "run-v2"):
        held = load_file(adapters_folder(mirror, name) / ADAPTERS)
        assert held.keys() == {PREFIX + key for key in wanted}
        assert all(torch.equal(held[PREFIX + key], tensor) for key, tensor in wanted.items())
    assert not adapters_folder(mirror, "run-v0").exists()
    assert json.loads((adapters_folder(mirror, "run-v2") / "adapter_config.json").read_text())["r"] == LORA["rank"]
    base, merged = load_file(tmp_path / "model" / "model.safetensors"), merged_by_formula(tmp_path / "model", wanted)
    for version, right in enumerate((base, merged, base)):
        pushed = load_file(tmp_path / f"export-{version}" / "model.safetensors")
        for name, tensor in right.items():
            if right is base:
                assert torch.equal(pushed[name], tensor), name
            else:
                torch.testing.assert_close(pushed[name], tensor, atol=1e-6, rtol=0)
