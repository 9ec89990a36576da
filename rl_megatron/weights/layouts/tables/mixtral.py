"""Mixtral: experts called w1 (gate), w3 (up) and w2 (down), as its checkpoints and transformers write them."""

from __future__ import annotations

from rl_megatron.models.families import mixtral
from rl_megatron.weights.layouts.family import Family
from rl_megatron.weights.layouts.tables.blocks import attention, decoder, experts

MIXTRAL = Family(
    model_types=("mixtral",),
    read=mixtral.read,
    tables=decoder(attention(), experts(prefix="block_sparse_moe.", names=("w1", "w3", "w2"))),
)
