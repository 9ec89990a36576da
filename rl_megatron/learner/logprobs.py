"""Computes log-probs and entropy over a vocabulary-parallel output layer, chunk by chunk.

From logits (`token_logprobs`), without a float32 copy of all of them, or from hidden states (`head_logprobs`), where
logits exist only a chunk at a time, of a float32 product. And the norms of log-probs' gradients in logits, from either.

Letters: T positions, H hidden size, V vocabulary rows of this TP rank, c positions of a chunk. Extra memory is O(c*V)
float32 in both directions (and the gradient of logits or hidden states, in their own dtype). Two all-reduces over TP in
the forward, none in the backward. Cross-entropy over vocabulary shards follows Megatron-LM (arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_megatron.learner.keywords import WEIGHT_ROWS

CPU_CHUNK_BYTES = 4 << 20  # of float32 values: fits the processor's cache


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Log-probs [T] of ``targets`` [T] and entropy [T] of the whole vocabulary, with gradients; float32 nats.

    ``logits`` [T, V] hold rows ``vocab_start ..`` of the vocabulary; rows from ``vocab_size`` on are padding and have
    probability 0. ``group`` is the TP group; every rank of it calls this. ``chunk`` limits the positions computed at
    once; on CPU a chunk is also small enough for the cache.
    """
    if logits.is_cpu:
        chunk = _that_fit(chunk, logits.shape[1])
    valid = min(max(vocab_size - vocab_start, 0), logits.shape[1])
    logprobs, entropy = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, targets, 1.0 / temperature, valid, vocab_start, group, chunk
    )
    return logprobs, entropy


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    chunk: int = 1024,
    announce: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `token_logprobs`, of the logits ``hidden`` [T, H] times ``weight`` [V, H], multiplied in float32.

    The backward pass computes the logits again. If ``weight`` has a ``main_grad`` (megatron's
    DistributedDataParallel), its gradient is added to that and is nowhere else, but to ``announce`` it autograd gets
    one of zeros; gradients of other uses of ``weight`` reach it as ever. The gradient of ``hidden`` is this TP rank's
    share.
    """
    valid = min(max(vocab_size - vocab_start, 0), weight.shape[0])
    logprobs, entropy = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, 1.0 / temperature, valid, vocab_start, group, chunk, announce
    )
    return logprobs, entropy


@torch.no_grad()
def logit_norms(
    output: Tensor,
    targets: Tensor,
    logits: Callable[[Tensor], Tensor],
    *,
    rows: int,
    temperature: float,
    vocab_size: int,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    chunk: int = 1024,
) -> Tensor:
    """Squared norms [T] float32 of the gradient of the log-prob of ``targets`` [T] in the scaled logits, the vector of
    (target or not) - p: (1 - p of the target)² + the sum of the others' p² (arXiv:2602.07078's logit-gradient proxy).

    ``logits`` makes float32 ones [c, ``rows``] of ``output`` [c, ...]; the rest is as in `token_logprobs`. The others
    are summed without the target: of one that is nearly certain 1 - 2 p + the sum of all p² would be rounding alone.
    """
    valid = min(max(vocab_size - vocab_start, 0), rows)
    chunk = _that_fit(chunk, rows) if output.is_cpu else chunk
    local = targets - vocab_start
    here = (local >= 0) & (local < valid)
    peak = torch.full((len(output),), -torch.inf, device=output.device)
    sums = torch.zeros(3, len(output), device=output.device)  # e^x of the target, sums of others' e^x and e^2x
    for a in range(0, len(output) if valid else 0, chunk):
        cut = slice(a, a + chunk)
        x = logits(output[cut])[:, :valid] * (1.0 / temperature)
        peak[cut] = x.amax(1)
        x.sub_(peak[cut, None]).exp_()
        at, mine = local[cut, None].clamp(0, valid - 1), here[cut, None]
        target = x.gather(1, at)
        x.scatter_(1, at, target * ~mine)
        sums[:, cut] = torch.stack([(target * mine).squeeze(1), x.sum(1), x.square_().sum(1)])
        del x  # before the next chunk's
    if group is not None:
        own = peak.clone()
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        factor = (own - peak).exp()
        sums *= torch.stack([factor, factor, factor.square()])
        dist.all_reduce(sums, group=group)
    norms: Tensor = (sums[1].square() + sums[2]) / (sums[0] + sums[1]).square()
    return norms


def float32_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[c, H] times [V, H] -> logits [c, V], multiplied and summed in float32."""
    hidden = hidden.float()
    if weight.dtype == torch.float32:
        return hidden @ weight.T
    out = hidden.new_empty(len(hidden), len(weight))
    for rows in _blocks(len(weight)):
        out[:, rows] = hidden @ weight[rows].float().T
    return out


