"""The gated delta rule (arXiv:2412.06464) over packed sequences, a chunk at a time, and the convolution before it.

A head's state S [dk, dv] is, after each position, ``exp(g) S + k (beta (v - exp(g) S^T k))^T``, and what it gives is
``S^T q``. Inside a chunk that is a triangular system, solved for all chunks and heads at once; only the state goes
from chunk to chunk, and there all sequences go together.

Letters: T positions, n chunks of C, K key heads with R value heads each, dk and dv their sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_megatron.learner.model.delta.chunks import Chunks
from rl_megatron.learner.model.fused import from_slots, into_slots

_EPS = 1e-6  # of the length of queries and keys


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, chunks: Chunks) -> Tensor:
    """query, key [T, K, dk], value [T, K, R, dv], decay (the logarithm, at most 0) and beta [T, K, R] ->
    [T, K, R, dv] in float32 or more. Queries and keys are made of length 1, queries over sqrt(dk)."""
    q, k, v = (_laid_out(x, chunks).movedim(1, -2) for x in (query, key, value))
    g, b = (_laid_out(x, chunks).movedim(1, -1) for x in (decay, beta))
    q, k = (x * (x.square().sum(-1, keepdim=True) + _EPS).rsqrt() for x in (q, k))
    parts = _inside(q * q.shape[-1] ** -0.5, k, v, g, b)
    before, new = _scan(parts, chunks.counts)
    out = parts.reads @ before + parts.mixes @ new  # [n, K, R, C, dv]
    return from_slots(out.permute(0, 3, 1, 2, 4).flatten(0, 1), chunks.slots)


class _Parts(NamedTuple):
    """Of every chunk, what does not need the state before it."""

    values: Tensor  # [n, K, R, C, dv] what is written if that state is 0
    known: Tensor  # [n, K, R, C, dk] reads what that state knows of them already
    reads: Tensor  # [n, K, R, C, dk] queries, decayed from that state on
    mixes: Tensor  # [n, K, R, C, C] what queries read of the chunk's own
    writes: Tensor  # [n, K, R, C, dk] keys, decayed to the chunk's end
    keeps: Tensor  # [n, K, R, 1, 1] what stays of that state


def _laid_out(x: Tensor, chunks: Chunks) -> Tensor:
    """[T, ...] -> [n, C, ...], at least float32."""
    wide = x if x.dtype == torch.float64 else x.float()
    out: Tensor = into_slots(wide, chunks.slots).unflatten(0, (-1, chunks.size))
    return out


def _inside(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> _Parts:
    """q, k [n, K, C, dk], v [n, K, R, C, dv], g and b [n, K, R, C]."""
    total = g.cumsum(-1)
    above = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(above, -torch.inf).exp()  # [n, K, R, C, C]
    scale, from_start = b[..., None], total.exp()[..., None]
    keys = k[:, :, None]
    system = (k @ k.mT)[:, :, None] * between * scale
    known = keys * (scale * from_start)
    solved = torch.linalg.solve_triangular(system, torch.cat([v * scale, known], -1), upper=False, unitriangular=True)
    values, known = solved.split([v.shape[-1], k.shape[-1]], -1)
    end = total[..., -1:]
    return _Parts(
        values=values,
        known=known,
        reads=q[:, :, None] * from_start,
        mixes=(q @ k.mT)[:, :, None] * between,
        writes=keys * (end - total).exp()[..., None],
        keeps=end.exp()[..., None],
    )


def _scan(parts: _Parts, counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The state before each chunk [n, K, R, dk, dv], and what the chunk writes [n, K, R, C, dv]."""
    steps = zip(*(part.split(counts) for part in (parts.values, parts.known, parts.writes, parts.keeps)), strict=True)
    state = parts.values.new_zeros(*parts.known.shape[:3], parts.known.shape[-1], parts.values.shape[-1])[: counts[0]]
    before, new = [], []
    for values, known, writes, keeps in steps:
        state = state[: len(values)]
        before.append(state)
        new.append(values - known @ state)
        state = state * keeps + writes.mT @ new[-1]
    return torch.cat(before), torch.cat(new)


def convolve(x: Tensor, weight: Tensor, chunks: Chunks) -> Tensor:
    """Each channel of [T, c] over the last positions of its sequence, by ``weight`` [c, 1, gap + 1]; then silu."""
    padded = x.new_zeros(chunks.places, x.shape[1]).index_copy(0, chunks.place, x)
    out = F.conv1d(padded.t()[None], weight, groups=len(weight))[0].t()
    return F.silu(out.index_select(0, chunks.place - chunks.gap))
