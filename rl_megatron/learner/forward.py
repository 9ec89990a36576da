"""Runs a packed (mini)batch through megatron's pipeline schedule, for scores or for the loss and its gradients.

The loss closure hands megatron this rank's additive share of the loss, already over the global denominators, with a
token count of 0: with ``calculate_per_token_loss`` megatron then only sums (over micro-batches, DP and CP), so the
result does not depend on how the batch was split.

Reduces ranks' shares of a loss and its metrics to global values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from rl_megatron.feature import LearnerHooks
from rl_megatron.learner.heads import Head
from rl_megatron.learner.packed import PackedMicroBatch
from rl_megatron.observability import activity
from rl_megatron.types import Loss, LossInputs, LossOutput, Metric, Over, Want

LossClosure = Callable[[Tensor], tuple[Tensor, Tensor, Any]]
AroundForward = Callable[[Any, PackedMicroBatch], AbstractContextManager[None]]
"""Makes a context around a chunk's forward pass of a micro-batch."""


@contextmanager
def nested(contexts: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    """Enters all ``contexts`` around the block."""
    with ExitStack() as stack:
        for one in contexts:
            stack.enter_context(one)
        yield


def run_scores(
    chunks: Sequence[MegatronModule],
    micro_batches: Sequence[PackedMicroBatch],
    head: Head,
    want: frozenset[Want],
    hooks: Sequence[LearnerHooks],
) -> list[dict[Want, Tensor]]:
    """``head.scores`` per micro-batch on the last pipeline stage, an empty list elsewhere. Every rank calls it."""

    def closure(micro_batch: PackedMicroBatch, output: Tensor) -> tuple[Tensor, Tensor, dict[Want, Tensor]]:
        return output.new_zeros(()), _zero_tokens(output), head.scores(output, micro_batch, want)

    around = [partial(one.around_scored, want=want) for one in hooks]
    with torch.no_grad():
        results: list[dict[Want, Tensor]] = _schedule(chunks, micro_batches, closure, around, forward_only=True)
    return results


def run_loss(
    chunks: Sequence[DistributedDataParallel],
    micro_batches: Sequence[PackedMicroBatch],
    head: Head,
    loss: Loss,
    *,
    num_tokens: int,
    num_sequences: int,
    hooks: Sequence[LearnerHooks],
) -> list[LossOutput]:
    """Accumulates this rank's unreduced gradients in the chunks' buffers. Returns loss shares on the last stage.

    Every rank calls it. ``hooks`` act around each forward pass, and add to the metrics.
    """

    def closure(micro_batch: PackedMicroBatch, output: Tensor) -> tuple[Tensor, Tensor, LossOutput]:
        share = loss(
            LossInputs(
                **head(output, micro_batch),
                **micro_batch.columns,
                segment_ids=micro_batch.segment_ids,
                segment_sum=partial(_segment_sum, micro_batch.segment_ids, micro_batch.num_segments),
                turn_sum=_turn_sum(micro_batch.turn_ids, micro_batch.num_turns),
                num_tokens=num_tokens,
                num_sequences=num_sequences,
            )
        )
        more = {name: metric for one in hooks for name, metric in one.after_loss(micro_batch, num_tokens).items()}
        return _make_viewless(share.loss), _zero_tokens(output), _detach_metrics(share, more)

    around = [partial(one.around_forward, num_tokens=num_tokens) for one in hooks]
    results: list[LossOutput] = _schedule(chunks, micro_batches, closure, around, forward_only=False)
    return results


def _schedule(
    chunks: Sequence[MegatronModule],
    micro_batches: Sequence[PackedMicroBatch],
    closure: Callable[[PackedMicroBatch, Tensor], tuple[Tensor, Tensor, Any]],
    around: Sequence[AroundForward],
    *,
    forward_only: bool,
) -> list[Any]:
    places = {id(m): f"micro-batch {number} of {len(micro_batches)}" for number, m in enumerate(micro_batches, start=1)}

    def after_forward(micro_batch: PackedMicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Any]:
        activity.part("after its forward", places[id(micro_batch)])
        return closure(micro_batch, output)

    def forward_step(iterator: Iterator[PackedMicroBatch], model: Any) -> tuple[Tensor, LossClosure]:
        micro_batch = next(iterator)
        activity.part("forward", places[id(micro_batch)])
        half = {"fp32_output": False} if chunks[0].config.bf16 else {}  # else all logits are copied to float32
        chosen = micro_batch.attention.chosen
        given = set(chosen)
        with nested(make(model, micro_batch) for make in around):
            output = model(
                micro_batch.input_ids[None],
                micro_batch.attention.positions[None],
                None,
                packed_seq_params=micro_batch.attention,
                **half,
            )
        for layer in chosen.keys() - given if forward_only else ():  # a backward pass would remove them
            del chosen[layer]
        return _make_viewless(output), partial(after_forward, micro_batch)

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


def _make_viewless(output: Tensor) -> Tensor:
    """Returns the output as a tensor that is not a view: megatron frees its memory once it is sent, and custom layers
    and losses may give views."""
    whole: Tensor = make_viewless_tensor(output, requires_grad=output.requires_grad, keep_graph=True)
    return whole


def _detach_metrics(share: LossOutput, more: Mapping[str, Metric[Tensor]]) -> LossOutput:
    """Detaches metrics, which megatron keeps until the step's last micro-batch. The loss holds its graph, whose leaves
    are the hidden states that the last stage received and the gradient of them, of every micro-batch so far."""
    metrics = {name: replace(m, value=m.value.detach()) for name, m in {**share.metrics, **more}.items()}
    return LossOutput(loss=share.loss.detach(), metrics=metrics)


def _zero_tokens(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int, device=like.device)


def _segment_sum(segment_ids: Tensor, num_segments: int, values: Tensor) -> Tensor:
    """[t] -> [S]: sums over each sequence, over the CP ranks that share it."""
    out = values.new_zeros(num_segments).index_add_(0, segment_ids, values)
    if parallel_state.get_context_parallel_world_size() > 1:
        dist.all_reduce(out, group=parallel_state.get_context_parallel_group())
    return out


def _turn_sum(turn_ids: Tensor | None, num_turns: int) -> Callable[[Tensor], Tensor] | None:
    """[t] -> [t]: sums over each position's turn, over the CP ranks that share it."""
    return None if turn_ids is None else lambda values: _segment_sum(turn_ids, num_turns, values)[turn_ids]


_SIGNS: Mapping[Over, float] = {"min": -1.0, "max": 1.0}  # others are summed


def reduce_outputs(outputs: Sequence[LossOutput]) -> dict[str, Metric[float]]:
    """Returns a (mini)batch's ``loss`` and metrics over all ranks' micro-batches. Every last-stage rank calls it."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    kinds = outputs[0].metrics
    adding = [name for name, metric in kinds.items() if metric.reduction not in _SIGNS]
    shares = [torch.cat([o.loss.detach()[None], *(_flat(o, name) for name in adding)]).double() for o in outputs]
    total = torch.stack(shares).sum(0)
    dist.all_reduce(total, group=group)
    read = iter(total.tolist())  # one wait for the GPU
    loss = next(read)
    values = dict(zip(adding, read, strict=True))
    extremes = {name: _SIGNS[metric.reduction] for name, metric in kinds.items() if metric.reduction in _SIGNS}
    if extremes:
        signs = total.new_tensor(list(extremes.values()))
        parts = [torch.cat([_flat(o, name) for name in extremes]).double() for o in outputs]
        most = (torch.stack(parts) * signs).amax(0)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        values.update(zip(extremes, (most * signs).tolist(), strict=True))
    found = {
        name: Metric(value=values[name], reduction=metric.reduction, weight=metric.weight)
        for name, metric in kinds.items()
    }
    return {"loss": Metric(value=loss), **found}


def _flat(output: LossOutput, name: str) -> Tensor:
    return output.metrics[name].value.flatten()
