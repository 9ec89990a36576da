"""Qwen3-MoE: norms over each head of q and k, experts in every layer. Source: transformers ``models/qwen3_moe``.

Mixtral: experts called w1 (gate), w3 (up) and w2 (down), as its checkpoints and transformers write them.

OLMoE: Qwen3-MoE's names, and norms over all heads of q or k at once.

Source: transformers ``models/olmoe``. There is no table for engines: their ranks hold parts of these norms.
"""

from __future__ import annotations

from rl_megatron.models.families.grouped_query import read_mixtral, read_olmoe, read_qwen3_moe
from rl_megatron.models.shape import ExpertNames
from rl_megatron.weights.layouts.family import Family
from rl_megatron.weights.layouts.tables.blocks import attention, decoder, experts

_TABLES = decoder(attention(qk_norm="head"), experts())
HF_QWEN3_MOE, MEGATRON_QWEN3_MOE, ENGINE_QWEN3_MOE = _TABLES["hf"], _TABLES["megatron"], _TABLES["engine"]
QWEN3_MOE = Family(model_types=("qwen3_moe",), read=read_qwen3_moe, tables=_TABLES, serves=True)


_NAMES = ExpertNames(prefix="block_sparse_moe.", parts=("w1", "w3", "w2"))
MIXTRAL = Family(
    model_types=("mixtral",),
    read=read_mixtral,
    tables=decoder(attention(), experts(names=_NAMES)),
    serves=True,
    names=_NAMES,
)


OLMOE = Family(
    model_types=("olmoe",),
    read=read_olmoe,
    tables=decoder(attention(qk_norm="all"), experts(), planned=False),
    serves=True,
)
