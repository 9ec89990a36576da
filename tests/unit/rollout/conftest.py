"""A tiny Qwen3-MoE of transformers with every weight random, and an engine that holds the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeForCausalLM

from rl_megatron.engines import requests
from rl_megatron.engines.local.engine import LocalEngine
from rl_megatron.weights.layouts.families import read_shape
from tests.tools.mismatch.rig import make_model


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_WAIT", 0.01)


@pytest.fixture(scope="session")
def theirs() -> Qwen3MoeForCausalLM:
    return make_model()


@pytest.fixture(scope="session")
def make_engine(theirs: Qwen3MoeForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], LocalEngine]:
    """An engine of that many slots with the weights of ``theirs``, by way of a checkpoint."""
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    theirs.save_pretrained(folder)
    shape, checkpoint = read_shape(folder), load_file(folder / "model.safetensors")

    def make(slots: int) -> LocalEngine:
        engine = LocalEngine(shape, slots=slots, dtype=torch.float32, device="cpu", max_length=128)
        for name, tensor in engine.tensors.items():
            tensor.copy_(checkpoint[name])
        return engine

    return make
