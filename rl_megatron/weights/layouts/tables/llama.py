"""Llama 2 and 3, and Mistral, whose rows are the same. Source: transformers ``models/{llama,mistral}``."""

from __future__ import annotations

from rl_megatron.models.families import llama, mistral
from rl_megatron.weights.layouts.family import Family
from rl_megatron.weights.layouts.tables.blocks import attention, decoder, dense_mlp

_TABLES = decoder(attention(), dense_mlp())
LLAMA = Family(model_types=("llama",), read=llama.read, tables=_TABLES, serves=True)
MISTRAL = Family(model_types=("mistral",), read=mistral.read, tables=_TABLES, serves=True)
