"""Heads: turn the last pipeline stage's output into log-probs and entropy, or into values: by a layer of one value a
position, in place of the output layer or in addition to it.

Logits of chosen tokens, and the most probable tokens, over a vocabulary that TP ranks split by rows.
Log-probs and entropy are computed chunk by chunk: from logits (`token_logprobs`), without a float32 copy of all of
them, or from hidden states (`head_logprobs`), where logits exist only a chunk at a time, of a float32 product. And the
norms of log-probs' gradients in logits, from either.

Letters: T positions, H hidden size, V vocabulary rows of this TP rank, c positions of a chunk, k tokens a position.
``group`` is the TP group, None for one rank; every rank of it calls these functions, with ``vocab_start`` rows before
its own. Extra memory of log-probs is O(c*V) float32 in both directions (and the gradient of logits or hidden states, in
their own dtype). Two all-reduces over TP in the forward, none in the backward. Cross-entropy over vocabulary shards
follows Megatron-LM (arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from rl_megatron.feature import features, load_side
from rl_megatron.learner.keywords import WEIGHT_ROWS
from rl_megatron.learner.packed import PackedMicroBatch
from rl_megatron.types import Want

CPU_CHUNK_BYTES = 4 << 20  # float32 values of this size fit the processor's cache
_LEFT_OUT = -1e30
"""A logit of probability 0. It stays finite when it is multiplied by that probability, which -inf does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The tokens that log-probs of some positions are over; others are over the whole vocabulary. Work and memory
    beyond a head's own product are O(K) for the K kept tokens of this rank's rows, O(V) for each other position."""

    rows: Tensor
    """[K] int64: the position of each kept token, in order."""
    columns: Tensor
    """[K] int64: its row of this rank's part of the vocabulary."""
    ends: Sequence[int]
    """How many kept tokens stand before each of the T positions, and their number at the end."""
    runs: Mapping[bool, Sequence[slice]]
    """The runs of positions with kept tokens (True) and of those with the whole vocabulary (False)."""

    @classmethod
    def of(cls, positions: Tensor, tokens: Tensor, limited: Tensor, vocab: range) -> Kept:
        """Makes it from the ``tokens`` [n] at ``positions`` [n], in order, and which positions are ``limited`` [T], for
        a rank with the rows ``vocab``. On a GPU it waits three times."""
        here = (tokens >= vocab.start) & (tokens < vocab.stop)
        rows = positions[here]
        counts = torch.bincount(rows, minlength=len(limited))
        changes = [0, *(limited.diff().nonzero()[:, 0] + 1).tolist(), len(limited)]
        runs, first = [slice(*pair) for pair in pairwise(changes)], bool(limited[:1].any())
        return cls(
            rows=rows,
            columns=tokens[here] - vocab.start,
            ends=[0, *counts.cumsum(0).tolist()],
            runs={first: runs[::2], not first: runs[1::2]},
        )

    def gather(self, logits: Callable[[slice], Tensor], chunk: int) -> Tensor:
        """Returns the logits [K] of all kept tokens from those [c, V] of each chunk."""
        found = [torch.empty(0, device=self.rows.device)]
        for cut in _cuts(self.runs[True], chunk):
            mine = slice(self.ends[cut.start], self.ends[cut.stop])
            found.append(logits(cut)[self.rows[mine] - cut.start, self.columns[mine]])
        return torch.cat(found)

    def spread(self, x: Tensor, cut: slice, width: int) -> Tensor:
        """Inverts `gather` for one chunk: returns its part of ``x`` [K] as [c, ``width``], with zeros elsewhere."""
        mine = slice(self.ends[cut.start], self.ends[cut.stop])
        out = x.new_zeros(cut.stop - cut.start, width)
        out[self.rows[mine] - cut.start, self.columns[mine]] = x[mine]
        return out

    def sums(self, x: Tensor, local: Tensor, here: Tensor) -> Tensor:
        """Returns `_sums` of logits ``x`` [K] at all positions, [3, T]; zeros at those of the whole vocabulary."""
        weight, hit = x.exp(), self.columns == local[self.rows]
        out = torch.zeros(3, len(local), device=x.device)
        for cut in self.runs[True]:
            out[2, cut] = here[cut] * _LEFT_OUT
        out[0].index_add_(0, self.rows, weight)
        out[1].index_add_(0, self.rows, weight.mul_(x))
        out[2].scatter_reduce_(0, self.rows, x.where(hit, -torch.inf), "amax")
        return out

    def gradient(
        self, x: Tensor, *, local: Tensor, grad: Tensor, entropy: Tensor, entropy_grad: Tensor | None
    ) -> Tensor:
        """Returns the gradient [K] of log-probs ``x`` [K]; the rest is as in `_write_gradient`."""
        hit, factor = self.columns == local[self.rows], -grad[self.rows]
        if entropy_grad is not None:
            factor -= (x + entropy[self.rows]) * entropy_grad[self.rows]
        return x.exp().mul_(factor).add_(grad[self.rows] * hit)


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    chunk: int = 1024,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns log-probs [T] of ``targets`` [T] and entropy [T] of the whole vocabulary, with gradients; float32 nats.

    ``logits`` [T, V] hold rows ``vocab_start ..`` of the vocabulary; rows from ``vocab_size`` on are padding and have
    probability 0. ``group`` is the TP group; every rank of it calls this. ``chunk`` limits the positions computed
    together; on CPU a chunk is also small enough for the cache. Log-probs and entropy may be over ``kept`` tokens.
    """
    if logits.is_cpu:
        chunk = _that_fit(chunk, logits.shape[1])
    valid = min(max(vocab_size - vocab_start, 0), logits.shape[1])
    logprobs, entropy = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, targets, 1.0 / temperature, valid, vocab_start, group, chunk, kept
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
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns `token_logprobs` of the logits ``hidden`` [T, H] times ``weight`` [V, H], multiplied in float32.

    The backward pass computes the logits again. If ``weight`` has a ``main_grad`` (megatron's DistributedDataParallel),
    its gradient is added to that and is nowhere else. To ``announce`` it, autograd gets one of zeros; gradients of
    other uses of ``weight`` reach it as ever. The gradient of ``hidden`` is this TP rank's share.
    """
    valid = min(max(vocab_size - vocab_start, 0), weight.shape[0])
    logprobs, entropy = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, 1.0 / temperature, valid, vocab_start, group, chunk, announce, kept
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
    kept: Kept | None = None,
) -> Tensor:
    """Returns squared norms [T] float32 of the gradient, (target or not) - p, of the log-prob of ``targets`` [T] in
    scaled logits. They are (1 - p of the target)² + the sum of the others' p² (arXiv:2602.07078's logit-gradient
    proxy).

    ``logits`` makes float32 ones [c, ``rows``] of ``output`` [c, ...]; the rest is as in `token_logprobs`. The others
    are summed without the target: of one that is nearly certain 1 - 2 p + the sum of all p² would be rounding alone.
    """
    valid = min(max(vocab_size - vocab_start, 0), rows)
    chunk = _that_fit(chunk, rows) if output.is_cpu else chunk
    local = targets - vocab_start
    here = (local >= 0) & (local < valid)
    peak = torch.full((len(output),), -torch.inf, device=output.device)
    sums = torch.zeros(3, len(output), device=output.device)  # e^x of the target, sums of others' e^x and e^2x
    for cut in _cuts(_whole(kept, len(output), valid), chunk):
        x = logits(output[cut])[:, :valid] * (1.0 / temperature)
        peak[cut] = x.amax(1)
        x.sub_(peak[cut, None]).exp_()
        at, mine = local[cut, None].clamp(0, valid - 1), here[cut, None]
        target = x.gather(1, at)
        x.scatter_(1, at, target * ~mine)
        sums[:, cut] = torch.stack([(target * mine).squeeze(1), x.sum(1), x.square_().sum(1)])
        del x  # frees it before the next chunk's
    if kept is not None:
        flat = kept.gather(lambda cut: logits(output[cut]), chunk) * (1.0 / temperature)
        peak.scatter_reduce_(0, kept.rows, flat, "amax").clamp_(min=_LEFT_OUT)
        flat.sub_(peak[kept.rows]).exp_()
        hit = kept.columns == local[kept.rows]
        for out, part in zip(sums, (flat * hit, flat * ~hit, flat.square() * ~hit), strict=True):
            out.index_add_(0, kept.rows, part)
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
    """Returns how many positions, ``chunk`` at most, have logits that fit a processor's cache."""
    return max(1, min(chunk, CPU_CHUNK_BYTES // (4 * rows)))


def _cuts(runs: Iterable[slice], chunk: int) -> Iterator[slice]:
    """Cuts runs of positions into slices of at most ``chunk``."""
    return (slice(a, min(a + chunk, run.stop)) for run in runs for a in range(run.start, run.stop, chunk))


def _whole(kept: Kept | None, positions: int, valid: int) -> Sequence[slice]:
    """Returns the runs of positions whose log-probs are over the whole vocabulary, for a rank with ``valid`` rows."""
    if not valid:
        return ()
    return (slice(0, positions),) if kept is None else kept.runs[False]


def _every(kept: Kept | None, positions: int, valid: int, chunk: int) -> Iterator[tuple[slice, bool]]:
    """All positions in slices of at most ``chunk``, and if their log-probs are over kept tokens."""
    yield from ((cut, False) for cut in _cuts(_whole(kept, positions, valid), chunk))
    if kept is not None and valid:
        yield from ((cut, True) for cut in _cuts(kept.runs[True], chunk))


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
    """Writes the gradient of ``x`` [c, V], log-probs, which it overwrites, to ``out``, which may be ``x``."""
    at = local[:, None].clamp(0, x.shape[1] - 1)
    factor = -grad[:, None]
    if entropy_grad is not None:  # dH/dx = -p (log p + H)
        factor = (x + entropy[:, None]).mul_(-entropy_grad[:, None]).add_(factor)
    if out is x or x.is_cpu:
        x.exp_().mul_(factor).scatter_add_(1, at, (grad * here)[:, None])
        if out is not x:
            out.copy_(x)
    else:  # saves writing and reading again as many bytes as x has
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
        kept: Kept | None,
    ) -> tuple[Tensor, Tensor]:
        real, whole = logits[:, :valid], _whole(kept, len(logits), valid)
        peak = logits.new_full((len(logits),), -torch.inf, dtype=torch.float32)
        for run in whole:
            peak[run] = real[run].amax(1).float() * scale
        if kept is not None:
            flat = logits[kept.rows, kept.columns].float() * scale
            peak.scatter_reduce_(0, kept.rows, flat, "amax")
        if group is not None:
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        local = targets - vocab_start
        here = (local >= 0) & (local < valid)
        sums = torch.zeros(3, len(logits), dtype=torch.float32, device=logits.device)  # sum e^x, sum x e^x, x[target]
        for cut in _cuts(whole, chunk):
            sums[:, cut] = _sums(_shifted(real[cut], scale, peak[cut]), local[cut], here[cut])
        if kept is not None:
            sums += kept.sums(flat.sub_(peak[kept.rows]), local, here)
        if group is not None:
            dist.all_reduce(sums, group=group)
        log_z = sums[0].log()
        logprobs, entropy = sums[2] - log_z, log_z - sums[1] / sums[0]
        ctx.save_for_backward(logits, local, here, peak + log_z, entropy)
        ctx.scale, ctx.valid, ctx.chunk, ctx.kept = scale, valid, chunk, kept
        ctx.set_materialize_grads(False)  # most losses do not use the entropy
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, local, here, log_norm, entropy = ctx.saved_tensors
        valid, kept = ctx.valid, ctx.kept
        grad, entropy_grad = _scaled(grad, entropy_grad, log_norm, ctx.scale)
        out = torch.empty_like(logits)
        out[:, valid:] = 0
        if kept is not None:
            for run in kept.runs[True]:
                out[run] = 0
            x = logits[kept.rows, kept.columns].float().mul_(ctx.scale).sub_(log_norm[kept.rows])
            x = kept.gradient(x, local=local, grad=grad, entropy=entropy, entropy_grad=entropy_grad)
            out[kept.rows, kept.columns] = x.to(out.dtype)
        for cut in _cuts(_whole(kept, len(logits), valid), ctx.chunk):
            _write_gradient(
                out[cut, :valid],
                _shifted(logits[cut, :valid], ctx.scale, log_norm[cut]),
                local=local[cut],
                here=here[cut],
                grad=grad[cut],
                entropy=entropy[cut],
                entropy_grad=None if entropy_grad is None else entropy_grad[cut],
            )
        return out, None, None, None, None, None, None, None


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
        kept: Kept | None,
    ) -> tuple[Tensor, Tensor]:
        local = targets - vocab_start
        here = (local >= 0) & (local < valid)
        own = torch.full((len(hidden),), -torch.inf, device=hidden.device)  # the greatest logit of this rank's rows
        sums = torch.zeros(3, len(hidden), device=hidden.device)  # sum e^x, sum x e^x, x[target], of x = logit - own
        for cut in _cuts(_whole(kept, len(hidden), valid), chunk):
            x = float32_logits(hidden[cut], weight[:valid]).mul_(scale)
            own[cut] = x.amax(1)
            sums[:, cut] = _sums(x.sub_(own[cut, None]), local[cut], here[cut])
            del x  # frees it before the next chunk's
        flat: Tensor | None = None
        if kept is not None:
            flat = kept.gather(lambda cut: float32_logits(hidden[cut], weight[:valid]), chunk).mul_(scale)
            own.scatter_reduce_(0, kept.rows, flat, "amax").clamp_(min=_LEFT_OUT)
            sums += kept.sums(flat - own[kept.rows], local, here)
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
        ctx.save_for_backward(hidden, local, here, peak + log_z, entropy, flat)
        ctx.weight, ctx.scale, ctx.valid, ctx.chunk, ctx.announce = weight, scale, valid, chunk, announce
        ctx.kept = kept
        ctx.set_materialize_grads(False)  # most losses do not use the entropy
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, local, here, log_norm, entropy, flat = ctx.saved_tensors
        whole: Tensor = ctx.weight
        kept, weight = ctx.kept, whole.detach()[: ctx.valid]
        grad, entropy_grad = _scaled(grad, entropy_grad, log_norm, ctx.scale)
        main_grad: Tensor | None = getattr(whole, "main_grad", None)
        direct = main_grad is not None and main_grad.dtype == torch.float32
        of_weight: Tensor | None = None
        if ctx.needs_input_grad[1]:
            of_weight = main_grad if direct else torch.zeros_like(whole, dtype=torch.float32)
        of_hidden = torch.zeros_like(hidden)
        if kept is not None:
            flat = flat - log_norm[kept.rows]
            flat = kept.gradient(flat, local=local, grad=grad, entropy=entropy, entropy_grad=entropy_grad)
        for cut, limited in _every(kept, len(hidden), ctx.valid, ctx.chunk):
            if limited:
                x = kept.spread(flat, cut, ctx.valid)
            else:
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
            del x  # frees it before the next chunk's
        if of_weight is not None and main_grad is not None:
            if not direct:
                main_grad.add_(of_weight)
            of_weight = None  # freed before zeros take as much
            of_weight = torch.zeros_like(whole) if ctx.announce else None
        if of_weight is not None:
            of_weight = of_weight.to(whole.dtype)
        return of_hidden, of_weight, None, None, None, None, None, None, None, None


