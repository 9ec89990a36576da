"""Sparse attention over packed sequences: the indexer's choice of keys, and attention to them in blocks of queries.

Source: DeepSeek-V3.2 (arXiv:2512.02556), section 2.1. Memory is that of the choice, L * top_k, and of one block.
Letters: B sequences of a length class, L positions of each, H heads of this rank, d and e the widths of keys and of
values, r queries of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_megatron.learner.packed import PackedAttentionParams
from rl_megatron.models.indexer import choose_keys

_ROWS = 512  # queries of a block at most
_SCORES = {"cpu": 2**21, "cuda": 2**28}  # scores of a block at most, if it has more than one query


@torch.no_grad()
def choose_packed(query: Tensor, weights: Tensor, key: Tensor, packed: PackedAttentionParams, top_k: int) -> Tensor:
    """Returns a layer's `PackedAttentionParams.chosen` [t, top_k], with -1 in classes of at most ``top_k`` positions.

    ``query`` [t, I, D], ``weights`` [t, I] and ``key`` [t, D] are those of `models.indexer`.
    """
    count = len(query)
    out = torch.full((count + 1, top_k), -1, dtype=torch.int32, device=query.device)  # the last row is of padding
    for at in class_rows(packed):
        if (length := at.shape[1]) <= top_k:
            continue
        step, into = torch.arange(length, device=query.device), _replace_copies(at, count)
        for start in range(0, length, _ROWS):
            block, stop = slice(start, start + _ROWS), min(start + _ROWS, length)
            visible = step[None, block, None] >= step[:stop]
            found = choose_keys(query[at[:, block]], weights[at[:, block]], key[at[:, :stop]], visible, top_k)
            out[into[:, block], : found.shape[-1]] = found
    return out[:count]


def class_rows(packed: PackedAttentionParams) -> list[Tensor]:
    """Returns the rows [B, L] int64 of each class's positions among the t of this rank, without context parallelism. A
    shorter sequence ends with copies of its last row."""
    rows = torch.arange(len(packed.positions), device=packed.positions.device)
    rows = rows if packed.queries is None else packed.queries.row
    parts = rows.split([part.count * part.key_length for part in packed.classes])
    return [mine.view(part.count, -1) for part, mine in zip(packed.classes, parts, strict=True)]


def _replace_copies(rows: Tensor, other: int) -> Tensor:
    """Returns ``rows`` of `class_rows` with ``other`` in place of copies."""
    return torch.cat((rows[:, :1], rows[:, 1:].where(rows.diff(dim=1) != 0, other)), 1)


def attend_chosen(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, rows: Tensor, scale: float) -> Tensor:
    """Attends to chosen keys. It computes shares again in the backward pass, and keeps only its arguments.

    ``query`` and ``key`` [B, L, H, d], ``value`` [B, L, H, e], ``chosen`` [t, top_k] as `PackedAttentionParams` has it,
    and ``rows`` [B, L] of `class_rows` -> [B, L, H, e].
    """
    out: Tensor = _Chosen.apply(query, key, value, chosen, rows, scale)  # type: ignore[no-untyped-call]
    return out


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, rows: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.given = chosen, rows, scale  # layers that share a choice keep one tensor
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        for block, seen in _blocks(query):
            mask = _mask(chosen[rows[:, block]], block.start, seen)
            out[:, block] = _attend(query[:, block], key[:, :seen], value[:, :seen], mask, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        chosen, rows, scale = ctx.given
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (key, value))
        for block, seen in _blocks(query):
            mask = _mask(chosen[rows[:, block]], block.start, seen)
            with torch.enable_grad():
                parts = [x.detach().requires_grad_() for x in (query[:, block], key[:, :seen], value[:, :seen])]
                out = _attend(parts[0], parts[1], parts[2], mask, scale)
            grad_query[:, block], of_key, of_value = torch.autograd.grad(out, parts, grad[:, block])
            grad_key[:, :seen] += of_key
            grad_value[:, :seen] += of_value
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


def _blocks(query: Tensor) -> Iterator[tuple[slice, int]]:
    """Yields the positions of each block of [B, L, H, d], and how many keys they see."""
    count, length, heads, _ = query.shape
    size = max(1, min(_ROWS, _SCORES[query.device.type] // (count * heads * length)))
    for start in range(0, length, size):
        stop = min(start + size, length)
        yield slice(start, stop), stop


def _mask(chosen: Tensor, start: int, seen: int) -> Tensor:
    """Returns the keys that each query from ``start`` on attends to, [B, r, seen] bool, of ``chosen`` [B, r, top_k].

    It attends to none after it, and to all up to it where none is chosen, as for padding with a given choice.
    """
    places = chosen.long()
    places = places.where((places >= 0) & (places < seen), seen)
    step = torch.arange(seen, device=chosen.device)
    causal = step <= step[start:, None]
    found = torch.zeros(*chosen.shape[:2], seen + 1, dtype=torch.bool, device=chosen.device)
    found = found.scatter_(-1, places, True)[..., :seen] & causal
    return found | (causal & ~found.any(-1, keepdim=True))


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """[B, r, H, d], [B, n, H, d], [B, n, H, e] and [B, r, n] -> [B, r, H, e]."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=scale).transpose(1, 2)
