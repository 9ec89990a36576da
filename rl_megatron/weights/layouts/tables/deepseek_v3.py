"""DeepSeek-V2, V3, V3.2, Kimi-K2 and K2.5, GLM-4.7-Flash and GLM-5: latent attention; dense layers, then experts.

Sources: transformers ``models/deepseek_v2``, ``deepseek_v3``,
``deepseek_v32``, ``glm4_moe_lite``, ``glm_moe_dsa`` and ``kimi_k25`` (the names of its published index);
megatron-core 0.16 ``models/gpt/gpt_layer_specs.py`` (``multi_latent_attention``, ``qk_layernorm``: the norms of the
latents are fused into the up projections) and ``transformer/multi_latent_attention.py`` (down projections whole on
every rank) and ``transformer/experimental_attention_variant/dsa.py`` (the indexer, whole on every rank); vLLM
``model_executor/models/deepseek_v2.py`` (``fused_qkv_a_proj`` is q over kv, ``wk_weights_proj`` the indexer's keys over
its heads' weights; whole on every rank).
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from rl_megatron.models.families import deepseek_v3
from rl_megatron.models.shape import DecoderNames, LatentAttention, ModelShape
from rl_megatron.weights.layouts.layout import Family, ParamSpec
from rl_megatron.weights.layouts.tables.blocks import Block, decoder, dense_mlp, experts, tables_under
from rl_megatron.weights.layouts.tables.drafts import with_drafts
from rl_megatron.weights.layouts.tables.rows import (
    DECODER,
    LAYER,
    Size,
    hidden,
    matrix,
    row_cut,
    stacked,
    vector,
    whole,
)

_ATTENTION, _SELF = LAYER + "self_attn.", DECODER + "self_attention."
_NORM_IN, _OUT = LAYER + "input_layernorm.weight", _ATTENTION + "o_proj.weight"
_Q, _Q_A, _Q_B = _ATTENTION + "q_proj.weight", _ATTENTION + "q_a_proj.weight", _ATTENTION + "q_b_proj.weight"
_KV_A, _KV_B = _ATTENTION + "kv_a_proj_with_mqa.weight", _ATTENTION + "kv_b_proj.weight"
_Q_NORM, _KV_NORM = _ATTENTION + "q_a_layernorm.weight", _ATTENTION + "kv_a_layernorm.weight"

_kv_rank: Size = attrgetter("latent.kv_rank")
_value_dim: Size = attrgetter("latent.value_dim")


def _latent(m: ModelShape) -> LatentAttention:
    assert m.latent is not None, "this table needs a shape with latent attention"
    return m.latent


def _q_rank(m: ModelShape) -> int:
    return _latent(m).query_rank or 0


def _kv_down(m: ModelShape) -> int:
    return _latent(m).kv_rank + _latent(m).rope_dim


def _q_head(m: ModelShape) -> int:
    return _latent(m).nope_dim + _latent(m).rope_dim


def _kv_head(m: ModelShape) -> int:
    return _latent(m).nope_dim + _latent(m).value_dim


def _q_rows(m: ModelShape) -> int:
    return m.num_heads * _q_head(m)


def _kv_rows(m: ModelShape) -> int:
    return m.num_heads * _kv_head(m)


def _value_rows(m: ModelShape) -> int:
    return m.num_heads * _value_dim(m)


def _squeezed(spec: ParamSpec) -> ParamSpec:
    """The row, for shapes with a latent for queries."""
    return replace(spec, condition=lambda m, _: _latent(m).query_rank is not None)


def _straight(spec: ParamSpec) -> ParamSpec:
    """The row, for shapes without a latent for queries."""
    return replace(spec, condition=lambda m, _: _latent(m).query_rank is None)


def _heads(name: str, hf: str, rows: Size, head: Size, columns: Size = hidden) -> ParamSpec:
    """Rows of all heads; tp cuts them between heads."""
    return matrix(name, whole(hf, rows), columns=columns, axis="tp", unit=head)


def _out(name: str) -> ParamSpec:
    return row_cut(name, _OUT, _value_rows, axis="tp", unit=_value_dim)


def _latent_attention(*rows_of_straight: Block) -> Block:
    """Latent attention; ``rows_of_straight`` are of queries without a latent, which models of some families have."""
    hf, megatron, engine = (
        tuple(_straight(row) for block in rows_of_straight for row in getattr(block, layout))
        for layout in ("hf", "megatron", "engine")
    )
    return Block(
        hf=(
            vector(_NORM_IN, _NORM_IN, hidden),
            *hf,
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
            *megatron,
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
            *engine,
            _squeezed(matrix(_ATTENTION + "fused_qkv_a_proj.weight", stacked((_Q_A, _q_rank), (_KV_A, _kv_down)))),
            _squeezed(vector(_Q_NORM, _Q_NORM, _q_rank)),
            _squeezed(_heads(_Q_B, _Q_B, _q_rows, _q_head, _q_rank)),
            vector(_KV_NORM, _KV_NORM, _kv_rank),
            _heads(_KV_B, _KV_B, _kv_rows, _kv_head, _kv_rank),
            _out(_OUT),
        ),
    )


_LATENT_ATTENTION = _latent_attention(
    Block(
        hf=(matrix(_Q, whole(_Q, _q_rows)),),
        megatron=(_heads(_SELF + "linear_q_proj.weight", _Q, _q_rows, _q_head),),
        engine=(_heads(_Q, _Q, _q_rows, _q_head), matrix(_KV_A, whole(_KV_A, _kv_down))),
    )
)
_INDEXER, _CORE_INDEXER = _ATTENTION + "indexer.", _SELF + "core_attention.indexer."
_INDEX_Q, _INDEX_K = _INDEXER + "wq_b.weight", _INDEXER + "wk.weight"
_INDEX_WEIGHTS, _INDEX_NORM = _INDEXER + "weights_proj.weight", _INDEXER + "k_norm."
_index_heads: Size = attrgetter("indexer.heads")
_index_key: Size = attrgetter("indexer.head_dim")


def _index_queries(m: ModelShape) -> int:
    return _index_heads(m) * _index_key(m)


def _held(*rows: ParamSpec) -> tuple[ParamSpec, ...]:
    """The rows, of layers with an indexer, which is not trained."""
    return tuple(replace(row, layers=attrgetter("indexer.layers"), frozen=True) for row in rows)


def _index_norm(name: str) -> tuple[ParamSpec, ...]:
    rows = (vector(name + part, _INDEX_NORM + part, _index_key) for part in ("weight", "bias"))
    return tuple(replace(row, keeps_dtype=True) for row in rows)


def _index_rows(queries: str, keys: str, norm: str, weights: str) -> tuple[ParamSpec, ...]:
    return _held(
        matrix(queries, whole(_INDEX_Q, _index_queries), columns=_q_rank),
        matrix(keys, whole(_INDEX_K, _index_key)),
        *_index_norm(norm),
        replace(matrix(weights, whole(_INDEX_WEIGHTS, _index_heads)), keeps_dtype=True),
    )


_HELD_INDEXER = Block(
    hf=_index_rows(_INDEX_Q, _INDEX_K, _INDEX_NORM, _INDEX_WEIGHTS),
    megatron=_index_rows(
        _CORE_INDEXER + "linear_wq_b.weight",
        _CORE_INDEXER + "linear_wk.weight",
        _CORE_INDEXER + "k_norm.",
        _CORE_INDEXER + "linear_weights_proj.weight",
    ),
    engine=_held(
        matrix(_INDEX_Q, whole(_INDEX_Q, _index_queries), columns=_q_rank),
        matrix(_INDEXER + "wk_weights_proj.weight", stacked((_INDEX_K, _index_key), (_INDEX_WEIGHTS, _index_heads))),
        *_index_norm(_INDEX_NORM),
    ),
)
_EXPERTS = experts(bias=True, dense_first=True, shared=True)
_TABLES = with_drafts(decoder(_LATENT_ATTENTION, dense_mlp(), _EXPERTS))
HF_DEEPSEEK_V3, MEGATRON_DEEPSEEK_V3, ENGINE_DEEPSEEK_V3 = _TABLES["hf"], _TABLES["megatron"], _TABLES["engine"]
DEEPSEEK_V2 = Family(  # has no selection bias
    model_types=("deepseek_v2",),
    read=deepseek_v3.read_v2,
    tables=decoder(_LATENT_ATTENTION, dense_mlp(), experts(dense_first=True, shared=True)),
    serves=True,
)
DEEPSEEK_V3 = Family(model_types=("deepseek_v3", "kimi_k2"), read=deepseek_v3.read_v3, tables=_TABLES, serves=True)
INDEXED = Family(
    model_types=("deepseek_v32", "glm_moe_dsa"),
    read=deepseek_v3.read_indexed,
    tables=with_drafts(decoder(_latent_attention(), _HELD_INDEXER, dense_mlp(), _EXPERTS)),
    serves=True,
)
_INSIDE = "language_model."
KIMI_K25 = Family(
    model_types=("kimi_k25",),
    read=deepseek_v3.read_kimi,
    tables=tables_under(_INSIDE, decoder(_latent_attention(), dense_mlp(), _EXPERTS), instead=""),
    serves=True,
    decoder=DecoderNames(prefix=_INSIDE + "model.", head=_INSIDE + "lm_head"),
)
GLM4_MOE_LITE = Family(model_types=("glm4_moe_lite",), read=deepseek_v3.read_glm, tables=_TABLES, serves=True)
