"""Llama 2 and 3, and Mistral, whose rows are the same. Source: transformers ``models/{llama,mistral}``."""

from __future__ import annotations

from rl_megatron.weights.layouts.tables.blocks import attention, decoder, dense_mlp

TABLES = decoder(attention(), dense_mlp())
