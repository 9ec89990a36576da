"""Families of grouped-query attention, composed of `blocks`. Sources: transformers ``models/{family}``.

Without a table for engines (``planned=False``): ranks of OLMoE and MiniMax-M2 hold norms of parts or of repeated heads;
of gpt-oss, engines keep the published checkpoints' four bits, padded and swizzled.

gpt-oss in 16 or 32 bits has biases, a sink a head, fused experts [expert, in, out] with gate and up interleaved. The
sinks are ``softmax_offset`` in megatron-core's ``DotProductAttention``. The learner's experts have the checkpoint's
form, cut by ep along the first dim, not the form of TransformerEngine's grouped linears.
"""

from __future__ import annotations

from dataclasses import replace

from rl_megatron.models.families.grouped_query import (
    read_glm4_moe,
    read_gpt_oss,
    read_hy_v3,
    read_llama,
    read_minimax_m2,
    read_mistral,
    read_mixtral,
    read_olmoe,
    read_qwen2,
    read_qwen3,
    read_qwen3_moe,
)
from rl_megatron.models.shape import ExpertNames
from rl_megatron.weights.layouts.layout import Family
from rl_megatron.weights.layouts.tables.blocks import Block, attention, decoder, dense_mlp, experts, stacks
from rl_megatron.weights.layouts.tables.drafts import NUMBERED_WITH_FINAL_NORM, with_drafts
from rl_megatron.weights.layouts.tables.rows import DECODER, LAYER, Others, hidden, matrix, num_experts, vector, whole

# Models without experts: Qwen2 and Qwen2.5; Qwen3; Llama 2 and 3; Mistral, which has the rows of Llama
_LLAMA = decoder(attention(), dense_mlp())
LLAMA = Family(model_types=("llama",), read=read_llama, tables=_LLAMA, serves=True)
MISTRAL = Family(model_types=("mistral",), read=read_mistral, tables=_LLAMA, serves=True)
QWEN2 = Family(
    model_types=("qwen2",), read=read_qwen2, tables=decoder(attention(qkv_bias=True), dense_mlp()), serves=True
)
QWEN3 = Family(
    model_types=("qwen3",), read=read_qwen3, tables=decoder(attention(qk_norm="head"), dense_mlp()), serves=True
)

# Models with experts in every layer
_QWEN3_MOE = decoder(attention(qk_norm="head"), experts())
HF_QWEN3_MOE, MEGATRON_QWEN3_MOE, ENGINE_QWEN3_MOE = _QWEN3_MOE["hf"], _QWEN3_MOE["megatron"], _QWEN3_MOE["engine"]
QWEN3_MOE = Family(model_types=("qwen3_moe",), read=read_qwen3_moe, tables=_QWEN3_MOE, serves=True)
OLMOE = Family(
    model_types=("olmoe",),
    read=read_olmoe,
    tables=decoder(attention(qk_norm="all"), experts(), planned=False),
    serves=True,
)
_MIXTRAL_NAMES = ExpertNames(prefix="block_sparse_moe.", parts=("w1", "w3", "w2"))  # gate, up, down
MIXTRAL = Family(
    model_types=("mixtral",),
    read=read_mixtral,
    tables=decoder(attention(), experts(names=_MIXTRAL_NAMES)),
    serves=True,
    names=_MIXTRAL_NAMES,
)
_MINIMAX_NAMES = replace(_MIXTRAL_NAMES, selection_bias="e_score_correction_bias")  # stored next to the router
MINIMAX_M2 = Family(
    model_types=("minimax_m2",),
    read=read_minimax_m2,
    tables=decoder(attention(qk_norm="all"), experts(names=_MINIMAX_NAMES, bias=True), planned=False),
    serves=True,
    names=_MINIMAX_NAMES,
)

# dense layers first, and draft layers: GLM-4.5 and 4.6 (the Air models have no norms of q and k); Hunyuan 3
GLM4_MOE = Family(
    model_types=("glm4_moe",),
    read=read_glm4_moe,
    tables=with_drafts(
        decoder(
            attention(qkv_bias=True, qk_norm="head"), dense_mlp(), experts(bias=True, dense_first=True, shared=True)
        )
    ),
    serves=True,
)
_HUNYUAN_NAMES = ExpertNames(router="router.gate.weight", selection_bias="expert_bias", shared="shared_mlp.")
HY_V3 = Family(
    model_types=("hy_v3",),
    read=read_hy_v3,
    tables=with_drafts(
        decoder(
            attention(qk_norm="head"),
            dense_mlp(),
            experts(names=_HUNYUAN_NAMES, bias=True, dense_first=True, shared=True),
        ),
        NUMBERED_WITH_FINAL_NORM,
    ),
    serves=True,
    names=_HUNYUAN_NAMES,
)

_MLP, _FFN = LAYER + "mlp.", DECODER + "mlp."
_NORM = LAYER + "post_attention_layernorm.weight"
_ROUTER, _BIAS = _MLP + "router.weight", _MLP + "router.bias"


_EXPERTS: tuple[tuple[str, Others], ...] = (
    ("experts.gate_up_proj", lambda m: (m.hidden_size, 2 * m.expert_width)),
    ("experts.gate_up_proj_bias", lambda m: (2 * m.expert_width,)),
    ("experts.down_proj", lambda m: (m.expert_width, m.hidden_size)),
    ("experts.down_proj_bias", lambda m: (m.hidden_size,)),
)
_MOE = Block(
    hf=(
        vector(_NORM, _NORM, hidden),
        matrix(_ROUTER, whole(_ROUTER, num_experts)),
        vector(_BIAS, _BIAS, num_experts),
        *stacks(_EXPERTS, _MLP, _MLP),
    ),
    megatron=(
        vector(DECODER + "pre_mlp_layernorm.weight", _NORM, hidden),
        matrix(_FFN + "router.weight", whole(_ROUTER, num_experts)),
        vector(_FFN + "router.bias", _BIAS, num_experts),
        *stacks(_EXPERTS, _FFN, _MLP, "ep"),
    ),
    engine=(),
)
GPT_OSS = Family(
    model_types=("gpt_oss",),
    read=read_gpt_oss,
    tables=decoder(attention(qkv_bias=True, out_bias=True, sinks=True), _MOE, planned=False),
    serves=True,
)
