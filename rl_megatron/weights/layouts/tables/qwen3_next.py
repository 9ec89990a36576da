"""Qwen3-Next and Qwen3.5-MoE's text model: gated delta nets, attention with a gate, a shared expert with a gate.

Sources: transformers ``models/qwen3_next`` (``in_proj_qkvz`` and ``in_proj_ba`` are grouped by key head; each head's
rows in ``q_proj`` are its query, then its gate) and ``models/qwen3_5_moe`` (four matrices instead, not grouped);
megatron-core 0.16 ``transformer/attention.py`` (``attention_output_gate``: ``linear_qkv`` is, per query group, its q
heads, then their gates, then k, v). The learner's delta nets are grouped by key head, so that tp cuts them between key
heads, whatever it is: ``in_proj`` is each one's query, key, values, gates, and then two rows a value head; ``conv1d``
the first three. megatron-core's own has another order. There is no table for engines. A draft layer attends, and has
its experts one by one (Qwen3.5) or in one tensor (Qwen3.6), whatever the decoder has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter

from rl_megatron.models.families import qwen3_next
from rl_megatron.models.shape import DecoderNames, DeltaNet, ExpertNames, ModelShape
from rl_megatron.weights.layouts.layout import Band, Family, ParamSpec, Piece
from rl_megatron.weights.layouts.tables.blocks import Block, Tables, attention, decoder, experts, stacks, tables_under
from rl_megatron.weights.layouts.tables.drafts import ALONE, with_drafts
from rl_megatron.weights.layouts.tables.rows import (
    DECODER,
    LAYER,
    OfLayers,
    Others,
    Size,
    cut_vector,
    hidden,
    matrix,
    row_cut,
    vector,
    whole,
)

_ATTENTION, _SELF, _DELTA = LAYER + "self_attn.", DECODER + "self_attention.", LAYER + "linear_attn."
_NORM_IN, _QUERY, _QKV = LAYER + "input_layernorm.weight", _ATTENTION + "q_proj.weight", _SELF + "linear_qkv.weight"
_CONV, _DECAY, _STEP = _DELTA + "conv1d.weight", _DELTA + "A_log", _DELTA + "dt_bias"
_NORM, _OUT = _DELTA + "norm.weight", _DELTA + "out_proj.weight"
_QKVZ, _BA = _DELTA + "in_proj_qkvz.weight", _DELTA + "in_proj_ba.weight"
_APART = {part: f"{_DELTA}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")}
PiecesOfHead = Callable[[DeltaNet, int], tuple[Piece, ...]]  # makes the pieces of a key head's rows
_delta_layers: OfLayers = attrgetter("delta_layers")
_attention_layers: OfLayers = attrgetter("attention_layers")
_value_heads: Size = attrgetter("delta.value_heads")
_value_dim: Size = attrgetter("delta.value_dim")
_outputs: Size = attrgetter("delta.outputs")
_ratio: Size = attrgetter("delta.ratio")


def _delta(m: ModelShape) -> DeltaNet:
    assert m.delta is not None, "this table needs a shape with delta nets"
    return m.delta


def _query_rows(m: ModelShape) -> int:
    return 2 * m.num_heads * m.head_dim


def _group_rows(m: ModelShape) -> int:
    return (2 * m.num_heads // m.num_kv_heads + 2) * m.head_dim


def _grouped(m: ModelShape, _degree: int) -> tuple[Band, ...]:
    """Each group's queries, gates, key and value."""
    d, heads = m.head_dim, m.num_heads // m.num_kv_heads
    return (
        tuple(
            piece
            for group in range(m.num_kv_heads)
            for piece in (
                *(
                    Piece(hf=_QUERY, start=(2 * head + half) * d, stop=(2 * head + half + 1) * d)
                    for half in (0, 1)
                    for head in range(group * heads, (group + 1) * heads)
                ),
                *(Piece(hf=f"{_ATTENTION}{x}_proj.weight", start=group * d, stop=(group + 1) * d) for x in "kv"),
            )
        ),
    )


def _gated_attention() -> Block:
    plain = attention(qk_norm="head")
    other = {
        _QUERY: matrix(_QUERY, whole(_QUERY, _query_rows)),
        _QKV: matrix(_QKV, _grouped, axis="tp", unit=_group_rows),
    }
    return Block(
        hf=tuple(
            row if row.name == _NORM_IN else replace(other.get(row.name, row), layers=_attention_layers)
            for row in plain.hf
        ),
        megatron=tuple(replace(other.get(row.name, row), layers=_attention_layers) for row in plain.megatron),
        engine=(),
    )


def _head_piece(hf: str, head: int, rows: int, first: int = 0) -> Piece:
    return Piece(hf=hf, start=first + head * rows, stop=first + (head + 1) * rows)


def _mixed(hf: str, n: DeltaNet, head: int) -> tuple[Piece, ...]:
    """Query, key and values of a key head, where all queries come first, then all keys, then all values."""
    queries = n.key_heads * n.key_dim
    return (
        _head_piece(hf, head, n.key_dim),
        _head_piece(hf, head, n.key_dim, queries),
        _head_piece(hf, head, n.ratio * n.value_dim, 2 * queries),
    )


def _fused(n: DeltaNet, head: int) -> tuple[Piece, ...]:
    return _head_piece(_QKVZ, head, 2 * n.key_dim + 2 * n.ratio * n.value_dim), _head_piece(_BA, head, 2 * n.ratio)


