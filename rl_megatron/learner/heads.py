"""Heads: turn the last pipeline stage's output into log-probs and entropy, or into values.

Logits of chosen tokens, and the most probable tokens, over a vocabulary of which each TP rank has some rows.

Letters: T positions, V rows of this rank, k tokens a position. ``group`` is the TP group, None for one rank; every rank
of it calls these functions, with ``vocab_start`` rows before its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from typing_extensions import override

from rl_megatron.learner.logprobs import float32_logits, head_logprobs, logit_norms, token_logprobs
from rl_megatron.learner.model.value import BesideOutput
from rl_megatron.learner.packed import PackedMicroBatch
from rl_megatron.types import Want


def logits_of(logits: Tensor, tokens: Tensor, *, vocab_start: int, group: dist.ProcessGroup | None) -> Tensor:
    """Logits [T, k], at least float32, of ``tokens`` [T, k] int64, with a gradient into ``logits`` [T, V]."""
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
    """A sum over ranks of which each goes on with the same loss."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        out = mine.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


EXACT = 2**24
"""Smaller integers are exact in float32."""


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

    says: ClassVar[frozenset[Want]] = frozenset(("logprobs", "entropy", "logits", "top", "logit_norms"))
    temperature: float
    vocab_size: int
    chunk: int
    top_k: int = 0
    """How many tokens ``top`` names."""
    top_below: int = EXACT
    """``top`` names tokens with smaller ids alone."""

    @override
    def __call__(self, output: Tensor, micro_batch: PackedMicroBatch) -> dict[str, Tensor]:
        logprobs, entropy = self._logprobs(output.squeeze(0), micro_batch.targets)
        found = {"logprobs": logprobs, "entropy": entropy}
        if (named := micro_batch.columns.get("ref_top")) is not None:
            found["top_logprobs"] = self._logprobs_of(output.squeeze(0), micro_batch.targets, logprobs, named[:, 0])
        return found

    def _logprobs_of(self, logits: Tensor, targets: Tensor, logprobs: Tensor, tokens: Tensor) -> Tensor:
        """Log-probs [t, k] of ``tokens`` [t, k], by those of the targets."""
        cut = self.cut(logits.shape[-1])
        every = torch.cat([tokens.long(), targets[:, None]], 1)
        x = logits_of(logits, every, vocab_start=cut["vocab_start"], group=cut["group"]) / self.temperature
        return x[:, :-1] - x[:, -1:] + logprobs[:, None]

    def _logprobs(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(logits, targets, **self.cut(self._rows(logits)))

    def _rows(self, output: Tensor) -> int:
        """Of the vocabulary, those of this TP rank."""
        return output.shape[-1]

    def _logits(self, output: Tensor) -> Tensor:
        """Output rows -> float32 logits of this TP rank's rows of the vocabulary."""
        return output.float()

    def cut(self, rows: int) -> dict[str, Any]:
        """The keywords of log-probs over a vocabulary of which each TP rank has ``rows`` rows."""
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
            found["logits"] = self._masked_in(output, micro_batch)
        if "logit_norms" in want:
            mine, rows = output.squeeze(0), self._rows(output)
            found["logit_norms"] = logit_norms(mine, micro_batch.targets, self._logits, rows=rows, **self.cut(rows))
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

    def _masked_in(self, output: Tensor, micro_batch: PackedMicroBatch) -> Tensor:
        """Logits before the temperature, over the whole vocabulary, so only of the masked-in positions."""
        mine = self._logits(output.squeeze(0)[micro_batch.columns["mask"]])
        tp = parallel_state.get_tensor_model_parallel_group()
        if tp.size() > 1:
            shards = [torch.empty_like(mine) for _ in range(tp.size())]
            dist.all_gather(shards, mine.contiguous(), group=tp)
            mine = torch.cat(shards, 1)
        return mine[:, : self.vocab_size]


@dataclass(frozen=True, slots=True, kw_only=True)
class Float32Head(VocabHead):
    """A policy whose model stops before its output layer (`model.hidden`): the output [1, t, h] are hidden states, and
    logits are float32 products of them and of the output layer's weight, a chunk at a time."""

    model: GPTModel
    announces: bool
    """Whether the weight's gradient, which autograd does not see, is announced to it by one of zeros: megatron reduces
    a bucket when autograd has been at all of its parameters (``learner.overlap.gradients``)."""

    @property
    def _weight(self) -> Tensor:
        """[V / tp, h]; the embedding's if that is tied."""
        tied = self.model.share_embeddings_and_output_weights
        weight: Tensor = self.model.shared_embedding_or_output_weight() if tied else self.model.output_layer.weight
        return weight

    @override
    def _logprobs(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return head_logprobs(hidden, self._weight, targets, announce=self.announces, **self.cut(self._rows(hidden)))

    @override
    def _rows(self, output: Tensor) -> int:
        return len(self._weight)

    @override
    def _logits(self, hidden: Tensor) -> Tensor:
        return float32_logits(hidden, self._weight)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuedHead(Head):
    """A policy that is its own critic: what ``policy`` says, and the values after each position's input token."""

    says: ClassVar[frozenset[Want]] = VocabHead.says | ValueHead.says
    policy: VocabHead
    values: BesideOutput

    @override
    def __call__(self, output: Tensor, micro_batch: PackedMicroBatch) -> dict[str, Tensor]:
        return {**self.policy(output, micro_batch), "values": self.values()}

    @override
    def scores(self, output: Tensor, micro_batch: PackedMicroBatch, want: frozenset[Want]) -> dict[Want, Tensor]:
        found, values = self.policy.scores(output, micro_batch, want - ValueHead.says), self.values()
        return found | ({"values": values} if "values" in want else {})
