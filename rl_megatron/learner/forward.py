"""One packed (mini)batch through megatron's pipeline schedule: its scores, or the loss and its gradients.

The loss closure hands megatron this rank's additive share of the loss, already over the global denominators, with a
token count of 0: with ``calculate_per_token_loss`` megatron then only adds (over micro-batches, DP and CP), so the
result does not depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from rl_megatron.learner.logprobs import token_logprobs
from rl_megatron.learner.packed import PackedMicroBatch
from rl_megatron.observability import activity
from rl_megatron.types import Loss, LossInputs, LossOutput

LossClosure = Callable[[Tensor], tuple[Tensor, Tensor, Any]]
AroundForward = Callable[[Any, PackedMicroBatch], AbstractContextManager[None]]
"""Entered with a chunk and a micro-batch around the forward pass of the one over the other (`replay.Routing`)."""


class Head(Protocol):
    """What the last pipeline stage's output means. Every TP rank calls it."""

    @property
    def score(self) -> str:
        """Which of the tensors is the learner's score of a position."""
        ...

    def __call__(self, output: Tensor, micro_batch: PackedMicroBatch) -> dict[str, Tensor]:
        """``logprobs``, ``entropy`` (and ``values``) [t] float32 of LossInputs, from an output [1, t, ...]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabHead:
    """A policy: logits [1, t, V / tp] become log-probs of the targets and the entropy."""

    temperature: float
    vocab_size: int
    chunk: int
    score: str = "logprobs"

    def __call__(self, output: Tensor, micro_batch: PackedMicroBatch) -> dict[str, Tensor]:
        """See Head."""
        tp = parallel_state.get_tensor_model_parallel_group()
        logprobs, entropy = token_logprobs(
            output.squeeze(0),
            micro_batch.targets,
            temperature=self.temperature,
            vocab_size=self.vocab_size,
            vocab_start=output.shape[-1] * parallel_state.get_tensor_model_parallel_rank(),
            group=tp if tp.size() > 1 else None,
            chunk=self.chunk,
        )
        return {"logprobs": logprobs, "entropy": entropy}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsHead:
    """A policy's logits before the temperature, of the masked-in positions alone: their whole vocabulary is large."""

    vocab_size: int
    score: str = "logits"

    def __call__(self, output: Tensor, micro_batch: PackedMicroBatch) -> dict[str, Tensor]:
        """``logits`` [masked-in, V] float32; see Head."""
        mine = output.squeeze(0)[micro_batch.columns["mask"]].float()
        tp = parallel_state.get_tensor_model_parallel_group()
        if tp.size() > 1:
            shards = [torch.empty_like(mine) for _ in range(tp.size())]
            dist.all_gather(shards, mine.contiguous(), group=tp)
            mine = torch.cat(shards, 1)
        return {"logits": mine[:, : self.vocab_size]}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueHead:
    """A critic: the output [1, t, 1] is the value after each position's input token."""

    score: str = "values"

    def __call__(self, output: Tensor, micro_batch: PackedMicroBatch) -> dict[str, Tensor]:
        """See Head."""
        values = output.flatten().float()
        return {"values": values, "logprobs": torch.zeros_like(values), "entropy": torch.zeros_like(values)}


