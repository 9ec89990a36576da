"""Names a rank's parameters as weights/ does, globally: ``decoder.layers.{layer}…weight{expert}``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_DRAFT = "mtp.layers.0."
_HELD = (".router.expert_bias", ".indexer.")  # in names of buffers that layouts have
_EXPERT = re.compile(r"(\.experts\.linear_fc[12]\.(?:weight|lora_[AB]))(\d+)$")


def global_name(chunk: Any, name: str) -> str:
    """The global name of the parameter that a chunk of the policy, or its draft layer, calls ``name``."""
    if name.startswith(_DRAFT):
        name = f"mtp.layers.{chunk.config.num_layers}.{name.removeprefix(_DRAFT)}"
    if found := _LAYER.match(name):
        layer = chunk.decoder.layers[int(found[1])].layer_number - 1
        name = f"decoder.layers.{layer}.{name[found.end() :]}"
    if found := _EXPERT.search(name):
        local_experts = (chunk.config.num_moe_experts or 0) // chunk.config.expert_model_parallel_size
        first_expert = parallel_state.get_expert_model_parallel_rank() * local_experts
        name = f"{name[: found.start()]}{found[1]}{int(found[2]) + first_expert}"
    return name


def global_parameters(chunks: Sequence[MegatronModule]) -> Iterator[tuple[str, Tensor]]:
    """(global name, tensor) of every parameter on this rank, and of the buffers of its routers and indexers."""
    for chunk in chunks:
        buffers = ((name, buffer) for name, buffer in chunk.named_buffers() if any(part in name for part in _HELD))
        for name, parameter in (*chunk.named_parameters(), *buffers):
            yield global_name(chunk, name), parameter
