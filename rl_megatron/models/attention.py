"""Attention of one decoder layer in plain torch: its weights, with their Hugging Face names, and what it computes.

Letters: N tokens, H hidden, Q query heads, K key-value heads, D numbers of a head as
`ModelShape.widest_head` has them: the narrower of key and value ends with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from rl_megatron.models.indexer import index_keys, index_queries
from rl_megatron.models.operations import linear, rms_norm
from rl_megatron.models.rotary import RotaryTables, as_halves, softmax_scale
from rl_megatron.models.shape import LatentAttention, ModelShape


class Context(Protocol):
    """The context before a layer's tokens: the given tokens, and whatever the caller has cached. If it is ``indexed``,
    layers with an indexer call `choose` before they attend."""

    indexed: bool

    def choose(self, layer: int, key: Tensor, queries: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Sets the keys that this layer attends to, and those after it without an indexer. ``key`` [N, D] and what
        ``queries`` returns are those of `models.indexer`; it is called only if a sequence is longer than ``top_k``."""
        ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """``query`` [N, Q, D], ``key`` and ``value`` [N, K, D], all rotated -> [N, Q * D]. ``sinks`` [Q] are logits of
        each head's softmax without a value."""
        ...

    def remember(self, layer: int, x: Tensor, taps: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """The delta rule of a layer with a delta net, of K key heads with R value heads of dv numbers. Channels ``x``
        [N, M], convolved by ``taps`` [M, 1, T], ``decay`` (the logarithm) and ``beta`` [N, K, R] -> [N, K, R, dv]."""
        ...


class Zeros(Protocol):
    """Makes tensors of zeros, in the model's dtype if none is given, on its device."""

    def __call__(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a tensor of ``size``."""
        ...


def score_scale(shape: ModelShape) -> float:
    """Returns the factor of products of queries and keys."""
    return shape.head_dim**-0.5 if shape.latent is None else softmax_scale(shape.head_dim, shape.rope)


class LayerAttention(Protocol):
    """One layer's attention."""

    def named(self) -> dict[str, Tensor]:
        """Its tensors, to write in place, by their names in a layer."""
        ...

    def __call__(
        self, layer: int, residual: Tensor, x: Tensor, angles: tuple[Tensor, Tensor], context: Context
    ) -> Tensor:
        """``residual`` [N, H] plus the attention of ``x`` [N, H], whose positions have ``angles``."""
        ...


class GroupedAttention(LayerAttention):
    """Grouped queries; with biases, norms of queries and keys, sinks and an output gate where the shape has them. Each
    head's rows of ``q_proj`` are then its query, and its gate."""

    def __init__(self, shape: ModelShape, rotary: RotaryTables, zeros: Zeros, eps: Tensor) -> None:
        self._shape, self._rotary, self._eps = shape, rotary, eps
        self._sizes = [heads * shape.head_dim for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
        rows = [self._sizes[0] * (2 if shape.output_gate else 1), *self._sizes[1:]]
        self._rows, self._qkv = rows, zeros(sum(rows), shape.hidden_size)
        self._bias = zeros(sum(rows)) if shape.qkv_bias else None
        self._output = zeros(shape.hidden_size, self._sizes[0])
        self._output_bias = zeros(shape.hidden_size) if shape.out_bias else None
        self._sinks = zeros(shape.num_heads) if shape.sinks else None
        whole = zeros(sum(self._sizes[:2])) if shape.qk_norm == "all" else None
        self._whole_norms = None if whole is None else whole.split(self._sizes[:2])
        self._norms = zeros(2, shape.head_dim) if shape.qk_norm == "head" else None  # query row, key row
        self._norm_of_head = torch.tensor([0] * shape.num_heads + [1] * shape.num_kv_heads, device=eps.device)

    def named(self) -> dict[str, Tensor]:  # noqa: D102
        parts = zip(("q_proj", "k_proj", "v_proj"), self._qkv.split(self._rows), strict=True)
        found = {f"{name}.weight": tensor for name, tensor in parts}
        if self._bias is not None:
            parts = zip(("q_proj", "k_proj", "v_proj"), self._bias.split(self._rows), strict=True)
            found |= {f"{name}.bias": tensor for name, tensor in parts}
        norms = self._whole_norms if self._norms is None else self._norms
        if norms is not None:
            found |= {"q_norm.weight": norms[0], "k_norm.weight": norms[1]}
        found["o_proj.weight"] = self._output
        more = {"o_proj.bias": self._output_bias, "sinks": self._sinks}
        found |= {name: tensor for name, tensor in more.items() if tensor is not None}
        return {f"self_attn.{name}": tensor for name, tensor in found.items()}

    def __call__(  # noqa: D102
        self, layer: int, residual: Tensor, x: Tensor, angles: tuple[Tensor, Tensor], context: Context
    ) -> Tensor:
        num, head_dim, queries = len(x), self._shape.head_dim, self._shape.num_heads
        qkv, gate = linear(x, self._qkv), None
        if self._bias is not None:
            qkv = qkv + self._bias
        if self._shape.output_gate:
            first, second = qkv[:, : self._rows[0]].view(num, queries, 2, head_dim).unbind(2)
            qkv, gate = torch.cat((first.flatten(1), qkv[:, self._rows[0] :]), 1), second.flatten(1).sigmoid()
        qk, value = qkv[:, : -self._sizes[2]], qkv[:, -self._sizes[2] :].view(num, -1, head_dim)
        if self._whole_norms is not None:
            parts = zip(qk.split(self._sizes[:2], 1), self._whole_norms, strict=True)
            qk = torch.cat([rms_norm(part, norm, self._eps) for part, norm in parts], 1)
        qk = qk.view(num, -1, head_dim)
        if self._norms is not None:
            norms = self._norms.index_select(0, self._norm_of_head)
            qk = rms_norm(qk, norms + 1 if self._shape.zero_centered else norms, self._eps)
        qk = self._rotary.rotate(qk, *angles)
        mixed = context.attend(layer, qk[:, :queries], qk[:, queries:], value, self._sinks)
        out = linear(mixed if gate is None else mixed * gate, self._output).add_(residual)
        return out if self._output_bias is None else out.add_(self._output_bias)


class LatentLayer(LayerAttention):
    """Multi-head latent attention, with keys and values of all heads, as training computes it. Layers in
    `shape.Indexer.layers` hold an indexer, which chooses keys where the context is indexed."""

    def __init__(self, shape: ModelShape, rotary: RotaryTables, zeros: Zeros, eps: Tensor, layer: int) -> None:
        assert shape.latent is not None
        self._sizes, self._indexer = shape.indexer, _indexer_tensors(shape, layer, zeros)
        self._latent, self._rotary, self._heads = shape.latent, rotary, shape.num_heads
        self._width, self._key = shape.widest_head, shape.head_dim
        self._eps = torch.full_like(eps, LatentAttention.norm_eps)
        m, hidden, heads = shape.latent, shape.hidden_size, shape.num_heads
        down = [] if m.query_rank is None else [("q_a_proj", m.query_rank, hidden)]
        sizes = {
            **{name: (rows, columns) for name, rows, columns in down},
            "q_proj" if m.query_rank is None else "q_b_proj": (heads * shape.head_dim, m.query_rank or hidden),
            "kv_a_proj_with_mqa": (m.kv_rank + m.rope_dim, hidden),
            "kv_b_proj": (heads * (m.nope_dim + m.value_dim), m.kv_rank),
            "o_proj": (hidden, heads * m.value_dim),
        }
        self._tensors = {f"{name}.weight": zeros(*size) for name, size in sizes.items()}
        self._tensors["kv_a_layernorm.weight"] = zeros(m.kv_rank)
        if m.query_rank is not None:
            self._tensors["q_a_layernorm.weight"] = zeros(m.query_rank)

    def named(self) -> dict[str, Tensor]:  # noqa: D102
        held = {**self._tensors, **{f"indexer.{name}": tensor for name, tensor in self._indexer.items()}}
        return {f"self_attn.{name}": tensor for name, tensor in held.items()}

    def __call__(  # noqa: D102
        self, layer: int, residual: Tensor, x: Tensor, angles: tuple[Tensor, Tensor], context: Context
    ) -> Tensor:
        m, num, heads = self._latent, len(x), self._heads
        of_queries = self._queries_latent(x)
        if self._indexer and context.indexed:
            self._choose(layer, x, of_queries, angles, context)
        up_queries = self._times("q_proj" if m.query_rank is None else "q_b_proj", of_queries)
        still, turning = up_queries.view(num, heads, -1).split([m.nope_dim, m.rope_dim], -1)
        latent, shared = self._times("kv_a_proj_with_mqa", x).split([m.kv_rank, m.rope_dim], -1)
        up = self._times("kv_b_proj", rms_norm(latent, self._tensors["kv_a_layernorm.weight"], self._eps))
        key, value = up.view(num, heads, -1).split([m.nope_dim, m.value_dim], -1)
        turned = self._rotary.rotate(as_halves(torch.cat((turning, shared[:, None]), 1)), *angles)
        query = torch.cat((still, turned[:, :heads]), -1)
        key = torch.cat((key, turned[:, heads:].expand(-1, heads, -1)), -1)
        mixed = context.attend(layer, self._wide(query), self._wide(key), self._wide(value), None)
        return self._times("o_proj", mixed.view(num, heads, -1)[..., : m.value_dim].flatten(1)).add_(residual)

    def _queries_latent(self, x: Tensor) -> Tensor:
        if self._latent.query_rank is None:
            return x
        return rms_norm(self._times("q_a_proj", x), self._tensors["q_a_layernorm.weight"], self._eps)

    def _choose(
        self, layer: int, x: Tensor, of_queries: Tensor, angles: tuple[Tensor, Tensor], context: Context
    ) -> None:
        assert self._sizes is not None
        held, turning = self._indexer, self._latent.rope_dim
        half = (
            angles[0][:, : turning // 2],
            angles[1][:, turning // 2 : turning],
        )  # one head's; its sines keep their sign
        key = index_keys(self._sizes, x, held["wk.weight"], held["k_norm.weight"], held["k_norm.bias"], half)
        weights = held["wq_b.weight"], held["weights_proj.weight"]
        context.choose(layer, key, partial(index_queries, self._sizes, of_queries, x, *weights, half))

    def _times(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self._tensors[f"{name}.weight"])

    def _wide(self, x: Tensor) -> Tensor:
        """Returns the tensor with zeros up to the width that is stored; they change no product."""
        return torch.nn.functional.pad(x, (0, self._width - x.shape[-1])) if x.shape[-1] < self._width else x


def _indexer_tensors(shape: ModelShape, layer: int, zeros: Zeros) -> dict[str, Tensor]:
    """Returns the tensors of a layer's indexer by their names after ``self_attn.indexer.``; none without one."""
    if shape.indexer is None or layer not in shape.indexer.layers:
        return {}
    assert shape.latent is not None
    assert shape.latent.query_rank is not None
    heads, size, hidden = shape.indexer.heads, shape.indexer.head_dim, shape.hidden_size
    return {
        "wq_b.weight": zeros(heads * size, shape.latent.query_rank),
        "wk.weight": zeros(size, hidden),
        "k_norm.weight": zeros(size, dtype=torch.float32),
        "k_norm.bias": zeros(size, dtype=torch.float32),
        "weights_proj.weight": zeros(heads, hidden),
    }
