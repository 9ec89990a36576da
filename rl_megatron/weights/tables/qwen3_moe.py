"""Qwen3-MoE: its Hugging Face checkpoint, megatron-core's ranks with TransformerEngine's names, an engine's ranks.

Sources: transformers ``models/qwen3_moe`` (checkpoint names, one tensor per expert); megatron-core 0.16
``transformer/attention.py`` (``linear_qkv`` is, per query group, its q heads, then k, then v) and
``transformer/moe/experts.py`` (``linear_fc1`` is gate then up, each cut by the expert tensor axis); vLLM
``model_executor/layers/linear.py`` (``QKVParallelLinear``: each rank its q heads, then k, then v, a key/value head
repeated on neighbouring ranks where there are more ranks than heads).
"""

from __future__ import annotations

from dataclasses import replace

from rl_megatron.models.shape import ModelShape
from rl_megatron.weights.layout import Band, Piece
from rl_megatron.weights.tables.rows import (
    DECODER,
    EMBED,
    HEAD,
    LAYER,
    NORM,
    each,
    expert_width,
    hidden,
    matrix,
    num_experts,
    row_cut,
    tied_over_stages,
    untied,
    vector,
    vocab,
    vocabulary,
    whole,
)

_ATTENTION, _EXPERT = LAYER + "self_attn.", LAYER + "mlp.experts.{expert}."
_GATE_UP = (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight")


def _qkv_grouped(m: ModelShape, _degree: int) -> tuple[Band, ...]:
    rows = {"q": m.num_heads // m.num_kv_heads * m.head_dim, "k": m.head_dim, "v": m.head_dim}
    return (
        tuple(
            Piece(hf=f"{_ATTENTION}{x}_proj.weight", start=group * n, stop=(group + 1) * n)
            for group in range(m.num_kv_heads)
            for x, n in rows.items()
        ),
    )


def _qkv_stacked(m: ModelShape, degree: int) -> tuple[Band, ...]:
    copies, n = degree // m.num_kv_heads, m.head_dim
    if copies <= 1:
        spans = [(0, m.num_kv_heads * n)]
    else:
        spans = [(head * n, (head + 1) * n) for head in range(m.num_kv_heads) for _ in range(copies)]
    return (
        (Piece(hf=f"{_ATTENTION}q_proj.weight", start=0, stop=_q_rows(m)),),
        *(tuple(Piece(hf=f"{_ATTENTION}{x}_proj.weight", start=a, stop=b) for a, b in spans) for x in "kv"),
    )


def _head_dim(m: ModelShape) -> int:
    return m.head_dim


def _group_rows(m: ModelShape) -> int:
    return (m.num_heads // m.num_kv_heads + 2) * m.head_dim


def _q_rows(m: ModelShape) -> int:
    return m.num_heads * m.head_dim


def _kv_rows(m: ModelShape) -> int:
    return m.num_kv_heads * m.head_dim


HF_QWEN3_MOE = (
    matrix(EMBED, whole(EMBED, vocab)),
    vector(LAYER + "input_layernorm.weight", LAYER + "input_layernorm.weight", hidden),
    *(
        matrix(f"{_ATTENTION}{x}_proj.weight", whole(f"{_ATTENTION}{x}_proj.weight", rows))
        for x, rows in (("q", _q_rows), ("k", _kv_rows), ("v", _kv_rows))
    ),
    vector(_ATTENTION + "q_norm.weight", _ATTENTION + "q_norm.weight", _head_dim),
    vector(_ATTENTION + "k_norm.weight", _ATTENTION + "k_norm.weight", _head_dim),
    row_cut(_ATTENTION + "o_proj.weight", _ATTENTION + "o_proj.weight", _q_rows),
    vector(LAYER + "post_attention_layernorm.weight", LAYER + "post_attention_layernorm.weight", hidden),
    matrix(LAYER + "mlp.gate.weight", whole(LAYER + "mlp.gate.weight", num_experts)),
    *(matrix(name, whole(name, expert_width)) for name in _GATE_UP),
    row_cut(_EXPERT + "down_proj.weight", _EXPERT + "down_proj.weight", expert_width),
    vector(NORM, NORM, hidden),
    replace(matrix(HEAD, whole(HEAD, vocab)), exists=untied),
)
"""Layout ``dims`` must cut nothing (only ``dp``: that many full copies)."""

MEGATRON_QWEN3_MOE = (
    vocabulary("embedding.word_embeddings.weight", EMBED, stage="first"),
    vector(DECODER + "self_attention.linear_qkv.layer_norm_weight", LAYER + "input_layernorm.weight", hidden),
    matrix(DECODER + "self_attention.linear_qkv.weight", _qkv_grouped, axis="tp", unit=_group_rows),
    vector(DECODER + "self_attention.q_layernorm.weight", _ATTENTION + "q_norm.weight", _head_dim),
    vector(DECODER + "self_attention.k_layernorm.weight", _ATTENTION + "k_norm.weight", _head_dim),
    row_cut(DECODER + "self_attention.linear_proj.weight", _ATTENTION + "o_proj.weight", _q_rows, axis="tp"),
    vector(DECODER + "pre_mlp_layernorm.weight", LAYER + "post_attention_layernorm.weight", hidden),
    matrix(DECODER + "mlp.router.weight", whole(LAYER + "mlp.gate.weight", num_experts)),
    matrix(DECODER + "mlp.experts.linear_fc1.weight{expert}", each(_GATE_UP, expert_width), axis="etp"),
    row_cut(DECODER + "mlp.experts.linear_fc2.weight{expert}", _EXPERT + "down_proj.weight", expert_width, axis="etp"),
    vector("decoder.final_layernorm.weight", NORM, hidden, stage="last"),
    vocabulary("output_layer.weight", HEAD, stage="last", exists=untied),
    vocabulary("output_layer.weight", EMBED, stage="last", exists=tied_over_stages),
)
"""TransformerEngine's parameter names with the expert number made global: ``linear_fc1.weight{expert}``."""

ENGINE_QWEN3_MOE = (
    vocabulary(EMBED, EMBED, stage="first"),
    vector(LAYER + "input_layernorm.weight", LAYER + "input_layernorm.weight", hidden),
    matrix(_ATTENTION + "qkv_proj.weight", _qkv_stacked, axis="tp", unit=_head_dim),
    vector(_ATTENTION + "q_norm.weight", _ATTENTION + "q_norm.weight", _head_dim),
    vector(_ATTENTION + "k_norm.weight", _ATTENTION + "k_norm.weight", _head_dim),
    row_cut(_ATTENTION + "o_proj.weight", _ATTENTION + "o_proj.weight", _q_rows, axis="tp", unit=_head_dim),
    vector(LAYER + "post_attention_layernorm.weight", LAYER + "post_attention_layernorm.weight", hidden),
    matrix(LAYER + "mlp.gate.weight", whole(LAYER + "mlp.gate.weight", num_experts)),
    matrix(LAYER + "mlp.experts.w13_weight.{expert}", each(_GATE_UP, expert_width), axis="etp"),
    row_cut(LAYER + "mlp.experts.w2_weight.{expert}", _EXPERT + "down_proj.weight", expert_width, axis="etp"),
    vector(NORM, NORM, hidden, stage="last"),
    vocabulary(HEAD, HEAD, stage="last", exists=untied),
    vocabulary(HEAD, EMBED, stage="last", exists=tied_over_stages),
)
"""A replica is ``tp`` neighbouring ranks, ``dp`` counts replicas; experts are cut by ``etp=tp`` or spread by ``ep=tp``.

Only planning uses it for now. ``w13_weight.{expert}`` is the expert's matrix inside the engine's fused tensor.
"""
