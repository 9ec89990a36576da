"""The gated delta rule (arXiv:2412.06464): over chunks of positions, and over one position.

A head's state S [dk, dv] is, after each position, ``exp(g) S + k (beta (v - exp(g) S^T k))^T``, and what it gives is
``S^T q``. Inside a chunk that is a triangular system, solved for all chunks and heads at once; only the state goes
from chunk to chunk, and there all sequences go together.

Letters: n chunks of C positions, K key heads with R value heads each, dk and dv their sizes, N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_EPS = 1e-6  # of the length of queries and keys


def by_chunks(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, counts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """query, key [n, K, C, dk], value [n, K, R, C, dv], decay (the logarithm, at most 0) and beta [n, K, R, C] -> what
    each position gives [n, K, R, C, dv], and the state [K, R, dk, dv] after the last chunks.

    The first ``counts[0]`` chunks begin sequences, the next ``counts[1]`` follow the first of those, and so on.
    Queries and keys are made of length 1, queries over sqrt(dk). Where beta and decay are 0, no state changes.
    """
    query, key = _unit(query), _unit(key)
    parts = _inside(query * query.shape[-1] ** -0.5, key, value, decay, beta)
    before, new, state = _scan(parts, counts)
    return parts.reads @ before + parts.mixes @ new, state


def by_position(state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """One position of each row: query, key [N, K, dk], value [N, K, R, dv], decay and beta [N, K, R] -> [N, K, R, dv].
    Writes ``state`` [N, K, R, dk, dv]."""
    query, key = (_unit(x)[:, :, None, None] for x in (query, key))
    state *= decay.exp()[..., None, None]
    new = (value[..., None, :] - key @ state) * beta[..., None, None]
    state += key.mT * new
    out: Tensor = (query * query.shape[-1] ** -0.5 @ state).squeeze(-2)
    return out


def _unit(x: Tensor) -> Tensor:
    out: Tensor = x * (x.square().sum(-1, keepdim=True) + _EPS).rsqrt()
    return out


class _Parts(NamedTuple):
    """Of every chunk, what does not need the state before it."""

    values: Tensor  # [n, K, R, C, dv] what is written if that state is 0
    known: Tensor  # [n, K, R, C, dk] reads what that state knows of them already
    reads: Tensor  # [n, K, R, C, dk] queries, decayed from that state on
    mixes: Tensor  # [n, K, R, C, C] what queries read of the chunk's own
    writes: Tensor  # [n, K, R, C, dk] keys, decayed to the chunk's end
    keeps: Tensor  # [n, K, R, 1, 1] what stays of that state


def _running_sums(g: Tensor, above: Tensor) -> Tensor:
    """``g.cumsum(-1)`` of [..., C], which torch refuses on GPUs with deterministic algorithms; ``above`` [C, C] are the
    later positions. As a sum for each position it rounds more where two are subtracted."""
    if g.is_cpu or not torch.are_deterministic_algorithms_enabled():
        return g.cumsum(-1)
    return g[..., None, :].masked_fill(above, 0.0).sum(-1)


def _inside(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> _Parts:
    """q, k [n, K, C, dk], v [n, K, R, C, dv], g and b [n, K, R, C]."""
    above = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).triu(1)
    total = _running_sums(g, above)
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


def _scan(parts: _Parts, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The state before each chunk [n, K, R, dk, dv], what the chunk writes [n, K, R, C, dv], and the last states."""
    columns = (parts.values, parts.known, parts.writes, parts.keeps)
    steps = zip(*(part.split(list(counts)) for part in columns), strict=True)
    state = parts.values.new_zeros(*parts.known.shape[:3], parts.known.shape[-1], parts.values.shape[-1])[: counts[0]]
    before, new = [], []
    for values, known, writes, keeps in steps:
        state = state[: len(values)]
        before.append(state)
        new.append(values - known @ state)
        state = state * keeps + writes.mT @ new[-1]
    return torch.cat(before), torch.cat(new), state
