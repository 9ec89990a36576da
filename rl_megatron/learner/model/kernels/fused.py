"""Hand-written gradients of the decoder's layers, which pass over memory less often than autograd does.

Float32 matrix products on a CPU go through oneDNN where that is faster than torch's own (`through_onednn`), but for
small ones. oneDNN compiles a kernel per shape, so ragged row counts are rounded up to a few sizes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_megatron.learner.model.kernels import grouped
from rl_megatron.learner.model.kernels.grouped import Weights
from rl_megatron.learner.packed import Slots
from rl_megatron.models.linear import MIN_ONEDNN_FLOPS, through_onednn

WEIGHT_GRAD_ROWS = 1024  # oneDNN first copies transposed rows: so many fit the cache
ROW_BLOCK = 64  # an expert's rows are rounded up to it, so that later steps reuse the compiled kernels


def matmul_transposed(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T`` of [m, k] and [n, k] (any strides) -> [m, n]. No gradient."""
    if 2 * a.numel() * len(b) >= MIN_ONEDNN_FLOPS and through_onednn(a):
        out: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
        return out
    return a @ b.t()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` over the last dimension of [..., k], with gradients."""
    out: Tensor = _Linear.apply(x, weight)  # type: ignore[no-untyped-call]
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return matmul_transposed(x.flatten(0, -2), weight).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)
        grad_x = matmul_transposed(rows, weight.t()).view_as(x)
        if not ctx.needs_input_grad[1]:  # it is frozen
            return grad_x, None
        if not through_onednn(rows):
            return grad_x, rows.t() @ inputs
        grad_weight = torch.zeros_like(weight)
        for start in range(0, len(rows), WEIGHT_GRAD_ROWS):
            part = slice(start, start + WEIGHT_GRAD_ROWS)
            grad_weight += matmul_transposed(rows[part].t(), inputs[part].t())
        return grad_x, grad_weight


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x**2) + eps) * weight`` over the last dimension."""
    if not x.is_cpu:
        if weight.dtype != x.dtype:
            return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, eps)  # one kernel there
    out: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        out: Tensor = (wide * scale).mul_(weight).to(x.dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        size = x.shape[-1]
        normed, grad = x.float() * scale, grad.float()
        product = (grad * normed).view(-1, size)
        along = (product @ weight.float()).div_(size).view(scale.shape)  # mean of grad * weight * normed
        grad_x = (grad * weight).addcmul_(normed, along, value=-1).mul_(scale)
        return grad_x.to(x.dtype), product.sum(0).to(weight.dtype), None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [t, n, d] by ``cos`` and ``sin`` [t, 1, r / 2], halves convention (HF's rotate_half).

    The first r dimensions are rotated; the rest is unchanged.
    """
    out: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1.0), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    size = 2 * cos.shape[-1]
    a, b = x[..., :size].float().chunk(2, -1)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    first, second = out[..., :size].chunk(2, -1)
    torch.mul(a, cos, out=first).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=second).addcmul_(a, sin, value=sign)
    if size < x.shape[-1]:
        out[..., size:] = x[..., size:]
    return out.to(x.dtype)


def into_slots(x: Tensor, slots: Slots) -> Tensor:
    """Lay rows [rows, ...] out as [slots, ...]. The backward pass drops the gradient of the padding."""
    out: Tensor = _IntoSlots.apply(x, slots)  # type: ignore[no-untyped-call]
    return out


class _IntoSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Slots) -> Tensor:
        ctx.slots = slots
        return x.index_select(0, slots.row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.slots.slot), None


def from_slots(x: Tensor, slots: Slots) -> Tensor:
    """The inverse of ``into_slots``: [slots, ...] -> [rows, ...]."""
    out: Tensor = _FromSlots.apply(x, slots)  # type: ignore[no-untyped-call]
    return out


class _FromSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Slots) -> Tensor:
        ctx.slots = slots
        return x.index_select(0, slots.slot)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.slots.row).index_fill_(0, ctx.slots.padding, 0), None


def expert_mlp(
    x: Tensor, probs: Tensor, counts: list[int], fc1: Weights, fc2: Weights, *, recompute: bool = False
) -> Tensor:
    """``probs * fc2(silu(gate) * up)`` with ``gate, up = fc1(x)`` for rows [n, h] sorted by expert -> [n, h].

    ``counts`` [E] rows of each expert, ``fc1[e]`` [2f, h], ``fc2[e]`` [h, f], ``probs`` [n]. With ``recompute`` only
    ``x`` and ``probs`` are kept, and the backward pass multiplies by ``fc1`` again, to the same bits.
    """
    if grouped.takes(x, fc1[0], fc2[0]):
        return grouped.grouped_mlp(x, probs, counts, fc1, fc2, recompute=recompute)
    out: Tensor = _ExpertMLP.apply(x, probs, counts, recompute, *fc1, *fc2)  # type: ignore[no-untyped-call]
    return out


class _ExpertMLP(torch.autograd.Function):
    """Computes one expert at a time from input to output, so its intermediate values stay in the processor's cache."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, counts: list[int], recompute: bool, *weights: Tensor) -> Tensor:
        out, hidden, windows = torch.empty_like(x), [], _windows(counts, x)
        for window, fc1, fc2 in zip(windows, weights, weights[len(counts) :], strict=False):
            inside = matmul_transposed(x[window.rows], fc1)
            gate, up = inside.chunk(2, -1)
            active = (F.silu(gate).mul_(up) * probs[window.rows, None]).to(x.dtype)
            out[window.own] = matmul_transposed(active, fc2)[window.inner]
            if not recompute:
                hidden.append(inside)
        ctx.save_for_backward(x, probs, *weights, *hidden)
        ctx.windows = windows
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, probs, *rest = ctx.saved_tensors
        count = len(ctx.windows)
        hidden, trained = rest[2 * count :] or [None] * count, ctx.needs_input_grad[4:]
        grad_x, grad_probs = torch.empty_like(x), torch.empty_like(probs)
        grad_fc1, grad_fc2 = list[Tensor | None](), list[Tensor | None]()
        for window, fc1, fc2, saved, of_fc1, of_fc2 in zip(
            ctx.windows, rest, rest[count:], hidden, trained, trained[count:], strict=False
        ):
            inside = matmul_transposed(x[window.rows], fc1) if saved is None else saved
            prob = torch.zeros_like(probs[window.rows])[:, None]
            prob[window.inner, 0] = probs[window.own]  # 0 for other experts' rows: they add nothing to the gradients
            gate, up = inside.chunk(2, -1)
            gated = F.silu(gate)
            active, grad_out = gated * up, grad[window.rows]
            grad_active = matmul_transposed(grad_out, fc2.t())
            grad_fc2.append(matmul_transposed(grad_out.t(), (active * prob).to(x.dtype).t()) if of_fc2 else None)
            grad_probs[window.own] = (grad_active * active).sum(-1)[window.inner].to(probs.dtype)
            grad_active = (grad_active * prob).to(x.dtype)
            grad_inside = torch.empty_like(inside)
            grad_gate, grad_up = grad_inside.chunk(2, -1)
            torch.mul(grad_active, gated, out=grad_up)
            torch.ops.aten.silu_backward.grad_input(grad_active.mul_(up), gate, grad_input=grad_gate)
            grad_fc1.append(matmul_transposed(grad_inside.t(), x[window.rows].t()) if of_fc1 else None)
            grad_x[window.own] = matmul_transposed(grad_inside, fc1.t())[window.inner]
        return grad_x, grad_probs, None, None, *grad_fc1, *grad_fc2


class _Window(NamedTuple):
    """The rows computed for one expert, and its own rows among all rows and among the window's."""

    rows: slice
    own: slice
    inner: slice


def _windows(counts: list[int], x: Tensor) -> list[_Window]:
    """One window an expert. For oneDNN it is rounded up with neighbours' rows, whose results are discarded."""
    block, total = ROW_BLOCK if through_onednn(x) else 1, len(x)
    out, start = [], 0
    for count in counts:
        size = -(-count // block) * block
        size = size if size <= total else count
        first = min(start, total - size)
        own = slice(start, start + count)
        out.append(_Window(slice(first, first + size), own, slice(start - first, start - first + count)))
        start += count
    return out
