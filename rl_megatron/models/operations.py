"""Operations of the plain-torch decoder: products with a weight matrix, and root-mean-square norms.

A product uses whichever CPU library is faster for its size on this processor.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

# If oneDNN leads, it takes half the time of MKL from about this size on. Below, its 8 us of overhead show.
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
    """True if products of ``x`` go through oneDNN: in float32, on a CPU on which it is the faster library."""
    return x.is_cpu and x.dtype == torch.float32 and ONEDNN_LEADS


def through_wide_mkl(x: Tensor) -> bool:
    """True if products of ``x`` are MKL's with AVX-512: in float32, on a CPU of Intel's that has it."""
    return x.is_cpu and x.dtype == torch.float32 and MKL_IS_WIDE


def _processor() -> str:
    try:
        return Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return ""


def _leads() -> tuple[bool, bool]:
    """`ONEDNN_LEADS` and `MKL_IS_WIDE`, by the processor's maker and flags."""
    processor, mkl = _processor(), torch.backends.mkl.is_available()
    of_intel, wide = "GenuineIntel" in processor, "avx512f" in processor.split()
    as_wide = bool(processor) and (of_intel or not wide)  # MKL's vectors are as wide as oneDNN's, the widest there are
    return HAS_ONEDNN and not (mkl and as_wide), mkl and of_intel and wide


HAS_ONEDNN = torch.backends.mkldnn.is_available()
ONEDNN_LEADS, MKL_IS_WIDE = _leads()
"""True if oneDNN is faster than torch's own products; and true if these use AVX-512. They are MKL's, which uses that on
Intel's processors alone. A Xeon takes 5 to 15 % less time by MKL, an AMD EPYC without AVX-512 2 to 25 %, and both up to
a third less where both factors are transposed."""


class Norm:
    """A root-mean-square norm of the last dimension by ``weight``, plus 1 where it is ``zero_centered``."""

    def __init__(self, weight: Tensor, eps: Tensor, *, zero_centered: bool) -> None:
        self.weight, self._eps, self._zero_centered = weight, eps, zero_centered

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the normed ``x``."""
        return rms_norm(x, self.weight + 1 if self._zero_centered else self.weight, self._eps)


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """Root-mean-square norm over the last dimension, the mean in float32 (Zhang and Sennrich, 2019); ``eps`` []."""
    # vector_norm reads x once; torch's own rms_norm makes three passes on CPU.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
    normed: Tensor = (x * scale).to(x.dtype).mul_(weight)
    return normed
