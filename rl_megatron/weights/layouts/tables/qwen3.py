"""Qwen3 without experts: norms over each head of q and k. Source: transformers ``models/qwen3``.

Llama 2 and 3, and Mistral, whose rows are the same. Source: transformers ``models/{llama,mistral}``.

Qwen2 and Qwen2.5: biases on q, k and v. Source: transformers ``models/qwen2``.
"""

from __future__ import annotations

from rl_megatron.models.families.grouped_query import read_llama, read_mistral, read_qwen2, read_qwen3
from rl_megatron.weights.layouts.family import Family
from rl_megatron.weights.layouts.tables.blocks import attention, decoder, dense_mlp

QWEN3 = Family(
    model_types=("qwen3",), read=read_qwen3, tables=decoder(attention(qk_norm="head"), dense_mlp()), serves=True
)


_TABLES = decoder(attention(), dense_mlp())
LLAMA = Family(model_types=("llama",), read=read_llama, tables=_TABLES, serves=True)
MISTRAL = Family(model_types=("mistral",), read=read_mistral, tables=_TABLES, serves=True)


QWEN2 = Family(
    model_types=("qwen2",), read=read_qwen2, tables=decoder(attention(qkv_bias=True), dense_mlp()), serves=True
)
