"""Mixtral: experts called w1 (gate), w3 (up) and w2 (down), as its checkpoints and transformers write them."""

from __future__ import annotations

from rl_megatron.models.families import mixtral
from rl_megatron.models.shape import ExpertNames
from rl_megatron.weights.layouts.family import Family
from rl_megatron.weights.layouts.tables.blocks import attention, decoder, experts

_NAMES = ExpertNames(prefix="block_sparse_moe.", parts=("w1", "w3", "w2"))
MIXTRAL = Family(
    model_types=("mixtral",),
    read=mixtral.read,
    tables=decoder(attention(), experts(names=_NAMES)),
    serves=True,
    names=_NAMES,
)
