"""Qwen3 without experts: norms over each head of q and k. Source: transformers ``models/qwen3``.

Llama 2 and 3, and Mistral, whose rows are the same. Source: transformers ``models/{llama,mistral}``.

Qwen2 and Qwen2.5: biases on q, k and v. Source: transformers ``models/qwen2``.
"""

from __future__ import annotations

from rl_megatron.models.families import llama, mistral, qwen2, qwen3
from rl_megatron.weights.layouts.family import Family
from rl_megatron.weights.layouts.tables.blocks import attention, decoder, dense_mlp

QWEN3 = Family(
    model_types=("qwen3",), read=qwen3.read, tables=decoder(attention(qk_norm="head"), dense_mlp()), serves=True
)


_TABLES = decoder(attention(), dense_mlp())
LLAMA = Family(model_types=("llama",), read=llama.read, tables=_TABLES, serves=True)
MISTRAL = Family(model_types=("mistral",), read=mistral.read, tables=_TABLES, serves=True)


QWEN2 = Family(
    model_types=("qwen2",), read=qwen2.read, tables=decoder(attention(qkv_bias=True), dense_mlp()), serves=True
)