def gather_logits(logits: Tensor, tokens: Tensor, *, vocab_start: int, group: dist.ProcessGroup | None) -> Tensor:
    """Returns logits [T, k], at least float32, of ``tokens`` [T, k] int64, with a gradient into ``logits`` [T, V]."""
    local = tokens - vocab_start
    here = (local >= 0) & (local < logits.shape[1])
    mine = logits.gather(1, local.clamp(0, logits.shape[1] - 1))
    mine = mine.to(torch.promote_types(mine.dtype, torch.float32)).where(here, 0.0)
    if group is None:
        return mine
    summed: Tensor = _Summed.apply(mine, group)  # type: ignore[no-untyped-call]
    return summed


def top_tokens(logits: Tensor, count: int, below: int, vocab_start: int, group: dist.ProcessGroup | None) -> Tensor:
    """The ``count`` tokens [T, count] int64 of the largest logits [T, V] among ids under ``below``, largest first."""
    mine = logits[:, : max(below - vocab_start, 0)].float()
    values, tokens = mine.topk(min(count, mine.shape[1]), 1)
    tokens = tokens + vocab_start
    if group is None:
        return tokens
    missing = (0, count - values.shape[1])  # a rank with fewer rows
    values = torch.nn.functional.pad(values, missing, value=-torch.inf).contiguous()
    tokens = torch.nn.functional.pad(tokens, missing).contiguous()
    every = [[torch.empty_like(x) for _ in range(group.size())] for x in (values, tokens)]
    for into, x in zip(every, (values, tokens), strict=True):
        dist.all_gather(into, x, group=group)
    best = torch.cat(every[0], 1).topk(count, 1).indices
    return torch.cat(every[1], 1).gather(1, best)


