"""What token dispatchers hold between two passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

_ROUTES = {"routing_map", "probs", "token_probs"}
"""Attributes of megatron-core's dispatchers, and of what these send by: tensors of tokens x experts."""


def forget_routes(model: torch.nn.Module) -> None:
    """Let the dispatchers of ``model`` forget the routes of a pass once their layer's output is combined.

    Megatron-core's dispatchers keep probabilities and maps, of tokens x experts, as attributes until the next pass.
    Where a layer is computed again in the backward pass, the probabilities hold its graph, and by it the layer's input
    and the gradient of that: once the backward pass is through, twice the hidden states of every layer with experts.
    In its first pass, without a graph, they are still a float32 number for each token and expert of every layer.
    """
    for module in model.modules():
        if isinstance(module, MoELayer):
            dispatcher = module.token_dispatcher
            dispatcher.combine_postprocess = partial(_combine, dispatcher, dispatcher.combine_postprocess)


def _combine(dispatcher: Any, upstream: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    out = upstream(hidden)
    for holder in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
        for name, value in vars(holder).items() if holder is not None else ():
            if name in _ROUTES or (isinstance(value, Tensor) and value.requires_grad):
                setattr(holder, name, None)
    return out
