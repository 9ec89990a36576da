"""Attention over packed sequences in torch: rotary embeddings, grouped queries, windows, sinks, TP and CP; and
megatron's configuration of a decoder with what it and our other layers read, the model's shape and an option."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from rl_megatron.learner.model.kernels import faster_attention, from_slots, into_slots, rotate
from rl_megatron.learner.model.sparse import attend_chosen, class_rows
from rl_megatron.learner.packed import LengthClass, PackedAttentionParams
from rl_megatron.models.rotary import inverse_frequencies
from rl_megatron.models.shape import ModelShape

_LANE = 8  # fast attention kernels need head dimensions that are multiples of it


@dataclass
class DecoderConfig(TransformerConfig):
    """Megatron's configuration, and the shape that it was made from."""

    shape: ModelShape = None  # type: ignore[assignment]  # megatron's fields before it have defaults
    recompute_up_projections: bool = False
    """True if our latent attention discards queries, keys and values, and projects them again in the backward pass."""


@dataclass
class LatentDecoderConfig(DecoderConfig, MLATransformerConfig):
    """Adds the options of megatron's own latent attention, which only its TransformerEngine layers use."""


def parameter_device(config: TransformerConfig) -> torch.device:
    """Returns the device that parameters are created on."""
    return torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())


class HeadShardedModule(torch.nn.Module):
    """Its own parameters are cut by TP along their first dimension; what its parts hold is whole on all ranks."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns global tensors over all heads, its own sharded over TP."""
        state, cut = self.state_dict(prefix="", keep_vars=True), dict.fromkeys(self._parameters, 0)
        out: dict[str, Any] = make_sharded_tensors_for_checkpoint(state, prefix, cut, sharded_offsets)
        return out


