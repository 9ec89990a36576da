"""Our weight loader for SGLang with a fault at some versions, loaded by a test's server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_megatron.engines.sglang import worker as sglang_worker

LOST, FLIPPED = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight"
FAULTS = {101: "lost", 102: "flipped", 103: "packed"}


class _Broken:
    """A model that loses or changes what it loads."""

    def __init__(self, model: Any, fault: str) -> None:
        self._model, self._fault = model, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, param in self._model.named_parameters():
            if self._fault == "packed" and name == "model.norm.weight":  # as kernels of Blackwell mark scales
                param = param.detach()
                param.format_ue8m0 = True
            yield name, param

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if self._fault == "flipped" and name == FLIPPED:
                tensor = tensor.clone()
                tensor.view(torch.uint8)[9, 3] ^= 1
            if self._fault != "lost" or name != LOST:
                self._model.load_weights([(name, tensor)])


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Our loader, broken at the versions that say so."""
    order = json.loads(named_tensors[0][0])
    fault = FAULTS.get(order["version"])
    if fault is None:
        sglang_worker.load(model, named_tensors)
        return
    right = sglang_worker.find_sglang_boxes
    sglang_worker.find_sglang_boxes = lambda broken, path, **how: right(model, path, **how)  # type: ignore[assignment]
    try:
        sglang_worker.load(_Broken(model, fault), named_tensors)
    finally:
        sglang_worker.find_sglang_boxes = right
