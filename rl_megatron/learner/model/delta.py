"""A decoder layer's gated delta net over packed sequences, with TP and CP.

Packed sequences are cut into chunks, with room before each for a convolution; the gated delta rule takes a chunk at a
time. Between its linears the net keeps nothing but their output and input, and computes the rest again in the
backward pass: the chunks' states and products take tens of times as many bytes, and a small part of a layer's
products.

TP cuts it between key heads, with their value heads. Under CP ranks exchange positions for heads: each then has the
whole sequences of its share of its TP rank's heads, and the parameters of these.
Letters: T positions, n chunks of C, K key heads with R value heads each, dk and dv their sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.layers import RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from rl_megatron.learner.model.attention import DecoderConfig, HeadShardedModule, parameter_device
from rl_megatron.learner.model.kernels import from_slots, into_slots, rms_norm
from rl_megatron.learner.model.layers import NormColumnLinear
from rl_megatron.learner.packed import PackedAttentionParams, Slots
from rl_megatron.models.delta import attend_chunks
from rl_megatron.models.shape import DeltaNet, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The chunks of all sequences: their first ones, then their second ones, and so on, longest sequences first.

    So the n-th chunks follow the first ``counts[n]`` of the (n - 1)-th, and no chunk has two sequences. ``slots`` maps
    the T positions to the chunks' positions; the last chunk of a sequence repeats its last position. ``place`` [T] is
    each position's place among all where ``gap`` empty ones stand before each sequence, in ``places``.
    """

    counts: tuple[int, ...]
    size: int
    slots: Slots
    place: Tensor
    places: int
    gap: int


def cut_into_chunks(starts: Tensor, *, gap: int, size: int = DeltaNet.chunk) -> Chunks:
    """``starts`` [S + 1] are cumulative lengths, on any device; the answer is on theirs."""
    device, starts = starts.device, starts.to("cpu", torch.int64)
    lengths = starts.diff()
    order = torch.argsort(lengths, descending=True, stable=True)
    of_sequence = (lengths[order] + size - 1) // size
    step = torch.repeat_interleave(torch.ones_like(of_sequence).cumsum(0) - 1, of_sequence)  # rank of its sequence
    first = torch.repeat_interleave(of_sequence.cumsum(0) - of_sequence, of_sequence)
    number = torch.arange(len(step)) - first
    by_number = torch.argsort(number, stable=True)
    sequence, number = order[step[by_number]], number[by_number]
    inside = number[:, None] * size + torch.arange(size)
    length = lengths[sequence, None]
    row = (starts[sequence, None] + torch.minimum(inside, length - 1)).flatten()
    real = (inside < length).flatten()
    slot = torch.empty(int(starts[-1]), dtype=torch.int64)
    slot[row[real]] = torch.nonzero(real).squeeze(1)
    slots = Slots(row=row.to(device), slot=slot.to(device), padding=torch.nonzero(~real).squeeze(1).to(device))
    own = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), lengths)
    place = torch.arange(len(own)) + gap * own
    counts = tuple(torch.bincount(number).tolist())
    places = len(own) + gap * len(lengths)
    return Chunks(counts=counts, size=size, slots=slots, place=place.to(device), places=places, gap=gap)


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, chunks: Chunks) -> Tensor:
    """Returns [T, K, R, dv] in float32 or more, by `attend_chunks`. query and key are [T, K, dk], value [T, K, R, dv],
    decay (the logarithm, at most 0) and beta [T, K, R]."""
    q, k, v = (_laid_out(x, chunks).movedim(1, -2) for x in (query, key, value))
    g, b = (_laid_out(x, chunks).movedim(1, -1) for x in (decay, beta))
    out, _ = attend_chunks(q, k, v, g, b, chunks.counts)  # [n, K, R, C, dv]
    return from_slots(out.permute(0, 3, 1, 2, 4).flatten(0, 1), chunks.slots)


def _laid_out(x: Tensor, chunks: Chunks) -> Tensor:
    """[T, ...] -> [n, C, ...], at least float32."""
    wide = x if x.dtype == torch.float64 else x.float()
    out: Tensor = into_slots(wide, chunks.slots).unflatten(0, (-1, chunks.size))
    return out


def convolve(x: Tensor, weight: Tensor, chunks: Chunks) -> Tensor:
    """Each channel of [T, c] over the last positions of its sequence, by ``weight`` [c, 1, gap + 1]; then silu."""
    padded = x.new_zeros(chunks.places, x.shape[1]).index_copy(0, chunks.place, x)
    out = F.conv1d(padded.t()[None], weight, groups=len(weight))[0].t()
    return F.silu(out.index_select(0, chunks.place - chunks.gap))


class CutParameter(HeadShardedModule):
    """``weight``, cut by TP along its first dimension."""

    def __init__(self, config: DecoderConfig, *size: int) -> None:
        super().__init__()
        self.weight = _cut(config, *size)


