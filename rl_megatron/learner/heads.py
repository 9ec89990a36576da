"""Heads: turn the last pipeline stage's output into log-probs and entropy, or into values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from typing_extensions import override

from rl_megatron.learner.logprobs import token_logprobs
from rl_megatron.learner.packed import PackedMicroBatch
from rl_megatron.types import Want


class Head(Protocol):
    """Turns the last pipeline stage's output [1, t, ...] into what a loss or a scorer reads. Every TP rank calls it."""

    says: ClassVar[frozenset[Want]]
    """The scores that ``scores`` can compute."""

    def __call__(self, output: Tensor, micro_batch: PackedMicroBatch) -> dict[str, Tensor]:
        """``logprobs``, ``entropy`` (and ``values``) [t] float32 of LossInputs."""
        ...

    def scores(self, output: Tensor, micro_batch: PackedMicroBatch, want: frozenset[Want]) -> dict[Want, Tensor]:
        """The scores in ``want``, a subset of ``says``: [t] float32, logits [masked-in, V]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabHead(Head):
    """A policy: logits [1, t, V / tp] become log-probs of the targets and the entropy."""

    says: ClassVar[frozenset[Want]] = frozenset(("logprobs", "logits"))
    temperature: float
    vocab_size: int
    chunk: int

    @override
    def __call__(self, output: Tensor, micro_batch: PackedMicroBatch) -> dict[str, Tensor]:
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

    @override
    def scores(self, output: Tensor, micro_batch: PackedMicroBatch, want: frozenset[Want]) -> dict[Want, Tensor]:
        found: dict[Want, Tensor] = {}
        if "logprobs" in want:
            found["logprobs"] = self(output, micro_batch)["logprobs"]
        if "logits" in want:
            found["logits"] = self._masked_in(output, micro_batch)
        return found

    def _masked_in(self, output: Tensor, micro_batch: PackedMicroBatch) -> Tensor:
        """Logits before the temperature, over the whole vocabulary, so only of the masked-in positions."""
        mine = output.squeeze(0)[micro_batch.columns["mask"]].float()
        tp = parallel_state.get_tensor_model_parallel_group()
        if tp.size() > 1:
            shards = [torch.empty_like(mine) for _ in range(tp.size())]
            dist.all_gather(shards, mine.contiguous(), group=tp)
            mine = torch.cat(shards, 1)
        return mine[:, : self.vocab_size]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueHead(Head):
    """A critic: the output [1, t, 1] is the value after each position's input token."""

    says: ClassVar[frozenset[Want]] = frozenset(("values",))

    @override
    def __call__(self, output: Tensor, micro_batch: PackedMicroBatch) -> dict[str, Tensor]:
        values = output.flatten().float()
        return {"values": values, "logprobs": torch.zeros_like(values), "entropy": torch.zeros_like(values)}

    @override
    def scores(self, output: Tensor, micro_batch: PackedMicroBatch, want: frozenset[Want]) -> dict[Want, Tensor]:
        return {"values": output.flatten().float()} if "values" in want else {}
