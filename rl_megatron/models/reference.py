"""A plain-torch Qwen3-MoE decoder for inference: the in-process rollout engine's model and a numerical oracle.

The storage is fused for speed; `ReferenceModel.tensors` names every Hugging Face tensor as a view of it. No
autograd, no process group. The caller chooses the attention: `hidden` runs the layers on a flat list of tokens
and hands queries, keys and values to an `Attend` (`CausalAttention` for whole sequences, `kv_cache.KVCache` for
one new token a sequence). Architecture: transformers/models/qwen3_moe/modeling_qwen3_moe.py.

Letters: N tokens, H hidden, V vocabulary, Q query heads, K key-value heads, D head size, E experts, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rl_megatron.models.experts import PackedExperts, choose_experts, mix_experts
from rl_megatron.models.linear import linear
from rl_megatron.models.shape import ModelShape


class Attend(Protocol):
    """Attention of one layer over the given tokens and whatever the caller has cached."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``query`` [N, Q, D], ``key`` and ``value`` [N, K, D], all rotated -> [N, Q * D]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer's fused storage."""

    input_norm: Tensor  # [H]
    qkv: Tensor  # [(Q + 2K) * D, H]
    qk_norm: Tensor  # [2, D]: query row, key row
    output: Tensor  # [H, Q * D]
    expert_norm: Tensor  # [H]
    router: Tensor  # [E, H]
    w13: Tensor  # [E, 2I, H]: gate rows, then up rows
    w2: Tensor  # [E, H, I], a transposed view of [H, E, I] so that all experts are also one [H, E * I] matrix


