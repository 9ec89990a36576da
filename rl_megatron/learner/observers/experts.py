"""Counts the tokens each expert receives: how evenly the router spreads the load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor


class ExpertLoadMeter:
    """Forward hooks on every router of this rank; counts [num_layers, num_experts] float32 since the last read."""

    def __init__(self, chunks: Sequence[GPTModel], num_layers: int, num_experts: int, device: torch.device) -> None:
        self._counts = torch.zeros(num_layers, num_experts, device=device)
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                if layer.is_moe_layer:
                    layer.mlp.router.register_forward_hook(self._hook(layer.layer_number - 1))

    def _hook(self, layer: int) -> Any:
        def count(_module: Any, _inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            self._counts[layer] += output[1].detach().sum(0)

        return count

    def reset(self) -> None:
        """Forget what was counted."""
        self._counts.zero_()

    def read(self) -> dict[str, float]:
        """``moe/load_imbalance``: most over mean tokens of an expert, in the worst layer (1 is even); resets.

        Empty for a model without experts. Every rank calls it.
        """
        if not self._counts.numel():
            return {}
        dist.all_reduce(self._counts)
        worst = (self._counts.amax(1) / self._counts.mean(1).clamp(min=1)).max().item()
        self.reset()
        return {"moe/load_imbalance": worst}