class _Summed(torch.autograd.Function):
    """A sum over ranks that all continue with the same loss."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        out = mine.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@cache
def logit_sides() -> tuple[Callable[[PackedMicroBatch, range], Kept | None], ...]:
    """Returns the functions of `Feature.logits`. Raises as `features`."""
    return tuple(load_side(one.logits) for one in features().values() if one.logits is not None)


EXACT = 2**24
"""Smaller integers are exact in float32."""


class ValueParameter(torch.nn.Parameter):
    """A parameter that no policy checkpoint holds."""


class ScoreLayer(torch.nn.Module):
    """Maps hidden states to scores, in float32; replicated over TP. Its weights start at 0, and so do the scores.

    Transformers' classifiers have the same weight, and no bias.
    """

    kind: ClassVar[type[torch.nn.Parameter]] = torch.nn.Parameter

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = self._parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias: torch.nn.Parameter | None = None

    def _parameter(self, data: Tensor) -> torch.nn.Parameter:
        parameter = self.kind(data)
        parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]  # all-reduced over TP
        return parameter

    def forward(self, hidden: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        """[s, b, h] ([s / tp, b, h] under sequence parallelism) -> ([s, b, 1], None), as megatron's output layer."""
        bias = None if self.bias is None else self.bias.float()
        values = torch.nn.functional.linear(hidden.float(), self.weight.float(), bias)
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


