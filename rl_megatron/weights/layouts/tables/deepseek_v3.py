"""DeepSeek-V2, V3, Kimi-K2 and GLM-4.7-Flash: multi-head latent attention; dense layers, then experts.

The layers for multi-token prediction have no rows. Sources: transformers ``models/deepseek_v2``, ``deepseek_v3`` and
``glm4_moe_lite``;
megatron-core 0.16 ``models/gpt/gpt_layer_specs.py`` (``multi_latent_attention``, ``qk_layernorm``: the norms of the
latents are fused into the up projections) and ``transformer/multi_latent_attention.py`` (down projections whole on
every rank); vLLM ``model_executor/models/deepseek_v2.py`` (``fused_qkv_a_proj`` is q over kv, whole on every rank).
"""

from __future__ import annotations

from dataclasses import replace

from rl_megatron.models.families import deepseek_v3
from rl_megatron.models.shape import LatentAttention, ModelShape
from rl_megatron.weights.layouts.family import Family
from rl_megatron.weights.layouts.layout import Band, ParamSpec, Piece
from rl_megatron.weights.layouts.tables.blocks import Block, decoder, dense_mlp, experts
from rl_megatron.weights.layouts.tables.rows import DECODER, LAYER, Size, hidden, matrix, row_cut, vector, whole

_ATTENTION, _SELF = LAYER + "self_attn.", DECODER + "self_attention."
_NORM_IN, _OUT = LAYER + "input_layernorm.weight", _ATTENTION + "o_proj.weight"
_Q, _Q_A, _Q_B = _ATTENTION + "q_proj.weight", _ATTENTION + "q_a_proj.weight", _ATTENTION + "q_b_proj.weight"
_KV_A, _KV_B = _ATTENTION + "kv_a_proj_with_mqa.weight", _ATTENTION + "kv_b_proj.weight"
_Q_NORM, _KV_NORM = _ATTENTION + "q_a_layernorm.weight", _ATTENTION + "kv_a_layernorm.weight"


def _latent(m: ModelShape) -> LatentAttention:
    assert m.latent is not None, "this table needs a shape with latent attention"
    return m.latent


def _q_rank(m: ModelShape) -> int:
    return _latent(m).query_rank or 0


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


def _down_stacked(m: ModelShape, _degree: int) -> tuple[Band, ...]:
    return ((Piece(hf=_Q_A, start=0, stop=_q_rank(m)), Piece(hf=_KV_A, start=0, stop=_kv_down(m))),)


def _squeezed(spec: ParamSpec) -> ParamSpec:
    """The row, for shapes whose queries have a latent."""
    return replace(spec, exists=lambda m, _: _latent(m).query_rank is not None)


def _straight(spec: ParamSpec) -> ParamSpec:
    """The row, for shapes whose queries have no latent."""
    return replace(spec, exists=lambda m, _: _latent(m).query_rank is None)


def _heads(name: str, hf: str, rows: Size, head: Size, columns: Size = hidden) -> ParamSpec:
    """Rows of all heads; tp cuts them between heads."""
    return matrix(name, whole(hf, rows), columns=columns, axis="tp", unit=head)


def _out(name: str) -> ParamSpec:
    return row_cut(name, _OUT, _value_rows, axis="tp", unit=_value_dim)


_LATENT_ATTENTION = Block(
    hf=(
        vector(_NORM_IN, _NORM_IN, hidden),
        _straight(matrix(_Q, whole(_Q, _q_rows))),
        _squeezed(matrix(_Q_A, whole(_Q_A, _q_rank))),
        _squeezed(vector(_Q_NORM, _Q_NORM, _q_rank)),
        _squeezed(matrix(_Q_B, whole(_Q_B, _q_rows), columns=_q_rank)),
        matrix(_KV_A, whole(_KV_A, _kv_down)),
        vector(_KV_NORM, _KV_NORM, _kv_rank),
        matrix(_KV_B, whole(_KV_B, _kv_rows), columns=_kv_rank),
        row_cut(_OUT, _OUT, _value_rows),
    ),
    megatron=(
        vector(DECODER + "input_layernorm.weight", _NORM_IN, hidden),
        _straight(_heads(_SELF + "linear_q_proj.weight", _Q, _q_rows, _q_head)),
        _squeezed(matrix(_SELF + "linear_q_down_proj.weight", whole(_Q_A, _q_rank))),
        _squeezed(vector(_SELF + "linear_q_up_proj.layer_norm_weight", _Q_NORM, _q_rank)),
        _squeezed(_heads(_SELF + "linear_q_up_proj.weight", _Q_B, _q_rows, _q_head, _q_rank)),
        matrix(_SELF + "linear_kv_down_proj.weight", whole(_KV_A, _kv_down)),
        vector(_SELF + "linear_kv_up_proj.layer_norm_weight", _KV_NORM, _kv_rank),
        _heads(_SELF + "linear_kv_up_proj.weight", _KV_B, _kv_rows, _kv_head, _kv_rank),
        _out(_SELF + "linear_proj.weight"),
    ),
    engine=(
        vector(_NORM_IN, _NORM_IN, hidden),
        _straight(_heads(_Q, _Q, _q_rows, _q_head)),
        _straight(matrix(_KV_A, whole(_KV_A, _kv_down))),
        _squeezed(matrix(_ATTENTION + "fused_qkv_a_proj.weight", _down_stacked)),
        _squeezed(vector(_Q_NORM, _Q_NORM, _q_rank)),
        _squeezed(_heads(_Q_B, _Q_B, _q_rows, _q_head, _q_rank)),
        vector(_KV_NORM, _KV_NORM, _kv_rank),
        _heads(_KV_B, _KV_B, _kv_rows, _kv_head, _kv_rank),
        _out(_OUT),
    ),
)
_TABLES = decoder(
    _LATENT_ATTENTION,
    dense_mlp(),
    experts(bias=True, dense_first=True, shared=True),
)
HF_DEEPSEEK_V3, MEGATRON_DEEPSEEK_V3, ENGINE_DEEPSEEK_V3 = _TABLES["hf"], _TABLES["megatron"], _TABLES["engine"]
DEEPSEEK_V2 = Family(  # without a selection bias
    model_types=("deepseek_v2",),
    read=deepseek_v3.read_v2,
    tables=decoder(_LATENT_ATTENTION, dense_mlp(), experts(dense_first=True, shared=True)),
    serves=True,
)
DEEPSEEK_V3 = Family(model_types=("deepseek_v3", "kimi_k2"), read=deepseek_v3.read_v3, tables=_TABLES, serves=True)
GLM4_MOE_LITE = Family(model_types=("glm4_moe_lite",), read=deepseek_v3.read_glm, tables=_TABLES, serves=True)
