"""Ranks of ``learner.device=cpu`` on a machine that has a GPU, and half of TransformerEngine."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launcher.hosts.local import LocalLauncher
from launcher.wire.channel import Call, Muster
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data.packing import pack
from rl_megatron.errors import ConfigError
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.placement.names import LEARNER
from rl_megatron.types import ParallelDims
from tests.distributed.ranks import ragged_samples
from tests.rows import policy_loss

BESIDE_A_GPU = """
import os, sys
if "launcher.worker.node" in sys.orig_argv:
    import torch
    torch.cuda.is_available = lambda: os.environ.get("CUDA_VISIBLE_DEVICES") != ""  # of a machine with one
"""


async def test_a_local_run_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """7 seconds. megatron wants weights on the GPU that torch sees, and takes what it can import."""
    package = tmp_path / "site" / "transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('the core wheel alone: no transformer_engine_torch')")
    (package.parent / "sitecustomize.py").write_text(BESIDE_A_GPU)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(package.parent), os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    config = load_config("tiny_cpu", ["learner.threads=1", "learner.ep=1", "learner.dp=1"])
    model = make_tiny_model(TinySizes(num_layers=1), tmp_path / "cache", seed=3)
    samples = ragged_samples(4, torch.Generator().manual_seed(5))
    samples = dataclasses.replace(samples, advantages=torch.ones(len(samples.input_ids)))
    batch = pack(samples, dims=ParallelDims(), max_tokens=4096)
    async with LocalLauncher(model, tmp_path).start(config) as roles:
        await roles.policy.backward(batch, policy_loss(objective="importance"))
        assert (await roles.policy.step(1e-3)).grad_norm > 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"  # ours is as it was


IMPORTS = """
import os, sys
from launcher.worker import node
node.import_all = lambda *_: sys.exit(f"{'torch' in sys.modules} {os.environ['CUDA_VISIBLE_DEVICES']}")
node.main()
"""


@pytest.mark.parametrize(("device", "sees"), [("cpu", ""), ("cuda", "0")])
def test_a_nodes_ranks_see_no_gpu_before_it_imports_torch(device: str, sees: str) -> None:
    call = Call(host="127.0.0.1", port=1, token="", seconds=0, threads=1, device=device)
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        input=Muster(call=call, nodes=("here",), ranks_per_node={LEARNER: 1}, folder="/nowhere").line().decode(),
        capture_output=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"},
        text=True,
    )
    assert done.stderr == f"False {sees}\n"


def test_a_rank_that_sees_a_gpu_none_the_less_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_megatron.learner import world

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="sees a GPU"):
        world.join(LearnerSection(), rank=0, rendezvous="file:///nowhere", seed=1)
