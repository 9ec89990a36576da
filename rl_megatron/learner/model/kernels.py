"""Hand-written gradients of the decoder's layers, which pass over memory less often than autograd does.

Float32 matrix products on a CPU go through oneDNN where that is faster than torch's own (`through_onednn`), but for
small ones. oneDNN compiles a kernel per shape, so ragged row counts are rounded up to a few sizes.

On GPUs the experts' products are one call each: torch's grouped matrix products, in bfloat16. A loop over experts
launches a dozen kernels for each; 128 of them keep the host busier than the GPU.

Causal attention has a form for a CPU with AVX-512, by one thread. torch's kernel multiplies blocks of 64 queries of one
head by MKL. Sequences of middling length are faster with several heads in one batched product, and where oneDNN is
faster than MKL, long ones with larger blocks by that.
Letters: B sequences, L positions of each, H query heads, G of keys and values, d and e the widths of keys and of
values, n queries of a block, R = H / G.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_megatron.config.activations import GROUPED_COLUMNS
from rl_megatron.learner.packed import Slots
from rl_megatron.models.operations import MIN_ONEDNN_FLOPS, through_onednn, through_wide_mkl

Weights = Sequence[Tensor] | Tensor
"""The experts' weights: a matrix each, or one tensor with experts as its first dimension."""
_GENERATIONS = (9, 10)  # compute capabilities of Hopper, and of Blackwell in data centers


def takes(x: Tensor, *weights: Tensor) -> bool:
    """True if rows ``x`` and experts' ``weights`` have a device, dtype and sizes for which torch has a grouped kernel.

    On other GPUs it loops over experts itself, and waits for their counts first.
    """
    if not (x.is_cuda and x.dtype == torch.bfloat16 and len(x)):
        return False
    aligned = all(size % GROUPED_COLUMNS == 0 for weight in weights for size in weight.shape[-2:])
    return aligned and torch.cuda.get_device_capability(x.device)[0] in _GENERATIONS


class Groups(NamedTuple):
    """The rows of each expert, of rows sorted by expert: on their device."""

    ends: Tensor
    """[E] int32, the end of each expert's rows."""
    idle: Tensor | None
    """int64: the experts without rows, or None if there are none."""


def make_expert_groups(counts: Sequence[int], x: Tensor) -> Groups:
    """Returns the groups of ``counts`` [E] rows of each expert, in ``x``."""
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
    before = torch.arange(len(x), dtype=torch.int32, device=x.device)[:, None] < groups.ends  # true at later ones too
    return before.to(x.dtype).diff(dim=1, prepend=x.new_zeros(len(x), 1))


