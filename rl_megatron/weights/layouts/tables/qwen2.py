"""Qwen2 and Qwen2.5: biases on q, k and v. Source: transformers ``models/qwen2``."""

from __future__ import annotations

from rl_megatron.models.families import qwen2
from rl_megatron.weights.layouts.family import Family
from rl_megatron.weights.layouts.tables.blocks import attention, decoder, dense_mlp

QWEN2 = Family(
    model_types=("qwen2",), read=qwen2.read, tables=decoder(attention(qkv_bias=True), dense_mlp()), serves=True
)
