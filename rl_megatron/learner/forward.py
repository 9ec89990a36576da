"""One packed (mini)batch through megatron's pipeline schedule: log-probs, or the loss and its gradients.

The loss closure hands megatron this rank's additive share of the loss, already over the global denominators, with a
token count of 0: with ``calculate_per_token_loss`` megatron then only adds (over micro-batches, DP and CP), so the
result does not depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rl_megatron.learner.logprobs import token_logprobs
from rl_megatron.learner.packed import PackedMicroBatch
from rl_megatron.types import Loss, LossInputs, LossOutput

LossClosure = Callable[[Tensor], tuple[Tensor, Tensor, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabHead:
    """How logits become log-probs on this rank."""

    temperature: float
    vocab_size: int
    chunk: int

    def __call__(self, logits: Tensor, micro_batch: PackedMicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs [t] with gradient and entropy [t] of a [1, t, V / tp] output. Last stage, every TP rank."""
        tp = parallel_state.get_tensor_model_parallel_group()
        rows = logits.shape[-1]
        return token_logprobs(
            logits.squeeze(0),
            micro_batch.targets,
            temperature=self.temperature,
            vocab_size=self.vocab_size,
            vocab_start=rows * parallel_state.get_tensor_model_parallel_rank(),
            group=tp if tp.size() > 1 else None,
            chunk=self.chunk,
        )


def run_logprobs(
    chunks: Sequence[DistributedDataParallel], micro_batches: Sequence[PackedMicroBatch], head: VocabHead
) -> list[Tensor]:
    """Log-probs [t] per micro-batch on the last pipeline stage, nothing elsewhere. Every rank calls it."""

    def closure(micro_batch: PackedMicroBatch, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logprobs, _ = head(logits, micro_batch)
        return logprobs.sum(), _zero_tokens(logits), logprobs

    with torch.no_grad():
        results: list[Tensor] = _schedule(chunks, micro_batches, closure, forward_only=True)
    return results


def run_loss(
    chunks: Sequence[DistributedDataParallel],
    micro_batches: Sequence[PackedMicroBatch],
    head: VocabHead,
    loss: Loss,
    *,
    num_tokens: int,
    num_sequences: int,
) -> list[LossOutput]:
    """Gradients into the chunks' buffers, reduced over DP and CP; loss shares on the last stage. All ranks call it."""

    def closure(micro_batch: PackedMicroBatch, logits: Tensor) -> tuple[Tensor, Tensor, LossOutput]:
        logprobs, entropy = head(logits, micro_batch)
        output = loss(
            LossInputs(
                logprobs=logprobs,
                entropy=entropy,
                old_logprobs=micro_batch.old_logprobs,
                rollout_logprobs=micro_batch.rollout_logprobs,
                advantages=micro_batch.advantages,
                mask=micro_batch.mask,
                segment_ids=micro_batch.segment_ids,
                segment_sum=partial(_segment_sum, micro_batch),
                num_tokens=num_tokens,
                num_sequences=num_sequences,
            )
        )
        return output.loss, _zero_tokens(logits), output

    results: list[LossOutput] = _schedule(chunks, micro_batches, closure, forward_only=False)
    return results


def _schedule(
    chunks: Sequence[DistributedDataParallel],
    micro_batches: Sequence[PackedMicroBatch],
    closure: Callable[[PackedMicroBatch, Tensor], tuple[Tensor, Tensor, Any]],
    *,
    forward_only: bool,
) -> list[Any]:
    def forward_step(iterator: Iterator[PackedMicroBatch], model: Any) -> tuple[Tensor, LossClosure]:
        micro_batch = next(iterator)
        half = {"fp32_output": False} if chunks[0].config.bf16 else {}  # else all logits are copied to float32
        output = model(
            micro_batch.input_ids[None],
            micro_batch.attention.positions[None],
            None,
            packed_seq_params=micro_batch.attention,
            **half,
        )
        return output, partial(closure, micro_batch)

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


def reduce_outputs(outputs: Sequence[LossOutput]) -> tuple[float, dict[str, float]]:
    """The global loss and metrics from the shares of this rank's micro-batches. Last-stage ranks call it together."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metrics: dict[str, float] = {}
    names = ["loss", *outputs[0].means]
    total = torch.stack([torch.stack([o.loss.detach(), *o.means.values()]) for o in outputs]).double().sum(0)
    dist.all_reduce(total, group=group)
    metrics.update(zip(names, total.tolist(), strict=True))
    for field, sign in (("minima", -1.0), ("maxima", 1.0)):
        rows = [getattr(o, field) for o in outputs]
        if rows[0]:
            most = sign * torch.stack([torch.stack(list(row.values())) for row in rows]).double()
            most = most.amax(0)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
            metrics.update(zip(rows[0], (sign * most).tolist(), strict=True))
    return metrics.pop("loss"), metrics
