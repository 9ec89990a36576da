"""Experts' products on GPUs in one call each: torch's grouped matrix products, in bfloat16.

A loop over experts (`fused`) launches a dozen kernels for each; 128 of them keep the host busier than the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_megatron.options.implementation import GROUPED_COLUMNS

Weights = Sequence[Tensor] | Tensor
"""Of experts: a matrix each, or one tensor whose first dimension they are."""
_GENERATIONS = (9, 10)  # compute capabilities of Hopper, and of Blackwell in data centres


def takes(x: Tensor, *weights: Tensor) -> bool:
    """Whether rows ``x`` and experts' ``weights`` have a device, dtype and sizes for which torch has a grouped kernel.

    On other GPUs it loops over experts itself, and waits for their counts first.
    """
    if not (x.is_cuda and x.dtype == torch.bfloat16 and len(x)):
        return False
    aligned = all(size % GROUPED_COLUMNS == 0 for weight in weights for size in weight.shape[-2:])
    return aligned and torch.cuda.get_device_capability(x.device)[0] in _GENERATIONS


class Groups(NamedTuple):
    """Which rows are an expert's, of rows sorted by expert: on their device."""

    ends: Tensor
    """[E] int32: where each expert's rows end."""
    idle: Tensor | None
    """int64: the experts without rows, or None if there are none."""


def groups_of(counts: Sequence[int], x: Tensor) -> Groups:
    """Those of ``counts`` [E] rows of each expert, in ``x``."""
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(x.device, non_blocking=True)
    idle = [expert for expert, count in enumerate(counts) if not count]
    return Groups(ends, torch.tensor(idle).to(x.device, non_blocking=True) if idle else None)


def multiply(x: Tensor, weights: Tensor, groups: Groups) -> Tensor:
    """Rows [n, k], times their experts' ``weights`` [E, k, m] -> [n, m], with gradients."""
    out: Tensor = _Products.apply(x, weights, groups)  # type: ignore[no-untyped-call]
    return out


def own(groups: Groups, x: Tensor) -> Tensor:
    """[n, E] in ``x``'s dtype: 1 where a row is the expert's. Times biases [E, m] it is each row's bias, and that
    product's gradient adds up each expert's rows in one order and in float32."""
    before = torch.arange(len(x), dtype=torch.int32, device=x.device)[:, None] < groups.ends  # and of all later experts
    return before.to(x.dtype).diff(dim=1, prepend=x.new_zeros(len(x), 1))


def grouped_mlp(x: Tensor, probs: Tensor, counts: list[int], fc1: Weights, fc2: Weights, *, recompute: bool) -> Tensor:
    """`fused.expert_mlp` over all experts at once, for what `takes` returns true."""
    weights = [one for some in (fc1, fc2) for one in ([some] if isinstance(some, Tensor) else some)]
    out: Tensor = _GroupedMLP.apply(x, probs, counts, recompute, *weights)  # type: ignore[no-untyped-call]
    return out


def _product(x: Tensor, weights: Tensor, groups: Groups) -> Tensor:
    return F.grouped_mm(x, weights, offs=groups.ends)


def _sums(left: Tensor, right: Tensor, groups: Groups) -> Tensor:
    """``left.T @ right`` over each expert's rows of [n, k] and [n, m] -> [E, k, m]. On Blackwell torch leaves what was
    in memory before for an expert without rows (pytorch issue 172439)."""
    out = F.grouped_mm(left.t(), right, offs=groups.ends)
    return out if groups.idle is None else out.index_fill_(0, groups.idle, 0.0)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.groups = groups
        return _product(x, weights, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weights = ctx.saved_tensors
        grad, (of_x, of_weights, _) = grad.contiguous(), ctx.needs_input_grad
        return (
            _product(grad, weights.mT, ctx.groups) if of_x else None,
            _sums(x, grad, ctx.groups) if of_weights else None,
            None,
        )


class _GroupedMLP(torch.autograd.Function):
    """Lays weights that are apart side by side in either pass, and does not keep them so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, counts: list[int], recompute: bool, *weights: Tensor) -> Tensor:
        half, groups = len(weights) // 2, groups_of(counts, x)
        inside = _product(x, _together(weights[:half]).mT, groups)
        gate, up = inside.chunk(2, -1)
        active = F.silu(gate).mul_(up).mul_(probs[:, None])
        ctx.save_for_backward(x, probs, *weights, *([] if recompute else [inside]))
        ctx.half, ctx.groups = half, groups
        return _product(active, _together(weights[half:]).mT, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, probs, *rest = ctx.saved_tensors
        half, groups, grad, prob = ctx.half, ctx.groups, grad.contiguous(), probs[:, None]
        of_fc1, of_fc2 = any(ctx.needs_input_grad[4 : 4 + half]), any(ctx.needs_input_grad[4 + half :])
        fc1 = _together(rest[:half])
        inside = rest[-1] if len(rest) > 2 * half else _product(x, fc1.mT, groups)
        gate, up = inside.chunk(2, -1)
        gated = F.silu(gate)
        active = gated * up
        grad_active = _product(grad, _together(rest[half : 2 * half]), groups)
        grad_probs = (grad_active * active).sum(-1).to(probs.dtype)
        grad_fc2 = _sums(grad, active.mul_(prob), groups) if of_fc2 else None
        grad_active.mul_(prob)
        del active
        grad_inside = torch.empty_like(inside)
        grad_gate, grad_up = grad_inside.chunk(2, -1)
        torch.mul(grad_active, gated, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad_active.mul_(up), gate, grad_input=grad_gate)
        del gated, grad_active
        grad_weights = (_sums(grad_inside, x, groups) if of_fc1 else None, grad_fc2)
        whole = fc1 is rest[0]
        each = (
            one
            for some in grad_weights
            for one in ([None] * half if some is None else [some] if whole else some.unbind())
        )
        return _product(grad_inside, fc1, groups), grad_probs, None, None, *each


def _together(weights: Sequence[Tensor]) -> Tensor:
    """[E, ...] of E tensors, or of one that is that."""
    return weights[0] if weights[0].ndim == 3 else torch.stack([*weights])