def grouped_mlp(x: Tensor, probs: Tensor, counts: list[int], fc1: Weights, fc2: Weights, *, recompute: bool) -> Tensor:
    """Returns `expert_mlp` over all experts in one call, for input that `takes` accepts."""
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
        half, groups = len(weights) // 2, make_expert_groups(counts, x)
        inside = _product(x, _stack(weights[:half]).mT, groups)
        gate, up = inside.chunk(2, -1)
        active = F.silu(gate).mul_(up).mul_(probs[:, None])
        ctx.save_for_backward(x, probs, *weights, *([] if recompute else [inside]))
        ctx.half, ctx.groups = half, groups
        return _product(active, _stack(weights[half:]).mT, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, probs, *rest = ctx.saved_tensors
        half, groups, grad, prob = ctx.half, ctx.groups, grad.contiguous(), probs[:, None]
        of_fc1, of_fc2 = any(ctx.needs_input_grad[4 : 4 + half]), any(ctx.needs_input_grad[4 + half :])
        fc1 = _stack(rest[:half])
        inside = rest[-1] if len(rest) > 2 * half else _product(x, fc1.mT, groups)
        gate, up = inside.chunk(2, -1)
        gated = F.silu(gate)
        active = gated * up
        grad_active = _product(grad, _stack(rest[half : 2 * half]), groups)
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


def _stack(weights: Sequence[Tensor]) -> Tensor:
    """[E, ...] of E tensors, or of one that is that."""
    return weights[0] if weights[0].ndim == 3 else torch.stack([*weights])


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
    """Lays rows [rows, ...] out as [slots, ...]. The backward pass drops the gradient of the padding."""
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
    """Returns the inverse of ``into_slots``: [slots, ...] -> [rows, ...]."""
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
    if takes(x, fc1[0], fc2[0]):
        return grouped_mlp(x, probs, counts, fc1, fc2, recompute=recompute)
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
    """Returns one window an expert. For oneDNN it is rounded up with neighbors' rows; their results are discarded."""
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


LEAST = 80  # positions of a sequence from which `batched_attention` is faster than torch's kernel, by oneDNN
LONG = 384  # positions from which `long_attention`, which keeps no scores for the backward pass, is faster
BY_MKL = range(160, 513)  # positions for which `batched_attention` is faster than torch's kernel, by MKL
BATCHED_ROWS = 64  # positions of a block of `batched_attention`
ROWS = 512  # queries of a block of `long_attention` at most
SCORES = 2**18  # scores of a block at most: they fit the cache
AttentionKernel = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Maps queries [B, L, H, d], keys [B, L, G, d], values [B, L, G, e] and a scale -> [B, L, H, e], with gradients; each
position sees those up to it."""


def faster_attention(query: Tensor, length: int) -> AttentionKernel | None:
    """Returns a kernel that is faster than torch's, which shares heads out among several threads, or None."""
    if torch.get_num_threads() > 1:
        return None
    if through_onednn(query) and length >= LEAST:
        return batched_attention if length < LONG else long_attention
    return batched_attention if through_wide_mkl(query) and length in BY_MKL else None


def batched_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """An `AttentionKernel` that keeps its shares, half of L * L of a head."""
    out: Tensor = _Batched.apply(query, key, value, scale)  # type: ignore[no-untyped-call]
    return out


def long_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """An `AttentionKernel` that computes its shares again in the backward pass."""
    out: Tensor = _Long.apply(query, key, value, scale)  # type: ignore[no-untyped-call]
    return out


class _Batched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        groups = key.shape[2]
        q, k, v = _joined(query, groups).mul_(scale), _joined(key, groups), _joined(value, groups)
        out, shares = q.new_empty(*q.shape[:2], v.shape[-1]), []
        for some, rows, start, stop in _batches(len(q), query.shape[1], query.shape[2] // groups):
            scores = torch.bmm(q[some, rows], k[some, :stop].mT)
            scores.view(len(scores), stop - start, -1, stop)[..., start:] += _later(stop - start)[:, None]
            shares.append(scores.softmax(-1))
            out[some, rows] = torch.bmm(shares[-1], v[some, :stop])
        ctx.save_for_backward(q, k, v, *shares)
        ctx.scale, ctx.shape = scale, query.shape
        return _parted(out, *query.shape[:3])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, *shares = ctx.saved_tensors
        count, length, heads = ctx.shape[:3]
        groups = len(k) // count
        grad = _joined(grad, groups)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for share, (some, rows, _, stop) in zip(shares, _batches(len(q), length, heads // groups), strict=True):
            grad_v[some, :stop] += torch.bmm(share.mT, grad[some, rows])
            above = torch.bmm(grad[some, rows], v[some, :stop].mT)
            above = torch._softmax_backward_data(above, share, -1, share.dtype)
            grad_q[some, rows] = torch.bmm(above, k[some, :stop])
            grad_k[some, :stop] += torch.bmm(above.mT, q[some, rows])
        found = _parted(grad_q.mul_(ctx.scale), count, length, heads)
        return found, _parted(grad_k, count, length, groups), _parted(grad_v, count, length, groups), None


def _batches(groups: int, length: int, shared: int) -> Iterator[tuple[slice, slice, int, int]]:
    """Yields for each block its groups of all B * G, as many as have scores that fit the cache. Its rows among [L * R],
    its first position and the one after its last follow."""
    size = max(1, SCORES // (min(BATCHED_ROWS, length) * shared * length))
    for first, start in product(range(0, groups, size), range(0, length, BATCHED_ROWS)):
        stop = min(start + BATCHED_ROWS, length)
        yield slice(first, first + size), slice(start * shared, stop * shared), start, stop


def _joined(x: Tensor, groups: int) -> Tensor:
    """[B, L, G * R, d] -> a copy [B * G, L * R, d]."""
    parted: Tensor = x.unflatten(2, (groups, -1)).transpose(1, 2)
    return parted.clone(memory_format=torch.contiguous_format).view(len(x) * groups, -1, x.shape[-1])


def _parted(x: Tensor, count: int, length: int, heads: int) -> Tensor:
    """[B * G, L * R, d] -> [B, L, G * R, d]."""
    return x.view(count, len(x) // count, length, -1, x.shape[-1]).transpose(1, 2).reshape(count, length, heads, -1)


class _Long(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        for place, q, k, v in _groups(query, key, value):
            for rows, seen in _blocks(q):
                share = _shares(_flat(q[rows]) * scale, k[:seen], rows)
                _put(out[place][rows], matmul_transposed(share, v[:seen].t()))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value = ctx.saved_tensors
        grad_query, grad_key, grad_value = (torch.empty(x.shape) for x in (query, key, value))
        for place, q, k, v in _groups(query, key, value):
            into_k, into_v = (torch.zeros(x.shape[1], len(x)) for x in (k, v))
            for rows, seen in _blocks(q):
                scaled, above = _flat(q[rows]) * ctx.scale, _flat(grad[place][rows])
                share = _shares(scaled, k[:seen], rows)
                into_v[:, :seen] += matmul_transposed(above.t(), share.t())
                above = torch._softmax_backward_data(matmul_transposed(above, v[:seen]), share, -1, share.dtype)
                _put(grad_query[place][rows], matmul_transposed(above, k[:seen].t()).mul_(ctx.scale))
                into_k[:, :seen] += matmul_transposed(scaled.t(), above.t())
            sequence, heads = place[0], place[2].start // q.shape[1]
            grad_key[sequence, :, heads], grad_value[sequence, :, heads] = into_k.t(), into_v.t()
        return grad_query, grad_key, grad_value, None


def _groups(
    query: Tensor, key: Tensor, value: Tensor
) -> Iterator[tuple[tuple[int, slice, slice], Tensor, Tensor, Tensor]]:
    """Yields query heads that share keys: the place in ``query``, queries [L, R, d], keys [L, d] and values [L, e]."""
    shared = query.shape[2] // key.shape[2]
    for sequence in range(len(query)):
        for head in range(key.shape[2]):
            place = sequence, slice(None), slice(head * shared, (head + 1) * shared)
            yield place, query[place], key[sequence, :, head].contiguous(), value[sequence, :, head].contiguous()


def _blocks(query: Tensor) -> Iterator[tuple[slice, int]]:
    """Yields the positions of each block of [L, R, d], and how many keys it sees."""
    size = max(1, min(ROWS, SCORES // len(query)) // query.shape[1])
    for start in range(0, len(query), size):
        stop = min(start + size, len(query))
        yield slice(start, stop), stop


def _flat(x: Tensor) -> Tensor:
    """[n, R, d] -> [R * n, d]."""
    return x.transpose(0, 1).reshape(-1, x.shape[-1])


def _put(into: Tensor, x: Tensor) -> None:
    """Copies [R * n, e] into [n, R, e]."""
    into.copy_(x.view(into.shape[1], len(into), -1).transpose(0, 1))


def _shares(scaled: Tensor, key: Tensor, rows: slice) -> Tensor:
    """Returns each query's shares [R * n, keys] of the values that it sees."""
    scores, size = matmul_transposed(scaled, key), rows.stop - rows.start
    scores.view(-1, size, len(key))[..., rows] += _later(size)
    return scores.softmax(-1)


@lru_cache(BATCHED_ROWS)
def _later(size: int) -> Tensor:
    """[size, size]: minus infinity for positions after the query's, else 0."""
    return torch.full((size, size), -torch.inf).triu_(1)
