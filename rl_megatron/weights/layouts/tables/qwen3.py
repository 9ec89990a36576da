"""Qwen3 without experts: norms over each head of q and k. Source: transformers ``models/qwen3``."""

from __future__ import annotations

from rl_megatron.weights.layouts.tables.blocks import attention, decoder, dense_mlp

TABLES = decoder(attention(qk_norm="head"), dense_mlp())
