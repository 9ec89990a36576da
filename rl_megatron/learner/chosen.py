"""Logits of chosen tokens, and the most probable tokens, over a vocabulary of which each TP rank has some rows.

Letters: T positions, V rows of this rank, k tokens a position. ``group`` is the TP group, None for one rank; every rank
of it calls these functions, with ``vocab_start`` rows before its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def logits_of(logits: Tensor, tokens: Tensor, *, vocab_start: int, group: dist.ProcessGroup | None) -> Tensor:
    """Logits [T, k], at least float32, of ``tokens`` [T, k] int64, with a gradient into ``logits`` [T, V]."""
    local = tokens - vocab_start
    here = (local >= 0) & (local < logits.shape[1])
    mine = logits.gather(1, local.clamp(0, logits.shape[1] - 1))
    mine = mine.to(torch.promote_types(mine.dtype, torch.float32)).where(here, 0.0)
    if group is None:
        return mine
    summed: Tensor = _Summed.apply(mine, group)  # type: ignore[no-untyped-call]
    return summed


def top_tokens(logits: Tensor, count: int, below: int, vocab_start: int, group: dist.ProcessGroup | None) -> Tensor:
    """The ``count`` tokens [T, count] int64 of the largest logits [T, V] among ids under ``below``, largest first."""
    mine = logits[:, : max(below - vocab_start, 0)].float()
    values, tokens = mine.topk(min(count, mine.shape[1]), 1)
    tokens = tokens + vocab_start
    if group is None:
        return tokens
    missing = (0, count - values.shape[1])  # a rank with fewer rows
    values = torch.nn.functional.pad(values, missing, value=-torch.inf).contiguous()
    tokens = torch.nn.functional.pad(tokens, missing).contiguous()
    every = [[torch.empty_like(x) for _ in range(group.size())] for x in (values, tokens)]
    for into, x in zip(every, (values, tokens), strict=True):
        dist.all_gather(into, x, group=group)
    best = torch.cat(every[0], 1).topk(count, 1).indices
    return torch.cat(every[1], 1).gather(1, best)


class _Summed(torch.autograd.Function):
    """A sum over ranks of which each goes on with the same loss."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        out = mine.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
