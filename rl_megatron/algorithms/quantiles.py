"""Computes quantiles over micro-batches and ranks from counts in fixed bins, which add up.

The bins are of log-ratios: 1e-6 nats wide around 0, then 24 a decade in both directions, up to 20 nats. A quantile is
the middle of its bin, so it is off by at most 5 % of the log-ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

_SMALLEST, _LARGEST, _PER_DECADE = 1e-6, 20.0, 24
_STEPS = math.ceil(math.log10(_LARGEST / _SMALLEST) * _PER_DECADE)
_MAGNITUDES = [_SMALLEST * 10 ** (i / _PER_DECADE) for i in range(_STEPS + 1)]
_EDGES = [-x for x in reversed(_MAGNITUDES)] + _MAGNITUDES
_MIDDLES = [
    _EDGES[0],
    *((math.copysign(math.sqrt(a * b), a) if a * b > 0 else 0.0) for a, b in pairwise(_EDGES)),
    _EDGES[-1],
]


def histogram(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """Counts [bins] float32 of the masked-in values of ``log_ratios`` [T]."""
    edges = torch.tensor(_EDGES, dtype=log_ratios.dtype, device=log_ratios.device)
    bins = torch.bucketize(log_ratios, edges)
    return torch.zeros(len(_MIDDLES), device=log_ratios.device).index_add_(0, bins, mask.float())


def ratio_quantiles(counts: Sequence[float], shares: Sequence[float]) -> list[float]:
    """The quantiles of the ratios (not of their logs) at ``shares``; NaN if the counts are all 0."""
    total = torch.tensor(counts, dtype=torch.float64).cumsum(0)
    if not total[-1]:
        return [math.nan] * len(shares)
    places = torch.searchsorted(total, torch.tensor(shares, dtype=torch.float64) * total[-1])
    return [math.exp(_MIDDLES[place]) for place in places.clamp(max=len(_MIDDLES) - 1).tolist()]
