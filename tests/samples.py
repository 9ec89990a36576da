"""Samples, a rank's share of them, inputs of a loss, and a learner's step, from plain columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_megatron.data.rows import SentRows, Share
from rl_megatron.training.optimizer_steps import CompletedStep
from rl_megatron.types import Batch, Loss, LossInputs, LossOutput, Over, ParallelDims, Samples, SkippedStep

if TYPE_CHECKING:
    from rl_megatron.learner.trained import MegatronLearner


def sequences_of(lengths: Sequence[int] | Tensor, **columns: Tensor) -> Samples:
    """Sequences of ``lengths``, one after the other. Of the columns that samples always have, those not given are
    zeros, and every position is trained on."""
    ends = torch.as_tensor(lengths, dtype=torch.int64).cumsum(0)
    num = int(ends[-1]) if len(ends) else 0
    always = {name: torch.zeros(num) for name in ("advantages", "rollout_logprobs", "old_logprobs")}
    always |= {name: torch.zeros(num, dtype=torch.int64) for name in ("input_ids", "targets")}
    always["mask"] = torch.ones(num, dtype=torch.bool)
    return Samples(**always | columns, cu_seqlens=torch.cat([ends.new_zeros(1), ends]))


TWO = (13, 22)  # tokens of two sequences that are packed


def two_sequences() -> Samples:
    """Of random tokens of the tiny models of families, with advantages."""
    g, n = torch.Generator().manual_seed(5), sum(TWO)
    return sequences_of(
        TWO,
        input_ids=torch.randint(0, 61, (n,), generator=g),
        targets=torch.randint(0, 61, (n,), generator=g),
        advantages=torch.randn(n, generator=g),
    )


# The metrics of a loss, and the oracle for reducing their shares to one value.
TOGETHER = {"sum": torch.sum, "mean": torch.sum, "min": torch.amin, "max": torch.amax}


def values(output: LossOutput, *kinds: Over) -> dict[str, Tensor]:
    """The metrics that are reduced in one of these ways, or all, by name."""
    return {name: metric.value for name, metric in output.metrics.items() if not kinds or metric.reduction in kinds}


def joined(shares: Sequence[LossOutput]) -> dict[str, Tensor]:
    """The metrics of a batch, from those of its parts."""
    first, *_ = shares
    parts = {name: torch.stack([share.metrics[name].value for share in shares]) for name in first.metrics}
    return {name: TOGETHER[metric.reduction](parts[name], 0) for name, metric in first.metrics.items()}


# What the controller would send a rank of given micro-batches, for tests that call a rank's process directly.
def share_of(row: Sequence[Samples], dims: ParallelDims, rank: int, *, to_score: bool) -> Share | None:
    """Of its data-parallel rank's micro-batches; None for the ranks that the first of them passes it on to."""
    if rank != dims.dp_rank(rank) * dims.tp * dims.cp:
        return None
    columns = {name: torch.cat([m.columns[name] for m in row]) for name in row[0].columns}
    lengths = torch.cat([m.cu_seqlens.diff() for m in row])
    samples = Samples(**columns, cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
    sequences = torch.arange(len(lengths)).split([m.num_sequences for m in row])
    batch = Batch(samples=samples, sequences=(sequences,), micro_batches=(row,), num_tokens=0, num_sequences=0)
    return SentRows(1).shares(batch, to_score=to_score)[0]


# Run a whole optimizer step of a learner on this rank.
def train_step(
    learner: MegatronLearner,
    micro_batches: Sequence[Samples],
    loss: Loss,
    learning_rate: float,
    *,
    num_tokens: int,
    num_sequences: int,
) -> CompletedStep | SkippedStep | None:
    """Of one backward pass; None off the last stage. Every rank calls it."""
    said = learner.backward(micro_batches, loss, num_tokens=num_tokens, num_sequences=num_sequences)
    result = learner.step(learning_rate)
    if isinstance(result, SkippedStep):
        return result
    return None if said is None else CompletedStep(said, result)


# Inputs of a loss, from plain columns, and parts of them.
def local_sum(ids: Tensor, num: int) -> Callable[[Tensor], Tensor]:
    """The ``segment_sum`` of one process, which refuses what has a gradient."""

    def segment_sum(values: Tensor) -> Tensor:
        assert not values.requires_grad, "segment_sum is given detached tensors only"
        return values.new_zeros(num).index_add_(0, ids, values)

    return segment_sum


def loss_inputs(
    lengths: Sequence[int],
    mask: Tensor | Sequence[bool] | None = None,
    *,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
    **columns: Tensor,
) -> LossInputs:
    """Sequences of ``lengths``, one after the other, and if not said otherwise all that there are. Without ``mask`` [T]
    all tokens are trained on; of the columns that a loss always has, those not given are zeros."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    zeros = torch.zeros_like(next(iter(columns.values()), torch.zeros(len(ids))))
    always = ("logprobs", "entropy", "old_logprobs", "rollout_logprobs", "advantages")
    kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else torch.as_tensor(mask, dtype=torch.bool)
    return LossInputs(
        **dict.fromkeys(always, zeros) | columns,
        mask=kept,
        segment_ids=ids,
        segment_sum=local_sum(ids, len(lengths)),
        num_tokens=int(kept.sum()) if num_tokens is None else num_tokens,
        num_sequences=len(lengths) if num_sequences is None else num_sequences,
    )


def part_of(x: LossInputs, first: int, stop: int) -> LossInputs:
    """The sequences from ``first`` to before ``stop``, under the denominators of all."""
    inside = (x.segment_ids >= first) & (x.segment_ids < stop)
    tensors = {one.name: getattr(x, one.name) for one in fields(x) if isinstance(getattr(x, one.name), Tensor)}
    columns = {name: column[inside] for name, column in tensors.items()}
    ids = columns.pop("segment_ids") - first
    return replace(x, **columns, segment_ids=ids, segment_sum=local_sum(ids, stop - first))
