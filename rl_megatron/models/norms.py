"""Root-mean-square norms of tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """Root-mean-square norm over the last dimension, the mean in float32 (Zhang and Sennrich, 2019); ``eps`` []."""
    # vector_norm reads x once; torch's own rms_norm makes three passes on CPU.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
    normed: Tensor = (x * scale).to(x.dtype).mul_(weight)
    return normed