class ValueLayer(ScoreLayer):
    """A critic's, which has a bias, too."""

    kind = ValueParameter

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.bias = self._parameter(torch.zeros(1, dtype=config.params_dtype))


def replace_output_layer(layer: type[ScoreLayer], chunks: Sequence[GPTModel], config: TransformerConfig) -> None:
    """Replaces the output layer of the chunk that has one."""
    for chunk in chunks:
        if chunk.post_process:
            chunk.output_layer = layer(config)


class ValueOnHiddenStates:
    """The value layer of a policy that is its own critic, on the hidden states that its output layer reads.

    It is a module of the last chunk: gradients, optimizer and checkpoints have it as any other. Ranks of other stages
    have none.
    """

    def __init__(self, chunks: Sequence[GPTModel], config: TransformerConfig) -> None:
        self._hidden: list[Tensor] = []
        last = chunks[-1]
        if last.post_process:
            last.value_layer = ValueLayer(config)
            last.decoder.register_forward_hook(self._see)
        self._chunk = last

    def _see(self, _module: object, _inputs: object, hidden: Tensor) -> None:
        self._hidden[:] = [hidden]

    def __call__(self) -> Tensor:
        """Returns the values [t] float32 of the micro-batch that has passed last, once."""
        values: Tensor = self._chunk.value_layer(self._hidden.pop())[0]
        return values.flatten()


