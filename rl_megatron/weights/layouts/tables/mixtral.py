"""Mixtral: experts called w1 (gate), w3 (up) and w2 (down), as its checkpoints and transformers write them."""

from __future__ import annotations

from rl_megatron.weights.layouts.tables.blocks import attention, decoder, experts

TABLES = decoder(attention(), experts(prefix="block_sparse_moe.", names=("w1", "w3", "w2")))
