"""Qwen3-MoE: as its Hugging Face checkpoint names it, and as megatron-core holds it with TransformerEngine's names.

Sources: transformers ``models/qwen3_moe`` (checkpoint names, one tensor per expert); megatron-core 0.16
``transformer/attention.py`` (``linear_qkv`` is, per query group, its q heads, then k, then v) and
``transformer/moe/experts.py`` (``linear_fc1`` is gate then up, each cut by the expert tensor axis).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from rl_megatron.models.shape import ModelShape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.layout import Band, ParamSpec, Piece, Shape

Bands = Callable[[ModelShape], tuple[Band, ...]]
Size = Callable[[ModelShape], int]

_EMBED, _HEAD, _LAYER = "model.embed_tokens.weight", "lm_head.weight", "model.layers.{layer}."
_ATTENTION, _EXPERT = _LAYER + "self_attn.", _LAYER + "mlp.experts.{expert}."
_DECODER = "decoder.layers.{layer}."


def _whole(hf: str, size: Size) -> Bands:
    return lambda m: ((Piece(hf=hf, start=0, stop=size(m)),),)


def _gate_up(m: ModelShape) -> tuple[Band, ...]:
    return tuple((Piece(hf=f"{_EXPERT}{x}_proj.weight", start=0, stop=m.expert_width),) for x in ("gate", "up"))


def _qkv_grouped(m: ModelShape) -> tuple[Band, ...]:
    rows = {"q": m.num_heads // m.num_kv_heads * m.head_dim, "k": m.head_dim, "v": m.head_dim}
    return (
        tuple(
            Piece(hf=f"{_ATTENTION}{x}_proj.weight", start=group * n, stop=(group + 1) * n)
            for group in range(m.num_kv_heads)
            for x, n in rows.items()
        ),
    )


def _hidden(m: ModelShape) -> int:
    return m.hidden_size


def _vocab(m: ModelShape) -> int:
    return m.vocab_size


def _head_dim(m: ModelShape) -> int:
    return m.head_dim


def _q_rows(m: ModelShape) -> int:
    return m.num_heads * m.head_dim


def _kv_rows(m: ModelShape) -> int:
    return m.num_kv_heads * m.head_dim


def _experts(m: ModelShape) -> int:
    return m.num_experts


def _expert_width(m: ModelShape) -> int:
    return m.expert_width


def _by_hidden(m: ModelShape) -> Shape:
    return (m.hidden_size,)


def _vector(_m: ModelShape) -> Shape:
    return ()


def _untied(m: ModelShape, _dims: ParallelDims) -> bool:
    return not m.tie_embeddings


def _tied_over_stages(m: ModelShape, dims: ParallelDims) -> bool:
    return m.tie_embeddings and dims.pp > 1


def _norm(name: str, hf: str, size: Size, stage: Literal["last"] | None = None) -> ParamSpec:
    return ParamSpec(name=name, bands=_whole(hf, size), others=_vector, stage=stage)


def _matrix(hf: str, rows: Size) -> ParamSpec:
    return ParamSpec(name=hf, bands=_whole(hf, rows), others=_by_hidden)


def _row_cut(name: str, hf: str, columns: Size, axis: Literal["tp", "etp"] | None) -> ParamSpec:
    """A matrix whose rows are the hidden size and whose columns ``axis`` cuts."""
    return ParamSpec(name=name, bands=_whole(hf, columns), others=_by_hidden, dim=1, axis=axis)


HF_QWEN3_MOE = (
    _matrix(_EMBED, _vocab),
    _norm(_LAYER + "input_layernorm.weight", _LAYER + "input_layernorm.weight", _hidden),
    _matrix(_ATTENTION + "q_proj.weight", _q_rows),
    _matrix(_ATTENTION + "k_proj.weight", _kv_rows),
    _matrix(_ATTENTION + "v_proj.weight", _kv_rows),
    _norm(_ATTENTION + "q_norm.weight", _ATTENTION + "q_norm.weight", _head_dim),
    _norm(_ATTENTION + "k_norm.weight", _ATTENTION + "k_norm.weight", _head_dim),
    _row_cut(_ATTENTION + "o_proj.weight", _ATTENTION + "o_proj.weight", _q_rows, None),
    _norm(_LAYER + "post_attention_layernorm.weight", _LAYER + "post_attention_layernorm.weight", _hidden),
    _matrix(_LAYER + "mlp.gate.weight", _experts),
    _matrix(_EXPERT + "gate_proj.weight", _expert_width),
    _matrix(_EXPERT + "up_proj.weight", _expert_width),
    _row_cut(_EXPERT + "down_proj.weight", _EXPERT + "down_proj.weight", _expert_width, None),
    _norm("model.norm.weight", "model.norm.weight", _hidden),
    ParamSpec(name=_HEAD, bands=_whole(_HEAD, _vocab), others=_by_hidden, exists=_untied),
)
"""Layout ``dims`` must cut nothing (only ``dp``: that many full copies)."""

MEGATRON_QWEN3_MOE = (
    ParamSpec(
        name="embedding.word_embeddings.weight",
        bands=_whole(_EMBED, _vocab),
        others=_by_hidden,
        axis="tp",
        stage="first",
        padded=True,
    ),
    _norm(_DECODER + "self_attention.linear_qkv.layer_norm_weight", _LAYER + "input_layernorm.weight", _hidden),
    ParamSpec(name=_DECODER + "self_attention.linear_qkv.weight", bands=_qkv_grouped, others=_by_hidden, axis="tp"),
    _norm(_DECODER + "self_attention.q_layernorm.weight", _ATTENTION + "q_norm.weight", _head_dim),
    _norm(_DECODER + "self_attention.k_layernorm.weight", _ATTENTION + "k_norm.weight", _head_dim),
    _row_cut(_DECODER + "self_attention.linear_proj.weight", _ATTENTION + "o_proj.weight", _q_rows, "tp"),
    _norm(_DECODER + "pre_mlp_layernorm.weight", _LAYER + "post_attention_layernorm.weight", _hidden),
    ParamSpec(
        name=_DECODER + "mlp.router.weight", bands=_whole(_LAYER + "mlp.gate.weight", _experts), others=_by_hidden
    ),
    ParamSpec(name=_DECODER + "mlp.experts.linear_fc1.weight{expert}", bands=_gate_up, others=_by_hidden, axis="etp"),
    _row_cut(_DECODER + "mlp.experts.linear_fc2.weight{expert}", _EXPERT + "down_proj.weight", _expert_width, "etp"),
    _norm("decoder.final_layernorm.weight", "model.norm.weight", _hidden, stage="last"),
    ParamSpec(
        name="output_layer.weight",
        bands=_whole(_HEAD, _vocab),
        others=_by_hidden,
        axis="tp",
        stage="last",
        padded=True,
        exists=_untied,
    ),
    # The last stage's copy of tied embeddings; with one stage megatron-core uses the embedding itself.
    ParamSpec(
        name="output_layer.weight",
        bands=_whole(_EMBED, _vocab),
        others=_by_hidden,
        axis="tp",
        stage="last",
        padded=True,
        exists=_tied_over_stages,
    ),
)
"""TransformerEngine's parameter names with the expert number made global: ``linear_fc1.weight{expert}``."""