class Head(Protocol):
    """Turns the last pipeline stage's output [1, t, ...] into what a loss or a scorer reads. Every TP rank calls it."""

    outputs: ClassVar[frozenset[Want]]
    """The scores that ``scores`` can compute."""

    def __call__(self, output: Tensor, micro_batch: PackedMicroBatch) -> dict[str, Tensor]:
        """``logprobs``, ``entropy`` (and ``values``) [t] float32 of LossInputs."""
        ...

    def scores(self, output: Tensor, micro_batch: PackedMicroBatch, want: frozenset[Want]) -> dict[Want, Tensor]:
        """Returns the scores in ``want``, a subset of ``outputs``: [t] float32, logits [masked-in, V]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabHead(Head):
    """A policy: logits [1, t, V / tp] become log-probs of the targets and the entropy."""

    outputs: ClassVar[frozenset[Want]] = frozenset(("logprobs", "entropy", "logits", "top", "logit_norms"))
    temperature: float
    vocab_size: int
    chunk: int
    top_k: int = 0
    """The number of tokens that ``top`` names."""
    top_below: int = EXACT
    """``top`` names tokens with smaller ids alone."""

    @override
    def __call__(self, output: Tensor, micro_batch: PackedMicroBatch) -> dict[str, Tensor]:
        logprobs, entropy = self._logprobs(output.squeeze(0), micro_batch)
        found = {"logprobs": logprobs, "entropy": entropy}
        if (named := micro_batch.columns.get("ref_top")) is not None:
            found["top_logprobs"] = self._logprobs_of(output.squeeze(0), micro_batch.targets, logprobs, named[:, 0])
        return found

    def _logprobs_of(self, logits: Tensor, targets: Tensor, logprobs: Tensor, tokens: Tensor) -> Tensor:
        """Returns log-probs [t, k] of ``tokens`` [t, k], by those of the targets."""
        cut = self.cut(logits.shape[-1])
        every = torch.cat([tokens.long(), targets[:, None]], 1)
        x = gather_logits(logits, every, vocab_start=cut["vocab_start"], group=cut["group"]) / self.temperature
        return x[:, :-1] - x[:, -1:] + logprobs[:, None]

    def _logprobs(self, logits: Tensor, micro_batch: PackedMicroBatch) -> tuple[Tensor, Tensor]:
        return token_logprobs(logits, micro_batch.targets, **self._kept_cut(self._rows(logits), micro_batch))

    def _kept_cut(self, rows: int, micro_batch: PackedMicroBatch) -> dict[str, Any]:
        """Returns `cut` with the tokens that a feature keeps of the micro-batch's logits, if one does."""
        cut = self.cut(rows)
        start = min(cut["vocab_start"], self.vocab_size)
        made = (side(micro_batch, range(start, min(start + rows, self.vocab_size))) for side in logit_sides())
        return {**cut, "kept": next((one for one in made if one is not None), None)}

    def _rows(self, output: Tensor) -> int:
        """Returns how many rows of the vocabulary this TP rank has."""
        return output.shape[-1]

    def _logits(self, output: Tensor) -> Tensor:
        """Output rows -> float32 logits of this TP rank's rows of the vocabulary."""
        return output.float()

    def cut(self, rows: int) -> dict[str, Any]:
        """Returns the keywords of log-probs over a vocabulary with ``rows`` rows on each TP rank."""
        tp = parallel_state.get_tensor_model_parallel_group()
        return {
            "temperature": self.temperature,
            "vocab_size": self.vocab_size,
            "vocab_start": rows * parallel_state.get_tensor_model_parallel_rank(),
            "group": tp if tp.size() > 1 else None,
            "chunk": self.chunk,
        }

    @override
    def scores(self, output: Tensor, micro_batch: PackedMicroBatch, want: frozenset[Want]) -> dict[Want, Tensor]:
        found: dict[Want, Tensor] = {}
        if want & {"logprobs", "entropy", "top"}:
            every = self(output, micro_batch)
            found |= {name: every[name] for name in want & {"logprobs", "entropy"}}
            if "top" in want:
                found["top"] = self._top(output.squeeze(0), micro_batch, every["logprobs"])
        if "logits" in want:
            found["logits"] = self._masked_logits(output, micro_batch)
        if "logit_norms" in want:
            mine, rows = output.squeeze(0), self._rows(output)
            cut = self._kept_cut(rows, micro_batch)
            found["logit_norms"] = logit_norms(mine, micro_batch.targets, self._logits, rows=rows, **cut)
        return found

    def _top(self, logits: Tensor, micro_batch: PackedMicroBatch, logprobs: Tensor) -> Tensor:
        """[t, 2, k]; zeros outside the mask. ``logprobs`` [t] are those of the targets."""
        cut, mask = self.cut(logits.shape[-1]), micro_batch.columns["mask"]
        below = min(self.vocab_size, self.top_below)
        tokens = top_tokens(logits[mask], min(self.top_k, below), below, cut["vocab_start"], cut["group"])
        found = self._logprobs_of(logits[mask], micro_batch.targets[mask], logprobs[mask], tokens)
        out = found.new_zeros(len(logits), 2, tokens.shape[1])
        out[mask] = torch.stack([tokens.float(), found], 1)
        return out

    def _masked_logits(self, output: Tensor, micro_batch: PackedMicroBatch) -> Tensor:
        """Returns logits before the temperature, over the whole vocabulary, so only of the masked-in positions."""
        mine = self._logits(output.squeeze(0)[micro_batch.columns["mask"]])
        tp = parallel_state.get_tensor_model_parallel_group()
        if tp.size() > 1:
            shards = [torch.empty_like(mine) for _ in range(tp.size())]
            dist.all_gather(shards, mine.contiguous(), group=tp)
            mine = torch.cat(shards, 1)
        return mine[:, : self.vocab_size]