class ReferenceModel:
    """Weights and forward pass of one decoder. The weights start as zeros: fill ``tensors`` in place before a run.

    ``tensors`` has the names, shapes and values of transformers' `save_pretrained`; ``down_proj`` views are strided,
    the others contiguous. With tied embeddings there is no ``lm_head.weight``, as in such a checkpoint.
    """

    def __init__(self, shape: ModelShape, *, dtype: torch.dtype, device: torch.device | str, max_length: int) -> None:
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        self.embedding = self._zeros(shape.vocab_size, shape.hidden_size)
        self.final_norm = self._zeros(shape.hidden_size)
        self.head = self.embedding if shape.tie_embeddings else self._zeros(shape.vocab_size, shape.hidden_size)
        self.layers = [self._new_layer() for _ in range(shape.num_layers)]
        self.tensors = self._name_tensors()
        self._packed: list[PackedExperts | None] = [None] * shape.num_layers
        self._packed_is_current = False
        heads = torch.tensor([0] * shape.num_heads + [1] * shape.num_kv_heads, device=self.device)
        self._norm_row_of_head = heads
        # One row of all heads per position: broadcasting over heads costs more than the product.
        self._cos, self._sin = (
            table.repeat(1, len(heads)) for table in _rotary_tables(shape, max_length, dtype, self.device)
        )
        self._eps = torch.tensor(shape.norm_eps, dtype=torch.float32, device=self.device)

    @contextmanager
    def packed(self) -> Iterator[None]:
        """Makes experts' products faster inside the block, if the CPU supports it; no weight may be written there."""
        if PackedExperts.usable(self.embedding):
            # One at a time over those of the last call, so that each is given the memory of the one before.
            for index, layer in enumerate(self.layers):
                self._packed[index] = PackedExperts(layer.w13, layer.w2)
            self._packed_is_current = True
        try:
            yield
        finally:
            self._packed_is_current = False

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        routes: Tensor | None = None,
        noise: Callable[[int], Tensor] | None = None,
    ) -> Tensor:
        """Final-normed states [N, H] of ``tokens`` [N] int64 at ``positions`` [N] int64 in their own sequences.

        If ``routes`` [N, layers, k] is given, it receives the experts that each layer chose. What ``noise`` says of a
        layer's number, [N, E], is added to its router's logits.
        """
        x = self.embedding.index_select(0, tokens)
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        for index, weights in enumerate(self.layers):
            x = self._attention(index, weights, x, cos, sin, attend)
            normed = rms_norm(x, weights.expert_norm, self._eps)
            router_logits = functional.linear(normed, weights.router)
            if noise is not None:
                router_logits = router_logits.float() + noise(index)
            chosen, shares = choose_experts(
                router_logits,
                experts_per_token=self.shape.experts_per_token,
                normalize=self.shape.normalize_top_k,
            )
            if routes is not None:
                routes[:, index] = chosen
            packed = self._packed[index] if self._packed_is_current else None
            x = mix_experts(x, normed, chosen, shares, weights.w13, weights.w2, packed)
        return rms_norm(x, self.final_norm, self._eps)

    def project(self, hidden: Tensor) -> Tensor:
        """Next-token logits [N, V] float32 of final-normed states [N, H]."""
        return linear(hidden, self.head).float()

    @torch.inference_mode()
    def logits(self, input_ids: Tensor) -> Tensor:
        """Logits [B, L, V] float32 of whole sequences [B, L] int64, by a plain causal forward without a cache."""
        rows, length = input_ids.shape
        attend = CausalAttention([length] * rows, shape=self.shape, device=self.device)
        hidden = self.hidden(input_ids.reshape(-1), attend.positions, attend)
        return self.project(hidden).view(rows, length, -1)

    def _attention(
        self, index: int, weights: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> Tensor:
        shape, num = self.shape, len(x)
        heads, head_dim = shape.num_heads + shape.num_kv_heads, shape.head_dim
        qkv = linear(rms_norm(x, weights.input_norm, self._eps), weights.qkv)
        qk = qkv[:, : heads * head_dim].view(num, heads, head_dim)
        qk = rms_norm(qk, weights.qk_norm.index_select(0, self._norm_row_of_head), self._eps)
        # rotate_half: the halves swap places; the minus sign of the first half is in the table of sines.
        swapped = qk.roll(head_dim // 2, -1).view(num, -1)
        qk = (qk.view(num, -1) * cos).addcmul_(swapped, sin).view(num, heads, head_dim)
        value = qkv[:, heads * head_dim :].view(num, shape.num_kv_heads, head_dim)
        mixed = attend(index, qk[:, : shape.num_heads], qk[:, shape.num_heads :], value)
        return linear(mixed, weights.output).add_(x)

    def _zeros(self, *size: int) -> Tensor:
        return torch.zeros(size, dtype=self.dtype, device=self.device)

    def _new_layer(self) -> LayerWeights:
        s, zeros = self.shape, self._zeros
        return LayerWeights(
            input_norm=zeros(s.hidden_size),
            qkv=zeros((s.num_heads + 2 * s.num_kv_heads) * s.head_dim, s.hidden_size),
            qk_norm=zeros(2, s.head_dim),
            output=zeros(s.hidden_size, s.num_heads * s.head_dim),
            expert_norm=zeros(s.hidden_size),
            router=zeros(s.num_experts, s.hidden_size),
            w13=zeros(s.num_experts, 2 * s.expert_width, s.hidden_size),
            w2=zeros(s.hidden_size, s.num_experts, s.expert_width).transpose(0, 1),
        )

    def _name_tensors(self) -> dict[str, Tensor]:
        s = self.shape
        named = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.final_norm}
        if not s.tie_embeddings:
            named["lm_head.weight"] = self.head
        for index, w in enumerate(self.layers):
            query, key, value = w.qkv.split([n * s.head_dim for n in (s.num_heads, s.num_kv_heads, s.num_kv_heads)])
            local = {
                "input_layernorm.weight": w.input_norm,
                "post_attention_layernorm.weight": w.expert_norm,
                "self_attn.q_proj.weight": query,
                "self_attn.k_proj.weight": key,
                "self_attn.v_proj.weight": value,
                "self_attn.o_proj.weight": w.output,
                "self_attn.q_norm.weight": w.qk_norm[0],
                "self_attn.k_norm.weight": w.qk_norm[1],
                "mlp.gate.weight": w.router,
            }
            for e in range(s.num_experts):
                local[f"mlp.experts.{e}.gate_proj.weight"] = w.w13[e, : s.expert_width]
                local[f"mlp.experts.{e}.up_proj.weight"] = w.w13[e, s.expert_width :]
                local[f"mlp.experts.{e}.down_proj.weight"] = w.w2[e]
            named.update({f"model.layers.{index}.{name}": tensor for name, tensor in local.items()})
        return named


class CausalAttention:
    """Causal attention inside each of P whole sequences, given as one flat list of N tokens without padding.

    ``positions`` [N] counts from 0 in each sequence. With ``keep`` (a dtype), it stores every layer's rotated keys and
    values in ``kept`` [2 * layers, P, longest, K, D]: all keys, then all values; each sequence at the END of its row,
    with zeros before it.
    """

    def __init__(
        self, lengths: Sequence[int], *, shape: ModelShape, device: torch.device, keep: torch.dtype | None = None
    ) -> None:
        counts = torch.tensor(lengths, device=device)
        self._num, self._longest = len(lengths), max(lengths)
        columns = torch.arange(self._longest, device=device)
        inside = columns < counts[:, None]
        self.positions = columns.expand_as(inside)[inside]
        self._from_start = inside.view(-1).nonzero().view(-1)
        self._from_end = (columns >= self._longest - counts[:, None]).view(-1).nonzero().view(-1)
        size = (2 * shape.num_layers if keep else 0, self._num, self._longest, shape.num_kv_heads, shape.head_dim)
        self.kept = torch.zeros(size, dtype=keep, device=device)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend among the N tokens (an `Attend`)."""
        if len(self.kept):
            self.kept[layer].flatten(0, 1).index_copy_(0, self._from_end, key)
            self.kept[layer + len(self.kept) // 2].flatten(0, 1).index_copy_(0, self._from_end, value)
        # Padding stands behind each sequence, where no earlier query looks: causality is all the mask it needs.
        q, k, v = (self._pad(x).transpose(1, 2) for x in (query, key, value))
        mixed: Tensor = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1).index_select(0, self._from_start)

    def _pad(self, flat: Tensor) -> Tensor:
        """[N, heads, D] -> [P, longest, heads, D]."""
        padded = flat.new_zeros(self._num, self._longest, *flat.shape[1:])
        padded.flatten(0, 1).index_copy_(0, self._from_start, flat)
        return padded


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """Root-mean-square norm over the last dimension, the mean in float32 (Zhang and Sennrich, 2019); ``eps`` []."""
    # vector_norm reads x once; torch's own rms_norm makes three passes on CPU.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
    normed: Tensor = (x * scale).to(x.dtype).mul_(weight)
    return normed


def _rotary_tables(shape: ModelShape, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines, each [length, D]; the first half of the sines is negated (see `_attention`)."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), 1.0 / shape.rope_theta**exponents)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)
