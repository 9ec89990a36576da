"""Qwen3-MoE: norms over each head of q and k, experts in every layer. Source: transformers ``models/qwen3_moe``."""

from __future__ import annotations

from rl_megatron.models.families import qwen3_moe
from rl_megatron.weights.layouts.family import Family
from rl_megatron.weights.layouts.tables.blocks import attention, decoder, experts

_TABLES = decoder(attention(qk_norm="head"), experts())
HF_QWEN3_MOE, MEGATRON_QWEN3_MOE, ENGINE_QWEN3_MOE = _TABLES["hf"], _TABLES["megatron"], _TABLES["engine"]
QWEN3_MOE = Family(model_types=("qwen3_moe",), read=qwen3_moe.read, tables=_TABLES, serves=True)