class PackedAttention(HeadShardedModule, MegatronModule):
    """Rotary embedding and causal attention over packed sequences with torch SDPA; GQA, TP (its share of heads), CP.

    One padded call attends sequences of similar length (packed.py), so the number of calls stays small.
    Under CP each rank gathers keys and values (backward: reduce-scatter) and attends its own zig-zag chunks. Sinks are
    ``softmax_offset`` [heads / tp], as in megatron's DotProductAttention.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer_number: int,
        *_: Any,
        softmax_scale: float | None = None,
        pg_collection: Any,
        **__: Any,
    ) -> None:
        super().__init__(config=config)
        shape = config.shape
        self.cp = pg_collection.cp if config.context_parallel_size > 1 else None
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.window = shape.windows[layer_number - 1] if shape.windows else 0
        self.rotary_factor = shape.rope.attention_factor
        self.inverse_frequency = inverse_frequencies(
            shape.rope_theta, shape.rotary_dim, shape.rope, parameter_device(config)
        )
        self.softmax_offset: torch.nn.Parameter | None = None
        if shape.sinks:
            heads = shape.num_heads // pg_collection.tp.size()
            offset = torch.empty(heads, dtype=config.params_dtype, device=parameter_device(config))
            self.softmax_offset = torch.nn.Parameter(offset)
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: PackedAttentionParams, **__: Any
    ) -> Tensor:
        """query [t, h, d], key and value [t, g, d] -> [t, h * d]."""
        packed = packed_seq_params
        if packed.rotary is None:
            angle = packed.positions[:, None].float() * self.inverse_frequency
            packed.rotary = angle.cos()[:, None] * self.rotary_factor, angle.sin()[:, None] * self.rotary_factor
        return self.attend(rotate(query, *packed.rotary), rotate(key, *packed.rotary), value, packed)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedAttentionParams) -> Tensor:
        """Attends as ``forward``, with queries and keys already rotated; values may have another width."""
        return self.attend_laid_out(*self.lay_out(query, key, value, packed), packed)

    def lay_out(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedAttentionParams
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gathers keys and values over CP, and pads all three for `attend_laid_out`: [t, heads, d] -> [slots, ...]."""
        if self.cp is not None:
            joined = torch.cat([key, value], -1).contiguous()
            widths = [key.shape[-1], value.shape[-1]]
            key, value = gather_from_sequence_parallel_region(joined, group=self.cp).split(widths, -1)
        if packed.queries is not None:
            query = into_slots(query, packed.queries)
        if packed.keys is not None:
            key, value = into_slots(key, packed.keys), into_slots(value, packed.keys)
        return query, key, value

    def attend_laid_out(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedAttentionParams, chosen: Tensor | None = None
    ) -> Tensor:
        """Attends what `lay_out` returns -> [t, h * d]. Classes with more positions than ``chosen`` [t, top_k] has keys
        attend to these (`PackedAttentionParams.chosen`)."""
        output = self._attend(query, key, value, packed, chosen)
        return output if packed.queries is None else from_slots(output, packed.queries)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedAttentionParams, chosen: Tensor | None
    ) -> Tensor:
        """Attends the slots of all classes, with one call a class -> [slots, h * d]."""
        classes = packed.classes
        queries = _split(query, [c.count * c.query_length for c in classes])
        keys, values = (_split(x, [c.count * c.key_length for c in classes]) for x in (key, value))
        outputs = []
        for number, (part, *qkv) in enumerate(zip(classes, queries, keys, values, strict=True)):
            q, k, v = (x.unflatten(0, (part.count, -1)) for x in qkv)
            if chosen is None or part.key_length <= chosen.shape[-1]:
                out = self._attend_class(q, k, v, part)
            else:
                out = attend_chosen(q, k, v, chosen, class_rows(packed)[number], self.scale)
            outputs.append(out.flatten(2).flatten(0, 1))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _attend_class(self, query: Tensor, key: Tensor, value: Tensor, part: LengthClass) -> Tensor:
        """[count, query_length, h, d] -> the same, with the values' width."""
        plain = self.cp is None and not 0 < self.window < part.key_length
        mask = None if plain else part.visible(self.window)
        if mask is None and self.softmax_offset is None and (faster := faster_attention(query, part.key_length)):
            return faster(query, key, value, self.scale)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if self.softmax_offset is not None:
            return self._attend_with_sinks(q, k, v, part, self.softmax_offset).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2)

    def _attend_with_sinks(self, query: Tensor, key: Tensor, value: Tensor, part: LengthClass, sinks: Tensor) -> Tensor:
        """Adds the sink as a last key that all queries see and whose value is 0.

        It takes an extra dimension: queries hold the head's logit over the scale there, the sink 1, other keys 0.
        """
        size = query.shape[-1]
        logit = (sinks / self.scale)[None, :, None, None].to(query.dtype)
        query = F.pad(torch.cat([query, logit.expand(*query.shape[:-1], 1)], -1), (0, _LANE - 1))
        key, value = (F.pad(x, (0, _LANE, 0, 1)) for x in (key, value))
        key[..., -1, size] = 1
        mask = F.pad(part.visible(self.window), (0, 1), value=True)
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=self.scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out[..., :size]


class AllHeadsAttention(SelfAttention):
    """Megatron's attention with MiniMax-M2's norms of queries and keys.

    They are no submodules of its spec: megatron-core 0.19 takes norms from there only with ``qk_layernorm``, which also
    has it sum their gradients over TP, where these are sharded.
    """

    def __init__(self, config: DecoderConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        size, eps, shape = config.kv_channels, config.layernorm_epsilon, config.shape
        self.q_layernorm = FullWidthNorm(config, size, eps, num_heads=shape.num_heads)
        self.k_layernorm = FullWidthNorm(config, size, eps, num_heads=shape.num_kv_heads)


class FullWidthNorm(HeadShardedModule):
    """The RMS norm of all heads of q or k together (MiniMax-M2, OLMoE); ``weight`` [heads * d / tp] cut as heads."""

    def __init__(self, config: DecoderConfig, hidden_size: int, eps: float, *, num_heads: int) -> None:
        super().__init__()
        self.eps, self.size, self.parallel = eps, num_heads * hidden_size, config.tensor_model_parallel_size > 1
        local = self.size // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(local, dtype=config.params_dtype, device=parameter_device(config)))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, heads / tp, d] -> the same. Every TP rank calls it."""
        wide = x.float()
        squares = wide.square().sum((-2, -1), keepdim=True)
        if self.parallel:  # each rank's output depends on the sum over all, so the gradient is summed too
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        normed = wide * (squares / self.size + self.eps).rsqrt()
        return normed.to(x.dtype) * self.weight.view(x.shape[-2:])


def _split(x: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    return x.split(sizes) if len(sizes) > 1 else [x]  # one part needs no copy in the backward
