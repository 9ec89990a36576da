"""Qwen2 and Qwen2.5: biases on q, k and v. Source: transformers ``models/qwen2``."""

from __future__ import annotations

from rl_megatron.weights.layouts.tables.blocks import attention, decoder, dense_mlp

TABLES = decoder(attention(qkv_bias=True), dense_mlp())