def _separate_experts(n: DeltaNet, head: int) -> tuple[Piece, ...]:
    return (
        *_mixed(_APART["qkv"], n, head),
        _head_piece(_APART["z"], head, n.ratio * n.value_dim),
        *(_head_piece(_APART[part], head, n.ratio) for part in "ba"),
    )


def _head_bands(places: PiecesOfHead) -> Callable[[ModelShape, int], tuple[Band, ...]]:
    return lambda m, _: (tuple(piece for head in range(_delta(m).key_heads) for piece in places(_delta(m), head)),)


def _taps(name: str, *, cut: bool) -> ParamSpec:
    """The convolution's weight, [channels, 1, kernel]."""
    return ParamSpec(
        name=name,
        bands=_head_bands(lambda n, head: _mixed(_CONV, n, head)) if cut else whole(_CONV, lambda m: _delta(m).mixed),
        other_axes=lambda m: (1, _delta(m).kernel),
        axis="tp" if cut else None,
        unit=(lambda m: _delta(m).mixed // _delta(m).key_heads) if cut else (lambda m: 1),
        layers=_delta_layers,
    )


def _delta_net(inputs: dict[str, Size], places: PiecesOfHead) -> Block:
    """``inputs`` are Hugging Face's matrices of the inputs and their rows, ``places`` those of a key head in them."""
    only = _delta_layers
    return Block(
        hf=(
            *(matrix(name, whole(name, rows), layers=only) for name, rows in inputs.items()),
            _taps(_CONV, cut=False),
            *(vector(name, name, _value_heads, layers=only) for name in (_DECAY, _STEP)),
            vector(_NORM, _NORM, _value_dim, layers=only),
            row_cut(_OUT, _OUT, _outputs, layers=only),
        ),
        megatron=(
            vector(_SELF + "in_proj.layer_norm_weight", _NORM_IN, hidden, layers=only),
            matrix(
                _SELF + "in_proj.weight",
                _head_bands(places),
                axis="tp",
                unit=lambda m: _delta(m).inputs // _delta(m).key_heads,
                layers=only,
            ),
            _taps(_SELF + "conv1d.weight", cut=True),
            cut_vector(_SELF + "A_log", whole(_DECAY, _value_heads), unit=_ratio, layers=only),
            cut_vector(_SELF + "dt_bias", whole(_STEP, _value_heads), unit=_ratio, layers=only),
            vector(_SELF + "out_norm.weight", _NORM, _value_dim, layers=only),
            row_cut(
                _SELF + "out_proj.weight",
                _OUT,
                _outputs,
                axis="tp",
                unit=lambda m: _ratio(m) * _delta(m).value_dim,
                layers=only,
            ),
        ),
        engine=(),
    )


_NAMES = ExpertNames(shared="shared_expert.")
_EXPERTS = experts(names=_NAMES, shared=True, shared_gate="shared_expert_gate.weight")
QWEN3_NEXT = Family(
    model_types=("qwen3_next",),
    read=qwen3_next.read,
    tables=with_drafts(
        decoder(
            _gated_attention(),
            _delta_net(
                {
                    _QKVZ: lambda m: _delta(m).mixed + _delta(m).outputs,
                    _BA: lambda m: 2 * _delta(m).value_heads,
                },
                _fused,
            ),
            _EXPERTS,
            planned=False,
        ),
        ALONE,
        without=(_delta_layers,),
    ),
    serves=True,
    names=_NAMES,
    decoder=DecoderNames(grouped=True),
)
_MLP, _FFN = LAYER + "mlp.", DECODER + "mlp."
_STACKS: tuple[tuple[str, Others], ...] = (
    ("experts.gate_up_proj", lambda m: (2 * m.expert_width, m.hidden_size)),
    ("experts.down_proj", lambda m: (m.hidden_size, m.expert_width)),
)


def _stacked(block: Block) -> Block:
    """The block with all experts of a layer in one tensor, as Qwen3.5's files have them; ep cuts it between experts."""
    hf, megatron = (tuple(row for row in rows if "{expert}" not in row.name) for rows in (block.hf, block.megatron))
    cut = stacks(_STACKS, _FFN, _MLP, "ep")
    return Block(hf=(*hf, *stacks(_STACKS, _MLP, _MLP)), megatron=(*megatron, *cut), engine=())


def _text(experts_block: Block) -> Tables:
    inputs: dict[str, Size] = {
        _APART["qkv"]: lambda m: _delta(m).mixed,
        _APART["z"]: _outputs,
        _APART["b"]: _value_heads,
        _APART["a"]: _value_heads,
    }
    return decoder(_gated_attention(), _delta_net(inputs, _separate_experts), experts_block, planned=False)


_INSIDE = "model.language_model."  # the prefix of a text model that has a tower for images


_PLAIN = _text(_EXPERTS)
_APART_EXPERTS = with_drafts(_PLAIN, ALONE, without=(_delta_layers,))
_STACKED_EXPERTS = with_drafts(_text(_stacked(_EXPERTS)), ALONE, without=(_delta_layers,), separate=_PLAIN)
QWEN3_5_MOE_TEXT = Family(
    model_types=("qwen3_5_moe_text",),
    read=qwen3_next.read,
    tables=_APART_EXPERTS,
    stacked=_STACKED_EXPERTS,
    serves=True,
    names=_NAMES,
)
QWEN3_5_MOE = Family(
    model_types=("qwen3_5_moe",),
    read=qwen3_next.read_text_model,
    tables=tables_under(_INSIDE, _APART_EXPERTS),
    stacked=tables_under(_INSIDE, _STACKED_EXPERTS),
    serves=True,
    names=_NAMES,
    decoder=DecoderNames(prefix=_INSIDE),
)
