"""DeepSeek-V3 and Kimi-K2: Hugging Face checkpoint, megatron-core's ranks with TransformerEngine's names, an engine's.

Only planning uses it for now: no learner or engine of ours builds the family, and the multi-token-prediction module has
no rows. Sources: transformers ``models/deepseek_v3`` (names, one tensor per expert); megatron-core 0.16
``models/gpt/gpt_layer_specs.py`` (``multi_latent_attention``, ``qk_layernorm``: the norms of the latents are fused into
the up projections), ``transformer/multi_latent_attention.py`` (down projections whole on every rank),
``transformer/moe/{router,shared_experts,experts}.py``; vLLM ``model_executor/models/deepseek_v2.py``
(``fused_qkv_a_proj`` is q over kv, whole on every rank).
"""

from __future__ import annotations

from dataclasses import replace

from rl_megatron.models.shape import LatentAttention, ModelShape
from rl_megatron.weights.layout import Band, ParamSpec, Piece
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
    untied,
    vector,
    vocab,
    vocabulary,
    whole,
)

_ATTENTION, _MLP = LAYER + "self_attn.", LAYER + "mlp."
_EXPERT, _SHARED = _MLP + "experts.{expert}.", _MLP + "shared_experts."
_Q_A, _KV_A = _ATTENTION + "q_a_proj.weight", _ATTENTION + "kv_a_proj_with_mqa.weight"
_NORM_IN, _NORM_MLP = LAYER + "input_layernorm.weight", LAYER + "post_attention_layernorm.weight"
_BIAS = _MLP + "gate.e_score_correction_bias"


def _latent(m: ModelShape) -> LatentAttention:
    assert m.latent is not None, "the table is for shapes with latent attention"
    return m.latent


def _q_rank(m: ModelShape) -> int:
    rank = _latent(m).query_rank
    assert rank is not None, "the table is for queries with a latent"
    return rank


def _kv_rank(m: ModelShape) -> int:
    return _latent(m).kv_rank


def _kv_down(m: ModelShape) -> int:
    return _latent(m).kv_rank + _latent(m).rope_dim


def _q_head(m: ModelShape) -> int:
    return _latent(m).nope_dim + _latent(m).rope_dim


def _kv_head(m: ModelShape) -> int:
    return _latent(m).nope_dim + _latent(m).value_dim


def _value_dim(m: ModelShape) -> int:
    return _latent(m).value_dim


def _q_rows(m: ModelShape) -> int:
    return m.num_heads * _q_head(m)


def _kv_rows(m: ModelShape) -> int:
    return m.num_heads * _kv_head(m)


def _value_rows(m: ModelShape) -> int:
    return m.num_heads * _value_dim(m)


def _dense_width(m: ModelShape) -> int:
    return m.dense_width


def _shared_width(m: ModelShape) -> int:
    return m.shared_width


def _dense(m: ModelShape) -> range:
    return range(m.dense_layers)


def _sparse(m: ModelShape) -> range:
    return range(m.dense_layers, m.num_layers)


def _down_stacked(m: ModelShape, _degree: int) -> tuple[Band, ...]:
    return ((Piece(hf=_Q_A, start=0, stop=_q_rank(m)), Piece(hf=_KV_A, start=0, stop=_kv_down(m))),)


def _gate_up(prefix: str) -> tuple[str, ...]:
    return prefix + "gate_proj.weight", prefix + "up_proj.weight"


_HF_DENSE = (
    *(matrix(name, whole(name, _dense_width), layers=_dense) for name in _gate_up(_MLP)),
    row_cut(_MLP + "down_proj.weight", _MLP + "down_proj.weight", _dense_width, layers=_dense),
)
_HF_SPARSE = (
    matrix(_MLP + "gate.weight", whole(_MLP + "gate.weight", num_experts), layers=_sparse),
    vector(_BIAS, _BIAS, num_experts, layers=_sparse),
    *(matrix(name, whole(name, _shared_width), layers=_sparse) for name in _gate_up(_SHARED)),
    row_cut(_SHARED + "down_proj.weight", _SHARED + "down_proj.weight", _shared_width, layers=_sparse),
    *(matrix(name, whole(name, expert_width), layers=_sparse) for name in _gate_up(_EXPERT)),
    row_cut(_EXPERT + "down_proj.weight", _EXPERT + "down_proj.weight", expert_width, layers=_sparse),
)
HF_DEEPSEEK_V3 = (
    matrix(EMBED, whole(EMBED, vocab)),
    vector(_NORM_IN, _NORM_IN, hidden),
    matrix(_Q_A, whole(_Q_A, _q_rank)),
    vector(_ATTENTION + "q_a_layernorm.weight", _ATTENTION + "q_a_layernorm.weight", _q_rank),
    matrix(_ATTENTION + "q_b_proj.weight", whole(_ATTENTION + "q_b_proj.weight", _q_rows), columns=_q_rank),
    matrix(_KV_A, whole(_KV_A, _kv_down)),
    vector(_ATTENTION + "kv_a_layernorm.weight", _ATTENTION + "kv_a_layernorm.weight", _kv_rank),
    matrix(_ATTENTION + "kv_b_proj.weight", whole(_ATTENTION + "kv_b_proj.weight", _kv_rows), columns=_kv_rank),
    row_cut(_ATTENTION + "o_proj.weight", _ATTENTION + "o_proj.weight", _value_rows),
    vector(_NORM_MLP, _NORM_MLP, hidden),
    *_HF_DENSE,
    *_HF_SPARSE,
    vector(NORM, NORM, hidden),
    replace(matrix(HEAD, whole(HEAD, vocab)), exists=untied),
)
"""Layout ``dims`` must cut nothing (only ``dp``: that many full copies)."""

