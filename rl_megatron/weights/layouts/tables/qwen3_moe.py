"""Qwen3-MoE: norms over each head of q and k, experts in every layer. Source: transformers ``models/qwen3_moe``."""

from __future__ import annotations

from rl_megatron.weights.layouts.tables.blocks import attention, decoder, experts

TABLES = decoder(attention(qk_norm="head"), experts())
HF_QWEN3_MOE, MEGATRON_QWEN3_MOE, ENGINE_QWEN3_MOE = TABLES["hf"], TABLES["megatron"], TABLES["engine"]
