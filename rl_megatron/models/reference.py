"""A plain-torch decoder of any family for inference: the in-process rollout engine's model and a numerical oracle.

The storage is fused for speed; `DecoderModel.tensors` names every Hugging Face tensor as a view of it. No
autograd, no process group. The caller chooses the attention: `hidden` runs the layers on a flat list of tokens
with what they have before them, a `Context` (`FullAttention`, or `kv_cache.KVCache` for one new token a sequence).
Architectures: transformers/models/*/modeling_*.py.

Letters: N tokens, H hidden, V vocabulary, Q query heads, K key-value heads, D a head's numbers
(`ModelShape.widest_head`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rl_megatron.models.attention import (
    Context,
    GroupedAttention,
    LatentLayer,
    LayerAttention,
    score_scale,
)
from rl_megatron.models.delta import DeltaLayer, DeltaStates, remember_whole
from rl_megatron.models.experts import ClampedExperts, DenseMlp, ExpertMlp, GatedExperts
from rl_megatron.models.indexer import choose_keys
from rl_megatron.models.kv_cache import PrefixCache, index_key_zeros
from rl_megatron.models.operations import Norm, linear
from rl_megatron.models.rotary import RotaryTables
from rl_megatron.models.shape import DecoderNames, ExpertNames, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One layer; its norms are before its parts."""

    input_norm: Norm
    attention: LayerAttention
    mlp_norm: Norm
    mlp: DenseMlp | ExpertMlp

    def named(self) -> dict[str, Tensor]:
        """Its tensors, to write in place, by their names in a layer."""
        return {
            "input_layernorm.weight": self.input_norm.weight,
            "post_attention_layernorm.weight": self.mlp_norm.weight,
            **self.attention.named(),
            **self.mlp.named(),
        }


