"""Root-mean-square norms of tokens."""

from __future__ import annotations

import torch
from torch import Tensor


class Norm:
    """A root-mean-square norm of the last dimension by ``weight``, plus 1 where it is ``zero_centered``."""

    def __init__(self, weight: Tensor, eps: Tensor, *, zero_centered: bool) -> None:
        self.weight, self._eps, self._zero_centered = weight, eps, zero_centered

    def __call__(self, x: Tensor) -> Tensor:
        """The normed ``x``."""
        return rms_norm(x, self.weight + 1 if self._zero_centered else self.weight, self._eps)


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """Root-mean-square norm over the last dimension, the mean in float32 (Zhang and Sennrich, 2019); ``eps`` []."""
    # vector_norm reads x once; torch's own rms_norm makes three passes on CPU.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
    normed: Tensor = (x * scale).to(x.dtype).mul_(weight)
    return normed
