"""Arithmetic over segments of a flat tensor: groups of rewards, or sequences of tokens. Vectorized, without autograd.

Letters: n values, K segments. ``ids`` [n] int64 number the segments 0 .. K-1.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

ROUNDING = 2**-21
"""Four units of float32's last place, relative: values that differ by less are equal but for rounding."""
_BLOCK = 32
_PART = 2**19


def dense(ids: Tensor) -> Tensor:
    """Returns the same segments numbered 0, 1, 2, ..., whatever integers named them."""
    renumbered: Tensor = torch.unique(ids, return_inverse=True)[1]
    return renumbered


def sequence_ids(cu_seqlens: Tensor) -> Tensor:
    """Returns the segment of every position, [N], from the boundaries [S + 1] of a ragged batch."""
    return torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device), cu_seqlens.diff())


def segment_sum(values: Tensor, ids: Tensor, num_segments: int | None = None) -> Tensor:
    """Returns the sum of each segment, [K]. Without ``num_segments`` every segment must have a value."""
    num = num_segments if num_segments is not None else (int(ids.max()) + 1 if len(ids) else 0)
    return values.new_zeros(num).index_add_(0, ids, values)


def segment_mean(values: Tensor, ids: Tensor) -> Tensor:
    """Returns the mean of each segment, [K]."""
    return segment_sum(values, ids) / segment_sum(torch.ones_like(values), ids)


def segment_variance(values: Tensor, ids: Tensor, *, unbiased: bool) -> Tensor:
    """Returns the variance of each segment, [K], over n - 1 values if ``unbiased`` (NaN for one), else over n."""
    count = segment_sum(torch.ones_like(values), ids)
    return segment_sum((values - segment_mean(values, ids)[ids]).square(), ids) / (count - int(unbiased))


def segment_range(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the least and greatest value of each segment, [K] each."""
    segments = segment_sum(torch.zeros_like(values), ids)
    low = segments.scatter_reduce(0, ids, values, "amin", include_self=False)
    return low, segments.scatter_reduce(0, ids, values, "amax", include_self=False)


def differ(values: Tensor, ids: Tensor) -> Tensor:
    """True for each segment with two values that differ by more than `ROUNDING` of its largest, [K]."""
    low, high = segment_range(values, ids)
    return high - low > ROUNDING * torch.maximum(high.abs(), low.abs())


def difference(values: Tensor, others: Tensor) -> Tensor:
    """Returns values [n] less the others [n], exactly 0 where they differ by `ROUNDING` or less."""
    found = values - others
    return torch.where(found.abs() > ROUNDING * torch.maximum(values.abs(), others.abs()), found, 0.0)


def whole_sequences(cu_seqlens: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yields runs of whole sequences of about ``_PART`` positions: their slice of sequences, and that of positions.

    The memory of a part stays in the processor's cache and is used again. A pass over all of a large batch would spend
    more time on getting memory than on arithmetic.
    """
    num = len(cu_seqlens) - 1
    marks = torch.arange(_PART, max(int(cu_seqlens[-1]), _PART), _PART, device=cu_seqlens.device)
    cuts = sorted({0, num, *torch.searchsorted(cu_seqlens, marks).tolist()})
    bounds = cu_seqlens[cuts].tolist()
    for (first, last), (start, stop) in zip(pairwise(cuts), pairwise(bounds), strict=True):
        yield slice(first, last), slice(start, stop)


def discounted_sum(values: Tensor, lengths: Tensor, discount: Tensor, *, room: Tensor | None = None) -> Tensor:
    """y[t] = values[t] + discount·y[t + 1] within each segment, [n].

    ``lengths`` [K] of the segments, one after the other; ``discount`` [1], or [K], of each. Segments are cut into
    blocks of 32, and sums within blocks are one product with a triangular matrix. The first of every block make the
    same problem, 32 times smaller: its solution comes in from the right. ``room`` [n or more] is memory that the result
    may be in: a fresh page for every number costs more than the sums.
    """
    blocks = (lengths + (_BLOCK - 1)) // _BLOCK
    total = int(blocks.sum())
    rows, places = _to_blocks(values, lengths, blocks, total)
    sums = _sums_within_rows(rows, _expand_blocks(discount, blocks, total), room)
    if bool((lengths > _BLOCK).any()):
        firsts = discounted_sum(sums[:, 0].contiguous(), blocks, discount**_BLOCK)
        following = torch.zeros_like(firsts)
        following[:-1] = firsts[1:]
        following[(blocks.cumsum(0) - 1)[blocks > 0]] = 0
        exponents = torch.arange(_BLOCK, 0, -1, dtype=values.dtype, device=values.device)
        powers = _expand_blocks(discount[:, None] ** exponents, blocks, total)
        sums.addcmul_(following[:, None], powers)
    return sums.view(-1) if places is None else sums.view(-1).index_select(0, places)


def _to_blocks(values: Tensor, lengths: Tensor, blocks: Tensor, total: int) -> tuple[Tensor, Tensor | None]:
    """[total, _BLOCK], every segment's end filled up with zeros; and where the values are there, None if in place."""
    if total * _BLOCK == len(values):
        return values.view(-1, _BLOCK), None
    fill = (blocks * _BLOCK).cumsum(0) - blocks * _BLOCK - (lengths.cumsum(0) - lengths)
    places = torch.repeat_interleave(fill, lengths, output_size=len(values))
    places += torch.arange(len(values), device=values.device)
    rows = values.new_zeros(total * _BLOCK).scatter_(0, places, values)
    return rows.view(-1, _BLOCK), places


def _expand_blocks(of_segments: Tensor, blocks: Tensor, total: int) -> Tensor:
    """[1, ...] as it is, [K, ...] -> [total, ...]."""
    return of_segments if len(of_segments) == 1 else of_segments.repeat_interleave(blocks, 0, output_size=total)


def _sums_within_rows(rows: Tensor, discount: Tensor, room: Tensor | None) -> Tensor:
    """Discounted sums to the end of each row, not in their memory; ``discount`` [1], or one of each row."""
    out = room[: rows.numel()].view_as(rows) if room is not None and len(room) >= rows.numel() else None
    if len(discount) == 1:
        places = torch.arange(_BLOCK, device=rows.device)
        steps = places[:, None] - places
        return torch.mm(rows, torch.where(steps >= 0, discount ** steps.clamp(min=0), 0.0), out=out)
    step, factor = 1, discount[:, None]
    sums = rows.clone()
    while step < _BLOCK:  # doubling
        sums[:, :-step] += sums[:, step:] * factor
        step, factor = 2 * step, factor.square()
    return sums