class DecoderModel:
    """Weights and forward pass of one decoder. The weights start as zeros: fill ``tensors`` in place before a run.

    ``tensors`` has the names, shapes and values of transformers' `save_pretrained`, by ``names`` and ``decoder``; views
    of ``down_proj`` of experts are strided, the others contiguous. With tied embeddings there is no ``lm_head.weight``,
    as in such a checkpoint.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        max_length: int,
        names: ExpertNames | None = None,
        decoder: DecoderNames | None = None,
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        self.embedding = self._zeros(shape.vocab_size, shape.hidden_size)
        self.head = self.embedding if shape.tie_embeddings else self._zeros(shape.vocab_size, shape.hidden_size)
        self._eps = torch.tensor(shape.norm_eps, dtype=torch.float32, device=self.device)
        self.final_norm = self._new_norm()
        latent = shape.latent
        self._rotary = RotaryTables(
            shape,
            heads=shape.num_heads + (1 if latent else shape.num_kv_heads),  # all latent heads share a turning key
            width=latent.rope_dim if latent else shape.head_dim,
            length=max_length,
            dtype=dtype,
            device=self.device,
        )
        self._decoder = decoder or DecoderNames()
        self.layers = [self._new_layer(index, names or ExpertNames()) for index in range(shape.num_layers)]
        self.tensors = self._name_tensors()

    @contextmanager
    def packed(self) -> Iterator[None]:
        """Makes experts' products faster inside the block, if the CPU supports it; no weight may be written there."""
        gated = [layer.mlp for layer in self.layers if isinstance(layer.mlp, GatedExperts)]
        # One at a time over those of the last call, so that each is given the memory of the one before.
        for experts in gated:
            experts.pack()
        try:
            yield
        finally:
            for experts in gated:
                experts.unpack()

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        context: Context,
        routes: Tensor | None = None,
        noise: Callable[[int], Tensor] | None = None,
    ) -> Tensor:
        """Returns final-normed states [N, H] of ``tokens`` [N] int64 at ``positions`` [N] int64 in their own sequences.

        If ``routes`` [N, layers with experts, k] is given, it receives the experts that each layer chose. The result
        [N, E] of ``noise`` for a layer's number is added to its router's logits.
        """
        x = self.embedding.index_select(0, tokens)
        angles, first = self._rotary.cos_sin(positions), self.shape.moe_layers.start
        for index, layer in enumerate(self.layers):
            x = layer.attention(index, x, layer.input_norm(x), angles, context)
            normed = layer.mlp_norm(x)
            if isinstance(layer.mlp, DenseMlp):
                x = layer.mlp(x, normed)
                continue
            x, chosen = layer.mlp(x, normed, None if noise is None else noise(index))
            if routes is not None:
                routes[:, index - first] = chosen
        return self.final_norm(x)

    def project(self, hidden: Tensor) -> Tensor:
        """Returns next-token logits [N, V] float32 of final-normed states [N, H]."""
        return linear(hidden, self.head).float()

    @torch.inference_mode()
    def logits(self, input_ids: Tensor) -> Tensor:
        """Returns logits [B, L, V] float32 of whole sequences [B, L] int64, by a causal forward without a cache."""
        rows, length = input_ids.shape
        whole = FullAttention([length] * rows, shape=self.shape, device=self.device)
        hidden = self.hidden(input_ids.reshape(-1), whole.positions, whole)
        return self.project(hidden).view(rows, length, -1)

    def _zeros(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(size, dtype=dtype or self.dtype, device=self.device)

    def _new_layer(self, index: int, names: ExpertNames) -> DecoderLayer:
        s, zeros = self.shape, self._zeros
        mlp: DenseMlp | ExpertMlp
        if index not in s.moe_layers:
            mlp = DenseMlp(s, s.dense_width, zeros)
        elif s.expert_bias:
            mlp = ClampedExperts(s, zeros)
        else:
            mlp = GatedExperts(s, names, zeros)
        return DecoderLayer(
            input_norm=self._new_norm(),
            attention=self._new_attention(index),
            mlp_norm=self._new_norm(),
            mlp=mlp,
        )

    def _new_attention(self, index: int) -> LayerAttention:
        s, zeros = self.shape, self._zeros
        if index in s.delta_layers:
            return DeltaLayer(s, zeros, self._eps, grouped=self._decoder.grouped)
        if s.latent is not None:
            return LatentLayer(s, self._rotary, zeros, self._eps, index)
        return GroupedAttention(s, self._rotary, zeros, self._eps)

    def _new_norm(self) -> Norm:
        return Norm(self._zeros(self.shape.hidden_size), self._eps, zero_centered=self.shape.zero_centered)

    def _name_tensors(self) -> dict[str, Tensor]:
        prefix = self._decoder.prefix
        named = {f"{prefix}embed_tokens.weight": self.embedding, f"{prefix}norm.weight": self.final_norm.weight}
        if not self.shape.tie_embeddings:
            named[f"{self._decoder.head}.weight"] = self.head
        for index, layer in enumerate(self.layers):
            named |= {f"{prefix}layers.{index}.{name}": tensor for name, tensor in layer.named().items()}
        return named


_SCORES = 2**22  # scores of a block of queries that attend to chosen keys, if it has more than one query


class FullAttention(Context):
    """Causal attention inside each of P whole sequences, given as one flat list of N tokens without padding.

    ``positions`` [N] counts from 0 in each sequence. With ``keep`` (a dtype), ``prefix`` gets their cached states, with
    ``indexed`` also the keys of indexers. Queries past ``top_k`` attend to chosen keys, in blocks.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        shape: ModelShape,
        device: torch.device,
        keep: torch.dtype | None = None,
        indexed: bool = False,
    ) -> None:
        self._lengths = torch.tensor(lengths, device=device)
        self._num, self._longest = len(lengths), max(lengths)
        self._scale, self._windows = score_scale(shape), shape.windows
        columns = torch.arange(self._longest, device=device)
        inside = columns < self._lengths[:, None]
        self.positions = columns.expand_as(inside)[inside]
        self._from_start = inside.view(-1).nonzero().view(-1)
        self._from_end = (columns >= self._longest - self._lengths[:, None]).view(-1).nonzero().view(-1)
        self._places = shape.places_of_layers
        attending = len(shape.attention_layers) if keep else 0
        size = (2 * attending, self._num, self._longest, shape.num_kv_heads, shape.widest_head)
        self._top_k = self._longest if shape.indexer is None else shape.indexer.top_k
        self.indexed = indexed or self._longest > self._top_k
        self._chosen: Tensor | None = None
        self._indexers = () if shape.indexer is None else shape.indexer.layers
        self.prefix = PrefixCache(
            torch.zeros(size, dtype=keep, device=device),
            DeltaStates.zeros(shape, self._num, keep, device),
            index_key_zeros(shape if indexed and keep else None, self._num, self._longest, keep, device),
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:  # noqa: D102
        if len(columns := self.prefix.columns):
            place = self._places[layer]
            columns[place].flatten(0, 1).index_copy_(0, self._from_end, key)
            columns[place + len(columns) // 2].flatten(0, 1).index_copy_(0, self._from_end, value)
        # Padding stands after each sequence, where no earlier query looks: causality is all the mask it needs.
        q, k, v = (self._pad(x).transpose(1, 2) for x in (query, key, value))
        if self._chosen is not None:
            return self._attend_chosen(q, k, v, self._chosen)
        window = self._windows[layer] if self._windows else 0
        mask = self._mask(window, sinks) if window or sinks is not None else None
        if sinks is not None:  # a key and a value of zeros, before the others
            k, v = (functional.pad(x, (0, 0, 1, 0)) for x in (k, v))
        mixed: Tensor = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self._scale, enable_gqa=True
        )
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1).index_select(0, self._from_start)

    def choose(self, layer: int, key: Tensor, queries: Callable[[], tuple[Tensor, Tensor]]) -> None:  # noqa: D102
        if len(held := self.prefix.index_keys):
            held[self._indexers.index(layer)].flatten(0, 1).index_copy_(0, self._from_end, key)
        if self._longest <= self._top_k:
            return
        query, weights, keys = (self._pad(x) for x in (*queries(), key))
        at = torch.arange(self._longest, device=key.device)
        chosen = torch.full((*keys.shape[:2], self._top_k), -1, dtype=torch.int32, device=key.device)
        for block, seen in self._blocks(1):
            visible = at[None, block, None] >= at[:seen]
            found = choose_keys(query[:, block], weights[:, block], keys[:, :seen], visible, self._top_k)
            chosen[:, block, : found.shape[-1]] = found
        self._chosen = chosen

    def _attend_chosen(self, query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
        """[P, Q, longest, D] three times, and ``chosen`` [P, longest, top_k], -1 for none -> [N, Q * D]."""
        out = torch.empty_like(query)
        for block, seen in self._blocks(query.shape[1]):
            places = chosen[:, block].long()
            mask = torch.zeros(*places.shape[:2], seen + 1, dtype=torch.bool, device=query.device)
            mask = mask.scatter_(-1, places.where(places >= 0, seen), True)[:, None, :, :seen]
            q, k, v = query[:, :, block], key[:, :, :seen], value[:, :, :seen]
            out[:, :, block] = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self._scale)
        return out.transpose(1, 2).flatten(2).flatten(0, 1).index_select(0, self._from_start)

    def _blocks(self, heads: int) -> Iterator[tuple[slice, int]]:
        """Yields blocks of positions, and how many keys each sees."""
        size = max(1, _SCORES // (self._num * heads * self._longest))
        for start in range(0, self._longest, size):
            stop = min(start + size, self._longest)
            yield slice(start, stop), stop

    def remember(self, layer: int, x: Tensor, taps: Tensor, decay: Tensor, beta: Tensor) -> Tensor:  # noqa: D102
        padded, logs, betas = (self._pad(part) for part in (x, decay, beta))
        states = self.prefix.remembered
        out = remember_whole(padded, taps, logs, betas, states, self._places[layer], self._lengths)
        return out.flatten(0, 1).index_select(0, self._from_start)

    def _mask(self, window: int, sinks: Tensor | None) -> Tensor:
        """Returns which keys a query sees, [longest, longest] bool. With ``sinks`` [Q] it returns numbers to add to
        scores, [Q, longest, 1 + longest], theirs first."""
        at = torch.arange(self._longest, device=self.positions.device)
        back = at[:, None] - at
        seen = (back >= 0) & (back < (window or self._longest))
        if sinks is None:
            return seen
        hidden = torch.zeros_like(seen, dtype=sinks.dtype).masked_fill_(~seen, -torch.inf)
        of_sinks = sinks[:, None, None].expand(-1, self._longest, 1)
        return torch.cat((of_sinks, hidden.expand(len(sinks), -1, -1)), -1)

    def _pad(self, flat: Tensor) -> Tensor:
        """[N, ...] -> [P, longest, ...]."""
        padded = flat.new_zeros(self._num, self._longest, *flat.shape[1:])
        padded.flatten(0, 1).index_copy_(0, self._from_start, flat)
        return padded
