"""Qwen3 without experts: norms over each head of q and k. Source: transformers ``models/qwen3``."""

from __future__ import annotations

from rl_megatron.models.families import qwen3
from rl_megatron.weights.layouts.family import Family
from rl_megatron.weights.layouts.tables.blocks import attention, decoder, dense_mlp

QWEN3 = Family(
    model_types=("qwen3",), read=qwen3.read, tables=decoder(attention(qk_norm="head"), dense_mlp()), serves=True
)
