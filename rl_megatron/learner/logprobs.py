"""Computes log-probs and entropy from vocabulary-parallel logits chunk by chunk, without a float32 copy of all logits.

Letters: T positions, V vocabulary rows of this TP rank, c positions of a chunk. Extra memory is O(c*V) float32 in both
directions (and the gradient of the logits, in their own dtype). Two all-reduces over TP in the forward, none in the
backward. Cross-entropy over vocabulary shards follows Megatron-LM (arXiv:1909.08053).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

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
        chunk = max(1, min(chunk, CPU_CHUNK_BYTES // (4 * logits.shape[1])))
    valid = min(max(vocab_size - vocab_start, 0), logits.shape[1])
    logprobs, entropy = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, targets, 1.0 / temperature, valid, vocab_start, group, chunk
    )
    return logprobs, entropy


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
            x = real[a : a + chunk].to(torch.float32, copy=True).mul_(scale).sub_(peak[a : a + chunk, None])
            index = local[a : a + chunk, None].clamp(0, valid - 1)
            sums[2, a : a + chunk] = x.gather(1, index).squeeze(1) * here[a : a + chunk]
            weight = x.exp()
            sums[0, a : a + chunk] = weight.sum(1)
            sums[1, a : a + chunk] = weight.mul_(x).sum(1)
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
        if grad is None:
            grad = torch.zeros_like(log_norm)
        out = torch.empty_like(logits)
        out[:, valid:] = 0
        for a in range(0, len(logits) if valid else 0, chunk):
            cut = slice(a, a + chunk)
            p = logits[cut, :valid].to(torch.float32, copy=True).mul_(ctx.scale).sub_(log_norm[cut, None])
            if entropy_grad is None:
                p.exp_().mul_(-grad[cut, None])
            else:  # dH/dx = -p (log p + H)
                factor = (p + entropy[cut, None]).mul_(entropy_grad[cut, None]).add_(grad[cut, None])
                p.exp_().mul_(factor.neg_())
            p.scatter_add_(1, local[cut, None].clamp(0, valid - 1), (grad[cut] * here[cut])[:, None])
            out[cut, :valid] = p.mul_(ctx.scale)
        return out, None, None, None, None, None, None
