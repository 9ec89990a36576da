"""Building blocks of families with grouped-query attention, each for all three layouts.

Sources: transformers ``models/*/modeling_*`` (checkpoint names, one tensor an expert); megatron-core 0.16
``transformer/attention.py`` (``linear_qkv`` is, per query group, its q heads, then k, then v), ``transformer/mlp.py``
and ``transformer/moe/{router,shared_experts,experts}.py`` (``linear_fc1`` is gate then up, each cut by itself); vLLM
``model_executor/layers/linear.py`` (``QKVParallelLinear``: each rank its q heads, then k, then v, a key/value head
repeated on neighboring ranks where there are more ranks than heads).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal

from rl_megatron.models.shape import ExpertNames, ModelShape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.layouts.layout import Axis, Band, ParamSpec, Piece, one
from rl_megatron.weights.layouts.tables.rows import (
    DECODER,
    EMBED,
    HEAD,
    LAYER,
    NORM,
    SCORE,
    OfLayers,
    Others,
    Size,
    cut_vector,
    each,
    expert_width,
    has_score,
    hidden,
    matrix,
    num_experts,
    row_cut,
    tied_over_stages,
    under,
    untied,
    vector,
    vocab,
    vocabulary,
    whole,
)

_ATTENTION, _SELF, _FFN = LAYER + "self_attn.", DECODER + "self_attention.", DECODER + "mlp."
_NORM_IN, _NORM_MLP = LAYER + "input_layernorm.weight", LAYER + "post_attention_layernorm.weight"
_Q_NORM, _K_NORM = _ATTENTION + "q_norm.weight", _ATTENTION + "k_norm.weight"
_OUT, _SINKS = _ATTENTION + "o_proj.", _ATTENTION + "sinks"
_USUAL = ExpertNames()
_head_dim: Size = attrgetter("head_dim")
_heads: Size = attrgetter("num_heads")
_dense_width: Size = attrgetter("dense_width")
_shared_width: Size = attrgetter("shared_width")
moe_layers: OfLayers = attrgetter("moe_layers")
"""Layers with experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Rows of one part of a decoder in each layout, in the order of the model."""

    hf: tuple[ParamSpec, ...]
    megatron: tuple[ParamSpec, ...]
    engine: tuple[ParamSpec, ...]


Tables = Mapping[str, tuple[ParamSpec, ...]]


def decoder(*blocks: Block, planned: bool = True) -> Tables:
    """A decoder: ``blocks`` between embedding and output layer. Without ``planned`` it has no table for engines.

    Layout ``hf`` cuts no tensor (only ``dp``: full copies). ``megatron`` has TransformerEngine's parameter names with
    the expert number made global: ``linear_fc1.weight{expert}``. ``engine`` is for planning: a replica is ``tp``
    neighboring ranks, and ``dp`` counts replicas. Experts are cut by ``etp=tp`` or spread by ``ep=tp``;
    ``w13_weight.{expert}`` is the expert's matrix inside the engine's fused tensor.
    """
    hf = (
        matrix(EMBED, whole(EMBED, vocab)),
        *(row for block in blocks for row in block.hf),
        vector(NORM, NORM, hidden),
        replace(matrix(HEAD, whole(HEAD, vocab)), condition=untied),
        replace(matrix(SCORE, whole(SCORE, one)), condition=has_score),
    )
    megatron = (
        vocabulary("embedding.word_embeddings.weight", EMBED, stage="first"),
        *(row for block in blocks for row in block.megatron),
        vector("decoder.final_layernorm.weight", NORM, hidden, stage="last"),
        vocabulary("output_layer.weight", HEAD, stage="last", exists=untied),
        vocabulary("output_layer.weight", EMBED, stage="last", exists=tied_over_stages),
        replace(matrix("output_layer.weight", whole(SCORE, one)), stage="last", condition=has_score),
    )
    engine = (
        vocabulary(EMBED, EMBED, stage="first"),
        *(row for block in blocks for row in block.engine),
        vector(NORM, NORM, hidden, stage="last"),
        vocabulary(HEAD, HEAD, stage="last", exists=untied),
        vocabulary(HEAD, EMBED, stage="last", exists=tied_over_stages),
    )
    return {"hf": hf, "megatron": megatron, **({"engine": engine} if planned else {})}


def tables_under(prefix: str, tables: Tables, *, instead: str = "model.") -> Tables:
    """The tables for files whose names are those of `under`."""
    return {
        layout: tuple(under(prefix, row, named_so=layout == "hf", instead=instead) for row in rows)
        for layout, rows in tables.items()
    }


def attention(
    *,
    qkv_bias: bool = False,
    qk_norm: Literal["head", "all"] | None = None,
    out_bias: bool = False,
    sinks: bool = False,
) -> Block:
    """Grouped-query attention with its input norm. Biases and norms also depend on the shape."""
    parts = (("q", _q_rows), ("k", _kv_rows), ("v", _kv_rows))
    hf = [
        vector(_NORM_IN, _NORM_IN, hidden),
        *(matrix(f"{_ATTENTION}{x}_proj.weight", whole(f"{_ATTENTION}{x}_proj.weight", rows)) for x, rows in parts),
    ]
    megatron = [
        vector(_SELF + "linear_qkv.layer_norm_weight", _NORM_IN, hidden),
        matrix(_SELF + "linear_qkv.weight", lambda m, _: _grouped(m, "weight"), axis="tp", unit=_group_rows),
    ]
    engine = [
        vector(_NORM_IN, _NORM_IN, hidden),
        matrix(_ATTENTION + "qkv_proj.weight", lambda m, n: _stacked(m, n, "weight"), axis="tp", unit=_head_dim),
    ]
    if qkv_bias:
        names = [(f"{_ATTENTION}{x}_proj.bias", rows) for x, rows in parts]
        hf += [replace(vector(name, name, rows), condition=_has_qkv_bias) for name, rows in names]
        fused = cut_vector(_SELF + "linear_qkv.bias", lambda m, _: _grouped(m, "bias"), unit=_group_rows)
        stacked = cut_vector(_ATTENTION + "qkv_proj.bias", lambda m, n: _stacked(m, n, "bias"), unit=_head_dim)
        megatron.append(replace(fused, condition=_has_qkv_bias))
        engine.append(replace(stacked, condition=_has_qkv_bias))
    if qk_norm:
        sizes = (_head_dim, _head_dim) if qk_norm == "head" else (_q_rows, _kv_rows)
        hf += [_qk_norm(name, name, size) for name, size in zip((_Q_NORM, _K_NORM), sizes, strict=True)]
        megatron += [
            _qk_norm(f"{_SELF}{x}_layernorm.weight", name, size, cut=qk_norm == "all")
            for x, name, size in zip("qk", (_Q_NORM, _K_NORM), sizes, strict=True)
        ]
        engine += [_qk_norm(name, name, size) for name, size in zip((_Q_NORM, _K_NORM), sizes, strict=True)]
    if sinks:
        hf.append(vector(_SINKS, _SINKS, _heads))
        megatron.append(cut_vector(_SELF + "core_attention.softmax_offset", whole(_SINKS, _heads)))
        engine.append(cut_vector(_SINKS, whole(_SINKS, _heads)))
    hf.append(row_cut(_OUT + "weight", _OUT + "weight", _q_rows))
    megatron.append(row_cut(_SELF + "linear_proj.weight", _OUT + "weight", _q_rows, axis="tp", unit=_head_dim))
    engine.append(row_cut(_OUT + "weight", _OUT + "weight", _q_rows, axis="tp", unit=_head_dim))
    if out_bias:
        for rows, name in ((hf, _OUT), (megatron, _SELF + "linear_proj."), (engine, _OUT)):
            rows.append(vector(name + "bias", _OUT + "bias", hidden))
    return Block(hf=tuple(hf), megatron=tuple(megatron), engine=tuple(engine))


def dense_mlp() -> Block:
    """The norm after attention, in all layers, and the MLP of layers without experts."""
    gate_up = tuple(f"{LAYER}mlp.{x}_proj.weight" for x in ("gate", "up"))
    down = LAYER + "mlp.down_proj.weight"
    only = dense_layers
    return Block(
        hf=(
            vector(_NORM_MLP, _NORM_MLP, hidden),
            *(matrix(name, whole(name, _dense_width), layers=only) for name in gate_up),
            row_cut(down, down, _dense_width, layers=only),
        ),
        megatron=(
            vector(_FFN + "linear_fc1.layer_norm_weight", _NORM_MLP, hidden, layers=only),
            matrix(_FFN + "linear_fc1.weight", each(gate_up, _dense_width), axis="tp", layers=only),
            row_cut(_FFN + "linear_fc2.weight", down, _dense_width, axis="tp", layers=only),
        ),
        engine=(
            vector(_NORM_MLP, _NORM_MLP, hidden),
            matrix(LAYER + "mlp.gate_up_proj.weight", each(gate_up, _dense_width), axis="tp", layers=only),
            row_cut(down, down, _dense_width, axis="tp", layers=only),
        ),
    )


def experts(
    *,
    names: ExpertNames = _USUAL,
    bias: bool = False,
    dense_first: bool = False,
    shared: bool = False,
    shared_gate: str | None = None,
) -> Block:
    """Router and experts under their ``names``.

    With ``bias`` the router has a selection bias. With ``dense_first``, `dense_mlp` adds the norm, which all layers
    have; ``shared`` adds shared experts, which are one MLP, and ``shared_gate`` the name of its gate.
    """
    mlp, only = LAYER + names.prefix, moe_layers
    gate, up, down = (f"{mlp}experts.{{expert}}.{name}.weight" for name in names.parts)
    router = mlp + names.router
    norm = () if dense_first else (vector(_NORM_MLP, _NORM_MLP, hidden),)
    hf = [*norm, matrix(router, whole(router, num_experts), layers=only)]
    megatron = [
        vector(DECODER + "pre_mlp_layernorm.weight", _NORM_MLP, hidden, layers=only),
        matrix(_FFN + "router.weight", whole(router, num_experts), layers=only),
    ]
    engine = list(hf)
    if bias:
        added = mlp + names.selection_bias
        hf.append(_buffer(added, added))
        megatron.append(_buffer(_FFN + "router.expert_bias", added))
        engine.append(_buffer(added, added))
    if shared:
        block = _shared(mlp + names.shared, None if shared_gate is None else mlp + shared_gate)
        for rows, more in ((hf, block.hf), (megatron, block.megatron), (engine, block.engine)):
            rows.extend(more)
    hf += [*(matrix(name, whole(name, expert_width), layers=only) for name in (gate, up))]
    hf.append(row_cut(down, down, expert_width, layers=only))
    for rows, fc1, fc2 in (
        (megatron, _FFN + "experts.linear_fc1.weight{expert}", _FFN + "experts.linear_fc2.weight{expert}"),
        (engine, mlp + "experts.w13_weight.{expert}", mlp + "experts.w2_weight.{expert}"),
    ):
        rows.append(matrix(fc1, each((gate, up), expert_width), axis="etp", layers=only))
        rows.append(row_cut(fc2, down, expert_width, axis="etp", layers=only))
    return Block(hf=tuple(hf), megatron=tuple(megatron), engine=tuple(engine))


def stacks(
    parts: Sequence[tuple[str, Others]], prefix: str, hf: str, axis: Axis | None = None
) -> tuple[ParamSpec, ...]:
    """Parts of all experts of a layer in one tensor each, cut between experts: their names after ``prefix``, and
    after ``hf`` in files, and the sizes of an expert's."""
    return tuple(
        ParamSpec(name=prefix + name, bands=whole(hf + name, num_experts), other_axes=of, axis=axis, layers=moe_layers)
        for name, of in parts
    )