@dataclass(frozen=True, slots=True, kw_only=True)
class Float32Head(VocabHead):
    """A policy whose model stops before its output layer (`stop_before_output_layer`): the output [1, t, h] are hidden
    states, and logits are float32 products of them and of the output layer's weight, a chunk at a time."""

    model: GPTModel
    announces: bool
    """True if the weight's gradient, which autograd does not see, is announced to it by one of zeros: megatron reduces
    a bucket when autograd has been at all of its parameters, if it does so within the pass."""

    @property
    def _weight(self) -> Tensor:
        """[V / tp, h]; the embedding's if that is tied."""
        tied = self.model.share_embeddings_and_output_weights
        weight: Tensor = self.model.shared_embedding_or_output_weight() if tied else self.model.output_layer.weight
        return weight

    @override
    def _logprobs(self, hidden: Tensor, micro_batch: PackedMicroBatch) -> tuple[Tensor, Tensor]:
        cut = self._kept_cut(self._rows(hidden), micro_batch)
        return head_logprobs(hidden, self._weight, micro_batch.targets, announce=self.announces, **cut)

    @override
    def _rows(self, output: Tensor) -> int:
        return len(self._weight)

    @override
    def _logits(self, hidden: Tensor) -> Tensor:
        return float32_logits(hidden, self._weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueHead(Head):
    """A critic: the output [1, t, 1] is the value after each position's input token."""

    outputs: ClassVar[frozenset[Want]] = frozenset(("values",))

    @override
    def __call__(self, output: Tensor, micro_batch: PackedMicroBatch) -> dict[str, Tensor]:
        values = output.flatten().float()
        return {"values": values, "logprobs": torch.zeros_like(values), "entropy": torch.zeros_like(values)}

    @override
    def scores(self, output: Tensor, micro_batch: PackedMicroBatch, want: frozenset[Want]) -> dict[Want, Tensor]:
        return {"values": output.flatten().float()} if "values" in want else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAndValueHead(Head):
    """A policy that is its own critic: what ``policy`` says, and the values after each position's input token."""

    outputs: ClassVar[frozenset[Want]] = VocabHead.outputs | ValueHead.outputs
    policy: VocabHead
    values: ValueOnHiddenStates

    @override
    def __call__(self, output: Tensor, micro_batch: PackedMicroBatch) -> dict[str, Tensor]:
        return {**self.policy(output, micro_batch), "values": self.values()}

    @override
    def scores(self, output: Tensor, micro_batch: PackedMicroBatch, want: frozenset[Want]) -> dict[Want, Tensor]:
        found, values = self.policy.scores(output, micro_batch, want - ValueHead.outputs), self.values()
        return found | ({"values": values} if "values" in want else {})


def stop_before_output_layer(chunks: Sequence[GPTModel]) -> None:
    """Makes the chunk with an output layer return hidden states [1, t, h], of all tokens on every TP rank.

    The layer keeps its weight under its name. The gradients of the hidden states are summed over TP.
    """
    for chunk in chunks:
        if chunk.post_process:
            chunk.output_layer.forward = partial(_hidden_states, chunk.output_layer.sequence_parallel)


def _hidden_states(gather: bool, hidden: Tensor, **_: object) -> tuple[Tensor, None]:
    """Stands in for the layer's forward: [s, b, h] ([s / tp, b, h] to ``gather``) -> ([s, b, h], None)."""
    return gather_from_sequence_parallel_region(hidden) if gather else hidden, None
