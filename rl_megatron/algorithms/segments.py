"""Arithmetic over segments of a flat tensor: groups of rewards, or sequences of tokens. Vectorised, no autograd meant.

Letters: n values, K segments. ``ids`` [n] int64 number the segments 0 .. K-1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dense(ids: Tensor) -> Tensor:
    """The same segments numbered 0, 1, 2, ..., whatever integers named them."""
    renumbered: Tensor = torch.unique(ids, return_inverse=True)[1]
    return renumbered


def sequence_ids(cu_seqlens: Tensor) -> Tensor:
    """Segment of every position, [N], from the boundaries [S + 1] of a ragged batch."""
    return torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device), cu_seqlens.diff())


def segment_sum(values: Tensor, ids: Tensor, num_segments: int | None = None) -> Tensor:
    """Sum of each segment, [K]. Without ``num_segments`` every segment has a value."""
    num = num_segments if num_segments is not None else (int(ids.max()) + 1 if len(ids) else 0)
    return values.new_zeros(num).index_add_(0, ids, values)


def segment_mean(values: Tensor, ids: Tensor) -> Tensor:
    """Mean of each segment, [K]."""
    return segment_sum(values, ids) / segment_sum(torch.ones_like(values), ids)


def segment_variance(values: Tensor, ids: Tensor, *, unbiased: bool) -> Tensor:
    """Variance of each segment, [K]; NaN for the unbiased one of a single value."""
    count = segment_sum(torch.ones_like(values), ids)
    return segment_sum((values - segment_mean(values, ids)[ids]).square(), ids) / (count - int(unbiased))


def differ(values: Tensor, ids: Tensor) -> Tensor:
    """Whether a segment has two different values, [K]; exact, where a variance would leave rounding noise."""
    segments = segment_sum(torch.zeros_like(values), ids)
    low = segments.scatter_reduce(0, ids, values, "amin", include_self=False)
    high = segments.scatter_reduce(0, ids, values, "amax", include_self=False)
    return high > low


def discounted_sum(values: Tensor, ids: Tensor, discount: Tensor) -> Tensor:
    """y[t] = values[t] + discount[t]·y[t + 1] within each segment, [n]; segments are contiguous.

    ``discount`` [n] is constant within a segment. Doubling takes log2(longest segment) steps instead of one a token.
    """
    lengths = segment_sum(torch.ones_like(ids), ids)
    end = lengths.cumsum(0)[ids]  # one past the last position of each segment
    here = torch.arange(len(values), device=values.device)
    out, step, longest = values, 1, int(lengths.max()) if len(lengths) else 0
    while step < longest:
        ahead = (here + step).clamp(max=len(values) - 1)
        out = out + torch.where(here + step < end, discount**step * out[ahead], 0.0)
        step *= 2
    return out