class HeadNorm(torch.nn.Module):
    """``weight`` [dv] of the norm of every value head, which all ranks hold; its gradients are summed over TP."""

    def __init__(self, config: DecoderConfig, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=parameter_device(config)))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class GatedDeltaNet(MegatronModule):
    """The delta net of one layer, with the norm before it; needs ``shape.delta``."""

    def __init__(
        self,
        config: DecoderConfig,
        layer_number: int,
        *,
        shape: ModelShape,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert shape.delta is not None
        self.layer_number, self.sizes, self.eps = layer_number, shape.delta, shape.norm_eps
        self.cp = pg_collection.cp if config.context_parallel_size > 1 else None
        m, tp = self.sizes, pg_collection.tp.size()
        options: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "tp_group": pg_collection.tp,
        }
        self.in_proj = NormColumnLinear(shape.hidden_size, m.inputs, gather_output=False, **options)
        self.conv1d = CutParameter(config, m.mixed // tp, 1, m.kernel)
        self.A_log = _cut(config, m.value_heads // tp)
        self.dt_bias = _cut(config, m.value_heads // tp)
        self.out_norm = HeadNorm(config, m.value_dim)
        self.out_proj = RowParallelLinear(
            m.outputs, shape.hidden_size, input_is_parallel=True, skip_bias_add=True, **options
        )

    def forward(
        self, hidden: Tensor, *_: Any, packed_seq_params: PackedAttentionParams, **__: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[t / tp, 1, h] -> ([t / tp, 1, h], None)."""
        chunks = self._chunks(packed_seq_params)
        projected, _none = self.in_proj(hidden)
        x = projected[:, 0]
        if self.cp is not None:
            x = self._positions_for_heads(x)[packed_seq_params.gathered]
        mixed: Tensor = checkpoint(partial(self._remember, chunks), False, x)
        if self.cp is not None:
            mixed = self._heads_for_positions(mixed[packed_seq_params.gathered.argsort()])
        out: tuple[Tensor, Tensor | None] = self.out_proj(mixed[:, None])
        return out

    def _chunks(self, packed: PackedAttentionParams) -> Chunks:
        if not isinstance(packed.chunks, Chunks):
            packed.chunks = cut_into_chunks(packed.cu_seqlens_q, gap=self.sizes.kernel - 1)
        return packed.chunks

    def _remember(self, chunks: Chunks, x: Tensor) -> Tensor:
        """[T, inputs of this rank's heads] -> [T, their outputs]."""
        m, heads = self.sizes, x.shape[1] * self.sizes.key_heads // self.sizes.inputs
        values, convolved = m.ratio * m.value_dim, m.mixed // m.key_heads
        given, gate, beta, step = x.view(len(x), heads, -1).split([convolved, values, m.ratio, m.ratio], -1)
        taps, log_rate, bias = (self._own(part) for part in (self.conv1d.weight, self.A_log, self.dt_bias))
        given = convolve(given.flatten(1), taps, chunks).view(len(x), heads, -1)
        query, key, value = given.split([m.key_dim, m.key_dim, values], -1)
        rate, bias = log_rate.float().exp().view(heads, -1), bias.float().view(heads, -1)
        decay = -rate * F.softplus(step.float() + bias)
        value = value.unflatten(-1, (m.ratio, m.value_dim))
        out = gated_delta_rule(query, key, value, decay, beta.sigmoid(), chunks).to(x.dtype)
        normed = rms_norm(out, self.out_norm.weight, self.eps)
        return (normed * F.silu(gate.float()).view_as(normed)).to(x.dtype).flatten(1)

    def _own(self, parameter: Tensor) -> Tensor:
        """Returns the part of this rank's key heads: all of the TP rank's, or its share under CP."""
        if self.cp is None:
            return parameter
        share: Tensor = parameter.chunk(self.cp.size())[self.cp.rank()]
        return share

    def _positions_for_heads(self, x: Tensor) -> Tensor:
        """[t, columns] -> [T, columns / cp], ranks' positions one after the other."""
        assert self.cp is not None
        by_rank = x.unflatten(1, (self.cp.size(), -1)).transpose(0, 1)  # contiguous for the exchange
        out: Tensor = all_to_all(self.cp, by_rank.contiguous())
        return out.flatten(0, 1)

    def _heads_for_positions(self, x: Tensor) -> Tensor:
        """Returns the inverse: [T, columns / cp] -> [t, columns]."""
        assert self.cp is not None
        by_heads: Tensor = all_to_all(self.cp, x.contiguous().unflatten(0, (self.cp.size(), -1)))
        return by_heads.transpose(0, 1).flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Its parts', and the parameters of its own as global tensors over all heads, sharded over TP."""
        out: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own = {name: parameter for name, parameter in self._parameters.items() if parameter is not None}
        out |= make_sharded_tensors_for_checkpoint(own, prefix, dict.fromkeys(own, 0), sharded_offsets)
        return out


def _cut(config: DecoderConfig, *size: int) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.empty(size, dtype=config.params_dtype, device=parameter_device(config)))
    set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter


def delta_net_spec(shape: ModelShape) -> ModuleSpec:
    """The delta net in place of self-attention in layers of ``shape.delta_layers``. Its input norm is a part of it."""
    return ModuleSpec(module=GatedDeltaNet, params={"shape": shape})
