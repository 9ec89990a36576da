"""Attention of one decoder layer in plain torch: its weights, with their Hugging Face names, and what it computes.

Letters: N tokens, H hidden, Q query heads, K key-value heads, D numbers of a head as
`ModelShape.widest_head` has them: the narrower of key and value ends with zeros.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from rl_megatron.models.linear import linear
from rl_megatron.models.norms import rms_norm
from rl_megatron.models.rotary import RotaryTables, as_halves, softmax_scale
from rl_megatron.models.shape import LatentAttention, ModelShape


class Attend(Protocol):
    """Attention of one layer over the given tokens and whatever the caller has cached."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """``query`` [N, Q, D], ``key`` and ``value`` [N, K, D], all rotated -> [N, Q * D]. ``sinks`` [Q] are logits of
        each head's softmax without a value."""
        ...


class Zeros(Protocol):
    """Makes tensors of zeros, in the model's dtype if none is given, on its device."""

    def __call__(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of ``size``."""
        ...


def score_scale(shape: ModelShape) -> float:
    """What products of queries and keys are multiplied by."""
    return shape.head_dim**-0.5 if shape.latent is None else softmax_scale(shape.head_dim, shape.rope)


class LayerAttention(Protocol):
    """One layer's attention."""

    def named(self) -> dict[str, Tensor]:
        """Its tensors, to write in place, by their names behind ``self_attn.``."""
        ...

    def __call__(
        self, layer: int, residual: Tensor, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """``residual`` [N, H] plus the attention of ``x`` [N, H], whose positions have ``angles``."""
        ...


class GroupedAttention(LayerAttention):
    """Grouped queries; with biases, norms of queries and keys, and sinks where the shape has them."""

    def __init__(self, shape: ModelShape, rotary: RotaryTables, zeros: Zeros, eps: Tensor) -> None:
        self._shape, self._rotary, self._eps = shape, rotary, eps
        self._sizes = [heads * shape.head_dim for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
        self._qkv = zeros(sum(self._sizes), shape.hidden_size)
        self._bias = zeros(sum(self._sizes)) if shape.qkv_bias else None
        self._output = zeros(shape.hidden_size, self._sizes[0])
        self._output_bias = zeros(shape.hidden_size) if shape.out_bias else None
        self._sinks = zeros(shape.num_heads) if shape.sinks else None
        whole = zeros(sum(self._sizes[:2])) if shape.qk_norm == "all" else None
        self._whole_norms = None if whole is None else whole.split(self._sizes[:2])
        self._norms = zeros(2, shape.head_dim) if shape.qk_norm == "head" else None  # query row, key row
        self._norm_of_head = torch.tensor([0] * shape.num_heads + [1] * shape.num_kv_heads, device=eps.device)

    def named(self) -> dict[str, Tensor]:  # noqa: D102
        parts = zip(("q_proj", "k_proj", "v_proj"), self._qkv.split(self._sizes), strict=True)
        found = {f"{name}.weight": tensor for name, tensor in parts}
        if self._bias is not None:
            parts = zip(("q_proj", "k_proj", "v_proj"), self._bias.split(self._sizes), strict=True)
            found |= {f"{name}.bias": tensor for name, tensor in parts}
        norms = self._whole_norms if self._norms is None else self._norms
        if norms is not None:
            found |= {"q_norm.weight": norms[0], "k_norm.weight": norms[1]}
        found["o_proj.weight"] = self._output
        more = {"o_proj.bias": self._output_bias, "sinks": self._sinks}
        return found | {name: tensor for name, tensor in more.items() if tensor is not None}

    def __call__(  # noqa: D102
        self, layer: int, residual: Tensor, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        num, head_dim, queries = len(x), self._shape.head_dim, self._shape.num_heads
        qkv = linear(x, self._qkv)
        if self._bias is not None:
            qkv = qkv + self._bias
        qk, value = qkv[:, : -self._sizes[2]], qkv[:, -self._sizes[2] :].view(num, -1, head_dim)
        if self._whole_norms is not None:
            parts = zip(qk.split(self._sizes[:2], 1), self._whole_norms, strict=True)
            qk = torch.cat([rms_norm(part, norm, self._eps) for part, norm in parts], 1)
        qk = qk.view(num, -1, head_dim)
        if self._norms is not None:
            qk = rms_norm(qk, self._norms.index_select(0, self._norm_of_head), self._eps)
        qk = self._rotary.turned(qk, *angles)
        mixed = attend(layer, qk[:, :queries], qk[:, queries:], value, self._sinks)
        out = linear(mixed, self._output).add_(residual)
        return out if self._output_bias is None else out.add_(self._output_bias)


class LatentLayer(LayerAttention):
    """Multi-head latent attention, with keys and values of all heads, as training computes it."""

    def __init__(self, shape: ModelShape, rotary: RotaryTables, zeros: Zeros, eps: Tensor) -> None:
        assert shape.latent is not None
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
        return self._tensors

    def __call__(  # noqa: D102
        self, layer: int, residual: Tensor, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        m, num, heads = self._latent, len(x), self._heads
        still, turning = self._queries(x).view(num, heads, -1).split([m.nope_dim, m.rope_dim], -1)
        latent, shared = self._times("kv_a_proj_with_mqa", x).split([m.kv_rank, m.rope_dim], -1)
        up = self._times("kv_b_proj", rms_norm(latent, self._tensors["kv_a_layernorm.weight"], self._eps))
        key, value = up.view(num, heads, -1).split([m.nope_dim, m.value_dim], -1)
        turned = self._rotary.turned(as_halves(torch.cat((turning, shared[:, None]), 1)), *angles)
        query = torch.cat((still, turned[:, :heads]), -1)
        key = torch.cat((key, turned[:, heads:].expand(-1, heads, -1)), -1)
        mixed = attend(layer, self._wide(query), self._wide(key), self._wide(value), None)
        return self._times("o_proj", mixed.view(num, heads, -1)[..., : m.value_dim].flatten(1)).add_(residual)

    def _queries(self, x: Tensor) -> Tensor:
        if self._latent.query_rank is None:
            return self._times("q_proj", x)
        latent = rms_norm(self._times("q_a_proj", x), self._tensors["q_a_layernorm.weight"], self._eps)
        return self._times("q_b_proj", latent)

    def _times(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self._tensors[f"{name}.weight"])

    def _wide(self, x: Tensor) -> Tensor:
        """With zeros up to the width that is stored; they change no product."""
        return torch.nn.functional.pad(x, (0, self._width - x.shape[-1])) if x.shape[-1] < self._width else x


def held_indexer(shape: ModelShape, layer: int, zeros: Zeros) -> dict[str, Tensor]:
    """The tensors of a layer's indexer (`shape.Indexer`) by their names behind ``self_attn.indexer.``."""
    if shape.indexer is None or layer not in shape.indexer.layers:
        return {}
    assert shape.latent is not None
    assert shape.latent.query_rank is not None
    heads, size, hidden = shape.indexer.heads, shape.indexer.head_dim, shape.hidden_size
    return {
        "wq_b.weight": zeros(heads * size, shape.latent.query_rank),
        "wk.weight": zeros(size, hidden),
        "k_norm.weight": zeros(size),
        "k_norm.bias": zeros(size),
        "weights_proj.weight": zeros(heads, hidden),
    }
