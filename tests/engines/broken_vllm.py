"""Our worker extension for vLLM with faults that a test chooses, loaded by a test's server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_megatron.engines.vllm import worker as vllm_worker
from rl_megatron.weights.routes import mirror

LOST = FLIPPED = "model.embed_tokens.weight"  # which kernels keep as it comes
_fault = ""
_forget, _read = vllm_worker.forget_packed_experts, mirror.read


def _forget_or_not(model: Any) -> None:
    if _fault != "packing":
        _forget(model)


def _some_tensors(path: Path, version: int) -> dict[str, Tensor]:
    if _fault == "dies":
        os._exit(1)
    return {name: tensor for name, tensor in _read(path, version).items() if _fault != "lost" or name != LOST}


vllm_worker.forget_packed_experts = _forget_or_not
mirror.read = _some_tensors


class WorkerExtension(vllm_worker.WorkerExtension):
    """The trainer's extension, and a call that chooses the fault."""

    def break_(self, fault: str) -> None:
        """Choose the fault, until another is chosen."""
        global _fault
        _fault = fault

    def rl_megatron_held(self, path: str, private: list[str], known: list[str]) -> list[dict[str, object]]:
        if _fault == "flipped":
            self.model_runner.model.get_parameter(FLIPPED).data.view(torch.uint8)[17, 5] ^= 1
        return super().rl_megatron_held(path, private, known)
