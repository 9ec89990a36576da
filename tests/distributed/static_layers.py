"""Decoder layers whose attention has the same shapes for all lengths, as TransformerEngine's kernels do: it reads
megatron's packed parameters alone, and waits for nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from rl_megatron.learner.model.attention import PackedAttention
from rl_megatron.learner.model.kernels import rotate
from rl_megatron.learner.model.layers import torch_layer_spec
from rl_megatron.models.shape import ModelShape


class StaticAttention(PackedAttention):
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: PackedSeqParams, **__: Any
    ) -> Tensor:
        ends = packed_seq_params.cu_seqlens_q
        place = torch.arange(len(query))
        sequence = torch.searchsorted(ends[1:].contiguous(), place.int(), right=True)
        angle = (place - ends[sequence])[:, None].float() * self.inverse_frequency
        turns = angle.cos()[:, None] * self.rotary_factor, angle.sin()[:, None] * self.rotary_factor
        seen = (sequence[:, None] == sequence) & (place[:, None] >= place)
        q, k, v = (x.transpose(0, 1)[None] for x in (rotate(query, *turns), rotate(key, *turns), value))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


def static(shape: ModelShape, layer: int) -> ModuleSpec:
    spec = torch_layer_spec(shape, layer)
    spec.submodules.self_attention.submodules.core_attention = StaticAttention
    return spec