def run_scores(
    chunks: Sequence[MegatronModule],
    micro_batches: Sequence[PackedMicroBatch],
    head: Head,
    around: AroundForward,
) -> list[Tensor]:
    """Scores [t] per micro-batch on the last pipeline stage, nothing elsewhere. Every rank calls it."""

    def closure(micro_batch: PackedMicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = head(output, micro_batch)[head.score]
        return scores.sum(), _zero_tokens(output), scores

    with torch.no_grad():
        results: list[Tensor] = _schedule(chunks, micro_batches, closure, around, forward_only=True)
    return results


def run_loss(
    chunks: Sequence[DistributedDataParallel],
    micro_batches: Sequence[PackedMicroBatch],
    head: Head,
    loss: Loss,
    around: AroundForward,
    *,
    num_tokens: int,
    num_sequences: int,
) -> list[LossOutput]:
    """Gradients into the chunks' buffers, reduced over DP and CP; loss shares on the last stage. All ranks call it."""

    def closure(micro_batch: PackedMicroBatch, output: Tensor) -> tuple[Tensor, Tensor, LossOutput]:
        share = loss(
            LossInputs(
                **head(output, micro_batch),
                **micro_batch.columns,
                segment_ids=micro_batch.segment_ids,
                segment_sum=partial(_segment_sum, micro_batch),
                num_tokens=num_tokens,
                num_sequences=num_sequences,
            )
        )
        return share.loss, _zero_tokens(output), share

    results: list[LossOutput] = _schedule(chunks, micro_batches, closure, around, forward_only=False)
    return results


def _schedule(
    chunks: Sequence[MegatronModule],
    micro_batches: Sequence[PackedMicroBatch],
    closure: Callable[[PackedMicroBatch, Tensor], tuple[Tensor, Tensor, Any]],
    around: AroundForward,
    *,
    forward_only: bool,
) -> list[Any]:
    places = {id(m): f"micro-batch {number} of {len(micro_batches)}" for number, m in enumerate(micro_batches, start=1)}

    def behind(micro_batch: PackedMicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Any]:
        activity.part(f"{places[id(micro_batch)]}, after its forward")
        return closure(micro_batch, output)

    def forward_step(iterator: Iterator[PackedMicroBatch], model: Any) -> tuple[Tensor, LossClosure]:
        micro_batch = next(iterator)
        activity.part(f"{places[id(micro_batch)]}, forward")
        half = {"fp32_output": False} if chunks[0].config.bf16 else {}  # else all logits are copied to float32
        with around(model, micro_batch):
            output = model(
                micro_batch.input_ids[None],
                micro_batch.attention.positions[None],
                None,
                packed_seq_params=micro_batch.attention,
                **half,
            )
        return output, partial(behind, micro_batch)

    iterators = [iter(micro_batches) for _ in chunks]
    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=len(micro_batches[0].input_ids),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return list(results)


def _zero_tokens(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int, device=like.device)


def _segment_sum(micro_batch: PackedMicroBatch, values: Tensor) -> Tensor:
    """[t] -> [S]: sums over each sequence, over the CP ranks that share it."""
    out = values.new_zeros(micro_batch.num_segments).index_add_(0, micro_batch.segment_ids, values)
    if parallel_state.get_context_parallel_world_size() > 1:
        dist.all_reduce(out, group=parallel_state.get_context_parallel_group())
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """The global loss, metrics and histograms of a (mini)batch."""

    loss: float
    metrics: dict[str, float]
    histograms: dict[str, tuple[float, ...]]


def reduce_outputs(outputs: Sequence[LossOutput]) -> Reduced:
    """Shares of this rank's micro-batches to global values. Last-stage ranks call it together."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metrics: dict[str, float] = {}
    names, bins = ["loss", *outputs[0].means], {name: len(x) for name, x in outputs[0].histograms.items()}
    sums = [
        torch.cat([torch.stack([o.loss.detach(), *o.means.values()]).double(), *map(_doubles, o.histograms.values())])
        for o in outputs
    ]
    total = torch.stack(sums).sum(0)
    dist.all_reduce(total, group=group)
    counts = total[len(names) :].split(list(bins.values()))
    metrics.update(zip(names, total[: len(names)].tolist(), strict=True))
    for field, sign in (("minima", -1.0), ("maxima", 1.0)):
        rows = [getattr(o, field) for o in outputs]
        if rows[0]:
            most = sign * torch.stack([torch.stack(list(row.values())) for row in rows]).double()
            most = most.amax(0)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
            metrics.update(zip(rows[0], (sign * most).tolist(), strict=True))
    return Reduced(
        loss=metrics.pop("loss"),
        metrics=metrics,
        histograms={name: tuple(x.tolist()) for name, x in zip(bins, counts, strict=True)},
    )


def _doubles(values: Tensor) -> Tensor:
    return values.double()