def _shared(prefix: str, gate: str | None) -> Block:
    gate_up, down = (prefix + "gate_proj.weight", prefix + "up_proj.weight"), prefix + "down_proj.weight"
    only = moe_layers
    own = _FFN + "shared_experts."
    fc1, fc2 = own + "linear_fc1.weight", own + "linear_fc2.weight"
    gates = () if gate is None else (matrix(gate, whole(gate, one), layers=only),)
    return Block(
        hf=(
            *gates,
            *(matrix(name, whole(name, _shared_width), layers=only) for name in gate_up),
            row_cut(down, down, _shared_width, layers=only),
        ),
        megatron=(
            *(replace(row, name=own + "gate_weight") for row in gates),
            matrix(fc1, each(gate_up, _shared_width), axis="tp", layers=only),
            row_cut(fc2, down, _shared_width, axis="tp", layers=only),
        ),
        engine=(
            *gates,
            matrix(prefix + "gate_up_proj.weight", each(gate_up, _shared_width), axis="tp", layers=only),
            row_cut(down, down, _shared_width, axis="tp", layers=only),
        ),
    )


def dense_layers(m: ModelShape) -> range:
    """Layers with one MLP."""
    return range(m.moe_layers.start)


def _buffer(name: str, hf: str) -> ParamSpec:
    return replace(vector(name, hf, num_experts, layers=moe_layers), keeps_dtype=True)


