"""Multiplies tokens by a weight matrix with whichever CPU library is faster for its size on this processor."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

# On other processors than Intel's, oneDNN takes half the time of MKL from about this size on: below, its overhead of
# 8 us shows.
MIN_ONEDNN_FLOPS = 4e6


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` [N, H] times the transpose of ``weight`` [O, H] -> [N, O].

    oneDNN prepares a kernel for each new N (0.3 ms, then cached): callers whose N changes at each call round it up.
    """
    if 2 * len(x) * weight.numel() >= MIN_ONEDNN_FLOPS and through_onednn(x):
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return product
    return functional.linear(x, weight)


def through_onednn(x: Tensor) -> bool:
    """Whether products of ``x`` go through oneDNN: in float32, on a CPU on which it is the faster library."""
    return x.is_cpu and x.dtype == torch.float32 and ONEDNN_LEADS


def _is_intel() -> bool:
    """By the same word of the processor by which MKL chooses its kernels."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return False


HAS_ONEDNN = torch.backends.mkldnn.is_available()
ONEDNN_LEADS = HAS_ONEDNN and not (torch.backends.mkl.is_available() and _is_intel())
"""Whether oneDNN is faster than torch's own products. These are MKL's, which uses AVX-512 on Intel's processors alone:
a Xeon takes 5 to 15 % less time by MKL, and a third less where both factors are transposed."""
