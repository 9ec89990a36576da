"""What the last pipeline stage's output means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rl_megatron.learner.logprobs import token_logprobs
from rl_megatron.learner.packed import PackedMicroBatch


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
        """``logprobs`` (nats) and ``entropy`` [t] float32."""
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
        """``logits`` [masked-in, V] float32, before the temperature."""
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
        """``values`` [t] float32; ``logprobs`` and ``entropy`` are zeros."""
        values = output.flatten().float()
        return {"values": values, "logprobs": torch.zeros_like(values), "entropy": torch.zeros_like(values)}