def _qk_norm(name: str, hf: str, size: Size, *, cut: bool = False) -> ParamSpec:
    row = cut_vector(name, whole(hf, size), unit=_head_dim) if cut else vector(name, hf, size)
    return replace(row, condition=_has_qk_norm)


def _grouped(m: ModelShape, kind: str) -> tuple[Band, ...]:
    rows = {"q": m.num_heads // m.num_kv_heads * m.head_dim, "k": m.head_dim, "v": m.head_dim}
    return (
        tuple(
            Piece(hf=f"{_ATTENTION}{x}_proj.{kind}", start=group * n, stop=(group + 1) * n)
            for group in range(m.num_kv_heads)
            for x, n in rows.items()
        ),
    )


def _stacked(m: ModelShape, degree: int, kind: str) -> tuple[Band, ...]:
    copies, n = degree // m.num_kv_heads, m.head_dim
    if copies <= 1:
        spans = [(0, m.num_kv_heads * n)]
    else:
        spans = [(head * n, (head + 1) * n) for head in range(m.num_kv_heads) for _ in range(copies)]
    return (
        (Piece(hf=f"{_ATTENTION}q_proj.{kind}", start=0, stop=_q_rows(m)),),
        *(tuple(Piece(hf=f"{_ATTENTION}{x}_proj.{kind}", start=a, stop=b) for a, b in spans) for x in "kv"),
    )


def _has_qkv_bias(m: ModelShape, _dims: ParallelDims) -> bool:
    return m.qkv_bias


def _has_qk_norm(m: ModelShape, _dims: ParallelDims) -> bool:
    return m.qk_norm is not None


def _group_rows(m: ModelShape) -> int:
    return (m.num_heads // m.num_kv_heads + 2) * m.head_dim


def _q_rows(m: ModelShape) -> int:
    return m.num_heads * m.head_dim


def _kv_rows(m: ModelShape) -> int:
    return m.num_kv_heads * m.head_dim
