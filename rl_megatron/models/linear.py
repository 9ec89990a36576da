"""Multiplies tokens by a weight matrix with whichever CPU library is faster for its size."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# On CPUs for which MKL keeps to AVX2 (AMD's), oneDNN takes half its time, from about this size on: below, its
# overhead of 8 us shows.
MIN_ONEDNN_FLOPS = 4e6


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` [N, H] times the transpose of ``weight`` [O, H] -> [N, O].

    oneDNN prepares a kernel for each new N (0.3 ms, then cached): callers whose N changes at each call round it up.
    """
    flops = 2 * len(x) * weight.numel()
    if x.device.type == "cpu" and x.dtype == torch.float32 and flops >= MIN_ONEDNN_FLOPS and HAS_ONEDNN:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return product
    return functional.linear(x, weight)


HAS_ONEDNN = torch.backends.mkldnn.is_available()
