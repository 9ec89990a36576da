"""Causal attention on a CPU with AVX-512, by one thread.

torch's kernel multiplies blocks of 64 queries of one head by MKL. Sequences of middling length are faster with several
heads in one batched product, and where oneDNN is faster than MKL, as in `fused`, long ones with larger blocks by that.
Letters: B sequences, L positions of each, H query heads, G of keys and values, d and e the widths of keys and of
values, n queries of a block, R = H / G.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_megatron.learner.model.kernels.fused import matmul_transposed
from rl_megatron.models.linear import through_onednn, through_wide_mkl

LEAST = 80  # positions of a sequence from which `batched_attention` is faster than torch's kernel, by oneDNN
LONG = 384  # from which `long_attention` is faster, which keeps no scores for the backward pass
BY_MKL = range(160, 513)  # positions for which `batched_attention` is faster than torch's kernel, by MKL
BATCHED_ROWS = 64  # positions of a block of `batched_attention`
ROWS = 512  # queries of a block of `long_attention` at most
SCORES = 2**18  # of a block at most: they fit the cache
AttentionKernel = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Of queries [B, L, H, d], keys [B, L, G, d], values [B, L, G, e] and a scale -> [B, L, H, e], with gradients; each
position sees those up to it."""


def faster_attention(query: Tensor, length: int) -> AttentionKernel | None:
    """What is faster than torch's kernel, which shares heads out among several threads; None: nothing."""
    if torch.get_num_threads() > 1:
        return None
    if through_onednn(query) and length >= LEAST:
        return batched_attention if length < LONG else long_attention
    return batched_attention if through_wide_mkl(query) and length in BY_MKL else None


def batched_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """An `AttentionKernel` that keeps its shares, half of L * L of a head."""
    out: Tensor = _Batched.apply(query, key, value, scale)  # type: ignore[no-untyped-call]
    return out


def long_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """An `AttentionKernel` whose backward pass computes its shares again."""
    out: Tensor = _Long.apply(query, key, value, scale)  # type: ignore[no-untyped-call]
    return out


class _Batched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        groups = key.shape[2]
        q, k, v = _joined(query, groups).mul_(scale), _joined(key, groups), _joined(value, groups)
        out, shares = q.new_empty(*q.shape[:2], v.shape[-1]), []
        for some, rows, start, stop in _batches(len(q), query.shape[1], query.shape[2] // groups):
            scores = torch.bmm(q[some, rows], k[some, :stop].mT)
            scores.view(len(scores), stop - start, -1, stop)[..., start:] += _later(stop - start)[:, None]
            shares.append(scores.softmax(-1))
            out[some, rows] = torch.bmm(shares[-1], v[some, :stop])
        ctx.save_for_backward(q, k, v, *shares)
        ctx.scale, ctx.shape = scale, query.shape
        return _parted(out, *query.shape[:3])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, *shares = ctx.saved_tensors
        count, length, heads = ctx.shape[:3]
        groups = len(k) // count
        grad = _joined(grad, groups)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for share, (some, rows, _, stop) in zip(shares, _batches(len(q), length, heads // groups), strict=True):
            grad_v[some, :stop] += torch.bmm(share.mT, grad[some, rows])
            above = torch.bmm(grad[some, rows], v[some, :stop].mT)
            above = torch._softmax_backward_data(above, share, -1, share.dtype)
            grad_q[some, rows] = torch.bmm(above, k[some, :stop])
            grad_k[some, :stop] += torch.bmm(above.mT, q[some, rows])
        found = _parted(grad_q.mul_(ctx.scale), count, length, heads)
        return found, _parted(grad_k, count, length, groups), _parted(grad_v, count, length, groups), None


def _batches(groups: int, length: int, shared: int) -> Iterator[tuple[slice, slice, int, int]]:
    """Of each block: which groups of all B * G it has, as many as its scores fit the cache of, its rows among
    [L * R], and its first position and the one after its last."""
    size = max(1, SCORES // (min(BATCHED_ROWS, length) * shared * length))
    for first, start in product(range(0, groups, size), range(0, length, BATCHED_ROWS)):
        stop = min(start + BATCHED_ROWS, length)
        yield slice(first, first + size), slice(start * shared, stop * shared), start, stop


def _joined(x: Tensor, groups: int) -> Tensor:
    """[B, L, G * R, d] -> a copy [B * G, L * R, d]."""
    parted: Tensor = x.unflatten(2, (groups, -1)).transpose(1, 2)
    return parted.clone(memory_format=torch.contiguous_format).view(len(x) * groups, -1, x.shape[-1])


def _parted(x: Tensor, count: int, length: int, heads: int) -> Tensor:
    """[B * G, L * R, d] -> [B, L, G * R, d]."""
    return x.view(count, len(x) // count, length, -1, x.shape[-1]).transpose(1, 2).reshape(count, length, heads, -1)


class _Long(torch.autograd.Function):
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


@lru_cache(BATCHED_ROWS)
def _later(size: int) -> Tensor:
    """[size, size]: minus infinity for positions after the query's, else 0."""
    return torch.full((size, size), -torch.inf).triu_(1)
