"""TransformerEngine's multi-tensor kernels, written in torch by their documented semantics (its csrc/multi_tensor).

Each takes a chunk's size and a flag, which are the kernels' own, and lists of tensors, one entry a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def l2norm(chunk: int, flag: Tensor, lists: Sequence[Sequence[Tensor]], each: bool) -> tuple[Tensor, Tensor]:
    """The norm over all tensors of the one list, and of each; float32."""
    norms = torch.stack([torch.linalg.vector_norm(x.float()) for x in lists[0]])
    return torch.linalg.vector_norm(norms).reshape(1), norms if each else norms[:0]


def scale(chunk: int, flag: Tensor, lists: Sequence[Sequence[Tensor]], factor: float) -> None:
    """Writes the first list's tensors, scaled, into the second's."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * factor)


def adam(
    chunk: int,
    flag: Tensor,
    lists: Sequence[Sequence[Tensor]],
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    corrected: int,
    decay: float,
) -> None:
    """One step of Adam: gradients, parameters, both moments and, if there is a fifth list, float32 weights, of which
    the parameters get a copy. Moments must be float32: `FusedAdam` makes temporary copies of others."""
    gradients, parameters, means, squares, *weights = lists
    for i, (gradient, parameter, mean, square) in enumerate(zip(gradients, parameters, means, squares, strict=True)):
        assert mean.dtype == square.dtype == torch.float32
        weight = weights[0][i] if weights else parameter
        wide, by = weight.float(), gradient.float()
        if not decoupled:
            by = by + decay * wide
        mean.mul_(beta1).add_(by, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(by, by, value=1 - beta2)
        first, second = (1 - beta1**step, 1 - beta2**step) if corrected else (1.0, 1.0)
        update = (mean / first) / ((square / second).sqrt() + eps)
        if decoupled:
            update = update + decay * wide
        wide = wide - rate * update
        weight.copy_(wide)
        parameter.copy_(wide)