_SELF, _FFN = DECODER + "self_attention.", DECODER + "mlp."


def _q_up(name: str) -> ParamSpec:
    hf = _ATTENTION + "q_b_proj.weight"
    return matrix(name, whole(hf, _q_rows), columns=_q_rank, axis="tp", unit=_q_head)


def _kv_up(name: str) -> ParamSpec:
    hf = _ATTENTION + "kv_b_proj.weight"
    return matrix(name, whole(hf, _kv_rows), columns=_kv_rank, axis="tp", unit=_kv_head)


def _out(name: str) -> ParamSpec:
    return row_cut(name, _ATTENTION + "o_proj.weight", _value_rows, axis="tp", unit=_value_dim)


MEGATRON_DEEPSEEK_V3 = (
    vocabulary("embedding.word_embeddings.weight", EMBED, stage="first"),
    vector(DECODER + "input_layernorm.weight", _NORM_IN, hidden),
    matrix(_SELF + "linear_q_down_proj.weight", whole(_Q_A, _q_rank)),
    vector(_SELF + "linear_q_up_proj.layer_norm_weight", _ATTENTION + "q_a_layernorm.weight", _q_rank),
    _q_up(_SELF + "linear_q_up_proj.weight"),
    matrix(_SELF + "linear_kv_down_proj.weight", whole(_KV_A, _kv_down)),
    vector(_SELF + "linear_kv_up_proj.layer_norm_weight", _ATTENTION + "kv_a_layernorm.weight", _kv_rank),
    _kv_up(_SELF + "linear_kv_up_proj.weight"),
    _out(_SELF + "linear_proj.weight"),
    vector(_FFN + "linear_fc1.layer_norm_weight", _NORM_MLP, hidden, layers=_dense),
    matrix(_FFN + "linear_fc1.weight", each(_gate_up(_MLP), _dense_width), axis="tp", layers=_dense),
    row_cut(_FFN + "linear_fc2.weight", _MLP + "down_proj.weight", _dense_width, axis="tp", layers=_dense),
    vector(DECODER + "pre_mlp_layernorm.weight", _NORM_MLP, hidden, layers=_sparse),
    matrix(_FFN + "router.weight", whole(_MLP + "gate.weight", num_experts), layers=_sparse),
    vector(_FFN + "router.expert_bias", _BIAS, num_experts, layers=_sparse),
    matrix(
        _FFN + "shared_experts.linear_fc1.weight", each(_gate_up(_SHARED), _shared_width), axis="tp", layers=_sparse
    ),
    row_cut(
        _FFN + "shared_experts.linear_fc2.weight",
        _SHARED + "down_proj.weight",
        _shared_width,
        axis="tp",
        layers=_sparse,
    ),
    matrix(
        _FFN + "experts.linear_fc1.weight{expert}", each(_gate_up(_EXPERT), expert_width), axis="etp", layers=_sparse
    ),
    row_cut(
        _FFN + "experts.linear_fc2.weight{expert}",
        _EXPERT + "down_proj.weight",
        expert_width,
        axis="etp",
        layers=_sparse,
    ),
    vector("decoder.final_layernorm.weight", NORM, hidden, stage="last"),
    vocabulary("output_layer.weight", HEAD, stage="last", exists=untied),
)
"""Expert numbers are global: ``linear_fc1.weight{expert}``; ``router.expert_bias`` is a buffer, float32."""

ENGINE_DEEPSEEK_V3 = (
    vocabulary(EMBED, EMBED, stage="first"),
    vector(_NORM_IN, _NORM_IN, hidden),
    matrix(_ATTENTION + "fused_qkv_a_proj.weight", _down_stacked),
    vector(_ATTENTION + "q_a_layernorm.weight", _ATTENTION + "q_a_layernorm.weight", _q_rank),
    _q_up(_ATTENTION + "q_b_proj.weight"),
    vector(_ATTENTION + "kv_a_layernorm.weight", _ATTENTION + "kv_a_layernorm.weight", _kv_rank),
    _kv_up(_ATTENTION + "kv_b_proj.weight"),
    _out(_ATTENTION + "o_proj.weight"),
    vector(_NORM_MLP, _NORM_MLP, hidden),
    matrix(_MLP + "gate_up_proj.weight", each(_gate_up(_MLP), _dense_width), axis="tp", layers=_dense),
    row_cut(_MLP + "down_proj.weight", _MLP + "down_proj.weight", _dense_width, axis="tp", layers=_dense),
    matrix(_MLP + "gate.weight", whole(_MLP + "gate.weight", num_experts), layers=_sparse),
    vector(_BIAS, _BIAS, num_experts, layers=_sparse),
    matrix(_SHARED + "gate_up_proj.weight", each(_gate_up(_SHARED), _shared_width), axis="tp", layers=_sparse),
    row_cut(_SHARED + "down_proj.weight", _SHARED + "down_proj.weight", _shared_width, axis="tp", layers=_sparse),
    matrix(_MLP + "experts.w13_weight.{expert}", each(_gate_up(_EXPERT), expert_width), axis="etp", layers=_sparse),
    row_cut(
        _MLP + "experts.w2_weight.{expert}", _EXPERT + "down_proj.weight", expert_width, axis="etp", layers=_sparse
    ),
    vector(NORM, NORM, hidden, stage="last"),
    vocabulary(HEAD, HEAD, stage="last", exists=untied),
)
"""A replica is ``tp`` neighbouring ranks; experts are cut by ``etp=tp`` or spread by ``ep``."""
