"""Measures how evenly routers balance the load over experts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from typing_extensions import override

from rl_megatron.learner.observers.observer import Observer
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import Metric


class ExpertLoadMeter(Observer):
    """Hooks every router of this rank, and counts tokens [num_layers, num_experts] float32 since the last read."""

    def __init__(self, models: Sequence[GPTModel], shape: ModelShape, device: torch.device) -> None:
        self._counts = torch.zeros(shape.num_layers, shape.num_experts, device=device)
        for model in models:
            for layer in model.decoder.layers:
                if layer.is_moe_layer:
                    layer.mlp.router.register_forward_hook(self._hook(layer.layer_number - 1))

    def _hook(self, layer: int) -> Any:
        def count(_module: Any, _inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            self._counts[layer] += output[1].detach().sum(0)

        return count

    @override
    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        kept = self._counts.clone()
        try:
            yield
        finally:
            self._counts.copy_(kept)

    @override
    def read(self) -> dict[str, Metric[float]]:
        """``moe/load_imbalance``: the most tokens of an expert over the mean, in the worst layer (1 is even).

        Resets the counts. Empty for a model without experts.
        """
        if not self._counts.numel():
            return {}
        dist.all_reduce(self._counts)
        worst = (self._counts.amax(1) / self._counts.mean(1).clamp(min=1)).max().item()
        self._counts.zero_()
        return {"moe/load_imbalance": Metric(value=worst)}
