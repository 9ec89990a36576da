"""Causal attention of long sequences on a CPU where oneDNN is faster than MKL, as in `fused`.

torch's kernel multiplies blocks of 64 queries of one head by MKL, on an Intel Xeon in half the time of this one; here
blocks are larger, and have all query heads that share keys. Letters: B sequences, L positions of each, H query heads,
G of keys and values, d and e the widths of keys and of values, n queries of a block, R = H / G.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_megatron.learner.model.kernels.fused import matmul_transposed
from rl_megatron.models.linear import through_onednn

LEAST = 384  # positions of a sequence from which this is faster than torch's kernel
ROWS = 512  # of a block at most
SCORES = 2**18  # of a block at most: they fit the cache


def is_long(query: Tensor, length: int) -> bool:
    """Whether `causal_attention` is faster than torch's kernel, which shares heads out among several threads."""
    return length >= LEAST and through_onednn(query) and torch.get_num_threads() == 1


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[B, L, H, d], [B, L, G, d], [B, L, G, e] -> [B, L, H, e], with gradients; each position sees those up to it."""
    out: Tensor = _CausalAttention.apply(query, key, value, scale)  # type: ignore[no-untyped-call]
    return out


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        for place, q, k, v in _groups(query, key, value):
            for rows, seen in _blocks(q):
                share = _shares(_flat(q[rows]) * scale, k[:seen], rows)
                _put(out[place][rows], matmul_transposed(share, v[:seen].t()))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value = ctx.saved_tensors
        grad_query, grad_key, grad_value = (torch.empty(x.shape) for x in (query, key, value))
        for place, q, k, v in _groups(query, key, value):
            into_k, into_v = (torch.zeros(x.shape[1], len(x)) for x in (k, v))
            for rows, seen in _blocks(q):
                scaled, above = _flat(q[rows]) * ctx.scale, _flat(grad[place][rows])
                share = _shares(scaled, k[:seen], rows)
                into_v[:, :seen] += matmul_transposed(above.t(), share.t())
                above = torch._softmax_backward_data(matmul_transposed(above, v[:seen]), share, -1, share.dtype)
                _put(grad_query[place][rows], matmul_transposed(above, k[:seen].t()).mul_(ctx.scale))
                into_k[:, :seen] += matmul_transposed(scaled.t(), above.t())
            sequence, heads = place[0], place[2].start // q.shape[1]
            grad_key[sequence, :, heads], grad_value[sequence, :, heads] = into_k.t(), into_v.t()
        return grad_query, grad_key, grad_value, None


def _groups(
    query: Tensor, key: Tensor, value: Tensor
) -> Iterator[tuple[tuple[int, slice, slice], Tensor, Tensor, Tensor]]:
    """The query heads that share keys: their place in ``query``, queries [L, R, d], keys [L, d] and values [L, e]."""
    shared = query.shape[2] // key.shape[2]
    for sequence in range(len(query)):
        for head in range(key.shape[2]):
            place = sequence, slice(None), slice(head * shared, (head + 1) * shared)
            yield place, query[place], key[sequence, :, head].contiguous(), value[sequence, :, head].contiguous()


def _blocks(query: Tensor) -> Iterator[tuple[slice, int]]:
    """The positions of each block of [L, R, d], and how many keys it sees."""
    size = max(1, min(ROWS, SCORES // len(query)) // query.shape[1])
    for start in range(0, len(query), size):
        stop = min(start + size, len(query))
        yield slice(start, stop), stop


def _flat(x: Tensor) -> Tensor:
    """[n, R, d] -> [R * n, d]."""
    return x.transpose(0, 1).reshape(-1, x.shape[-1])


def _put(into: Tensor, x: Tensor) -> None:
    """Copy [R * n, e] into [n, R, e]."""
    into.copy_(x.view(into.shape[1], len(into), -1).transpose(0, 1))


def _shares(scaled: Tensor, key: Tensor, rows: slice) -> Tensor:
    """Each query's shares [R * n, keys] of the values that it sees."""
    scores, size = matmul_transposed(scaled, key), rows.stop - rows.start
    scores.view(-1, size, len(key))[..., rows] += _later(size)
    return scores.softmax(-1)


@lru_cache(4)
def _later(size: int) -> Tensor:
    """[size, size]: minus infinity for positions after the query's, else 0."""
    return torch.full((size, size), -torch.inf).triu_(1)
