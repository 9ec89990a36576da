"""gpt-oss in 16 or 32 bits: biases, a sink a head, fused experts [expert, in, out] with gate and up interleaved.

Sources: transformers ``models/gpt_oss``; the sinks are ``softmax_offset`` in megatron-core's ``DotProductAttention``.
The learner's experts have the checkpoint's form, cut by ep along the first dim, not the form of TransformerEngine's
grouped linears. There is no table for engines, which keep the published checkpoints' four bits, padded and swizzled.
"""

from __future__ import annotations

from rl_megatron.models.families.grouped_query import read_gpt_oss
from rl_megatron.models.shape import ModelShape
from rl_megatron.weights.boxes import Shape
from rl_megatron.weights.layouts.family import Family
from rl_megatron.weights.layouts.layout import Axis, ParamSpec
from rl_megatron.weights.layouts.tables.blocks import Block, attention, decoder
from rl_megatron.weights.layouts.tables.rows import DECODER, LAYER, Others, hidden, matrix, num_experts, vector, whole

_MLP, _FFN = LAYER + "mlp.", DECODER + "mlp."
_NORM = LAYER + "post_attention_layernorm.weight"
_ROUTER, _BIAS = _MLP + "router.weight", _MLP + "router.bias"


def _gate_up(m: ModelShape) -> Shape:
    return m.hidden_size, 2 * m.expert_width


def _gate_up_bias(m: ModelShape) -> Shape:
    return (2 * m.expert_width,)


def _down(m: ModelShape) -> Shape:
    return m.expert_width, m.hidden_size


def _down_bias(m: ModelShape) -> Shape:
    return (m.hidden_size,)


_EXPERTS: tuple[tuple[str, Others], ...] = (
    ("experts.gate_up_proj", _gate_up),
    ("experts.gate_up_proj_bias", _gate_up_bias),
    ("experts.down_proj", _down),
    ("experts.down_proj_bias", _down_bias),
)


def _fused(prefix: str, *, cut: bool) -> tuple[ParamSpec, ...]:
    axis: Axis | None = "ep" if cut else None
    return tuple(
        ParamSpec(name=prefix + name, bands=whole(_MLP + name, num_experts), others=others, axis=axis)
        for name, others in _EXPERTS
    )


_MOE = Block(
    hf=(
        vector(_NORM, _NORM, hidden),
        matrix(_ROUTER, whole(_ROUTER, num_experts)),
        vector(_BIAS, _BIAS, num_experts),
        *_fused(_MLP, cut=False),
    ),
    megatron=(
        vector(DECODER + "pre_mlp_layernorm.weight", _NORM, hidden),
        matrix(_FFN + "router.weight", whole(_ROUTER, num_experts)),
        vector(_FFN + "router.bias", _BIAS, num_experts),
        *_fused(_FFN, cut=True),
    ),
    engine=(),
)
GPT_OSS = Family(
    model_types=("gpt_oss",),
    read=read_gpt_oss,
    tables=decoder(attention(qkv_bias=True, out_bias=True, sinks=True), _MOE, planned=False),
    serves=True,
)