def _blocks(count: int) -> Iterator[slice]:
    return (slice(a, min(a + WEIGHT_ROWS, count)) for a in range(0, count, WEIGHT_ROWS))


def _that_fit(chunk: int, rows: int) -> int:
    """Positions, ``chunk`` at most, whose logits fit a processor's cache."""
    return max(1, min(chunk, CPU_CHUNK_BYTES // (4 * rows)))


def _sums(x: Tensor, local: Tensor, here: Tensor) -> Tensor:
    """[3, c]: sum of e^x, sum of x e^x, and x of the target if it is ``here``; overwrites ``x`` [c, V]."""
    target = x.gather(1, local[:, None].clamp(0, x.shape[1] - 1)).squeeze(1) * here
    weight = x.exp()
    return torch.stack([weight.sum(1), weight.mul_(x).sum(1), target])


def _shifted(logits: Tensor, scale: float, shift: Tensor) -> Tensor:
    """``logits * scale - shift`` [c, V] in float32: on GPUs in one pass over memory, on CPUs while a copy is cached."""
    if not logits.is_cpu:
        return torch.add(-shift[:, None], logits, alpha=scale)
    x = logits.to(torch.float32, copy=True)
    return torch.add(-shift[:, None], x, alpha=scale, out=x)


def _write_gradient(
    out: Tensor,
    x: Tensor,
    *,
    local: Tensor,
    here: Tensor,
    grad: Tensor,
    entropy: Tensor,
    entropy_grad: Tensor | None,
) -> None:
    """Write the gradient of ``x`` [c, V], log-probs, which it overwrites, to ``out``, which may be ``x``."""
    at = local[:, None].clamp(0, x.shape[1] - 1)
    factor = -grad[:, None]
    if entropy_grad is not None:  # dH/dx = -p (log p + H)
        factor = (x + entropy[:, None]).mul_(-entropy_grad[:, None]).add_(factor)
    if out is x or x.is_cpu:
        x.exp_().mul_(factor).scatter_add_(1, at, (grad * here)[:, None])
        if out is not x:
            out.copy_(x)
    else:  # as many bytes less to write and read again as x has
        own = (grad * here)[:, None] + factor.expand_as(x).gather(1, at) * x.gather(1, at).exp()
        torch.mul(x.exp_(), factor, out=out).scatter_(1, at, own.to(out.dtype))


def _scaled(
    grad: Tensor | None, entropy_grad: Tensor | None, like: Tensor, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Gradients of log-probs and entropy, as those of logits times ``scale`` have them."""
    grad = torch.zeros_like(like) if grad is None else grad * scale
    return grad, None if entropy_grad is None else entropy_grad * scale


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        scale: float,
        valid: int,
        vocab_start: int,
        group: dist.ProcessGroup | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        real = logits[:, :valid]
        peak = real.amax(1).float() if valid else logits.new_full((len(logits),), -torch.inf, dtype=torch.float32)
        peak = peak * scale
        if group is not None:
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        local = targets - vocab_start
        here = (local >= 0) & (local < valid)
        sums = torch.zeros(3, len(logits), dtype=torch.float32, device=logits.device)  # sum e^x, sum x e^x, x[target]
        for a in range(0, len(logits) if valid else 0, chunk):
            x = _shifted(real[a : a + chunk], scale, peak[a : a + chunk])
            sums[:, a : a + chunk] = _sums(x, local[a : a + chunk], here[a : a + chunk])
        if group is not None:
            dist.all_reduce(sums, group=group)
        log_z = sums[0].log()
        logprobs, entropy = sums[2] - log_z, log_z - sums[1] / sums[0]
        ctx.save_for_backward(logits, local, here, peak + log_z, entropy)
        ctx.scale, ctx.valid, ctx.chunk = scale, valid, chunk
        ctx.set_materialize_grads(False)  # most losses do not use the entropy
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, local, here, log_norm, entropy = ctx.saved_tensors
        valid, chunk = ctx.valid, ctx.chunk
        grad, entropy_grad = _scaled(grad, entropy_grad, log_norm, ctx.scale)
        out = torch.empty_like(logits)
        out[:, valid:] = 0
        for a in range(0, len(logits) if valid else 0, chunk):
            cut = slice(a, a + chunk)
            _write_gradient(
                out[cut, :valid],
                _shifted(logits[cut, :valid], ctx.scale, log_norm[cut]),
                local=local[cut],
                here=here[cut],
                grad=grad[cut],
                entropy=entropy[cut],
                entropy_grad=None if entropy_grad is None else entropy_grad[cut],
            )
        return out, None, None, None, None, None, None


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: float,
        valid: int,
        vocab_start: int,
        group: dist.ProcessGroup | None,
        chunk: int,
        announce: bool,
    ) -> tuple[Tensor, Tensor]:
        local = targets - vocab_start
        here = (local >= 0) & (local < valid)
        own = torch.full((len(hidden),), -torch.inf, device=hidden.device)  # the greatest logit of this rank's rows
        sums = torch.zeros(3, len(hidden), device=hidden.device)  # sum e^x, sum x e^x, x[target], of x = logit - own
        for a in range(0, len(hidden) if valid else 0, chunk):
            cut = slice(a, a + chunk)
            x = float32_logits(hidden[cut], weight[:valid]).mul_(scale)
            own[cut] = x.amax(1)
            sums[:, cut] = _sums(x.sub_(own[cut, None]), local[cut], here[cut])
            del x  # before the next chunk's
        peak = own
        if group is not None:
            dist.all_reduce(peak := own.clone(), dist.ReduceOp.MAX, group=group)
            if valid:
                further = own - peak
                sums[1] += further * sums[0]
                sums[:2] *= further.exp()
                sums[2] += further * here
            dist.all_reduce(sums, group=group)
        log_z = sums[0].log()
        logprobs, entropy = sums[2] - log_z, log_z - sums[1] / sums[0]
        ctx.save_for_backward(hidden, local, here, peak + log_z, entropy)
        ctx.weight, ctx.scale, ctx.valid, ctx.chunk, ctx.announce = weight, scale, valid, chunk, announce
        ctx.set_materialize_grads(False)  # most losses do not use the entropy
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, local, here, log_norm, entropy = ctx.saved_tensors
        whole: Tensor = ctx.weight
        weight = whole.detach()[: ctx.valid]
        grad, entropy_grad = _scaled(grad, entropy_grad, log_norm, ctx.scale)
        main_grad: Tensor | None = getattr(whole, "main_grad", None)
        direct = main_grad is not None and main_grad.dtype == torch.float32
        of_weight: Tensor | None = None
        if ctx.needs_input_grad[1]:
            of_weight = main_grad if direct else torch.zeros_like(whole, dtype=torch.float32)
        of_hidden = torch.zeros_like(hidden)
        for a in range(0, len(hidden) if ctx.valid else 0, ctx.chunk):
            cut = slice(a, a + ctx.chunk)
            x = float32_logits(hidden[cut], weight).mul_(ctx.scale).sub_(log_norm[cut, None])
            _write_gradient(
                x,
                x,
                local=local[cut],
                here=here[cut],
                grad=grad[cut],
                entropy=entropy[cut],
                entropy_grad=None if entropy_grad is None else entropy_grad[cut],
            )
            of_hidden[cut] = sum(x[:, rows] @ weight[rows].float() for rows in _blocks(ctx.valid))
            if of_weight is not None:
                of_weight[: ctx.valid].addmm_(x.T, hidden[cut].float())
            del x  # before the next chunk's
        if of_weight is not None and main_grad is not None:
            if not direct:
                main_grad.add_(of_weight)
            of_weight = None  # before zeros take as much
            of_weight = torch.zeros_like(whole) if ctx.announce else None
        if of_weight is not None:
            of_weight = of_weight.to(whole.dtype)
        return of_hidden, of_weight, None, None, None, None, None, None, None
