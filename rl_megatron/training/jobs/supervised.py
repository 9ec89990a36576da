"""Cross-entropy on written text: optimizer steps, and the loss on held-out text (``job=sft``)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from typing_extensions import override

from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.data.packing import Packer, unpack
from rl_megatron.data.samples import WrittenRow, written_samples
from rl_megatron.interfaces import Learner
from rl_megatron.observability.recorder import Row, Stopwatch
from rl_megatron.training.jobs.written import JobObjective
from rl_megatron.training.measures import Made
from rl_megatron.training.optimizer_steps import OptimizerSteps
from rl_megatron.types import Batch, Prompt, Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedSteps:
    """Steps of ``learner`` by the mean cross-entropy of a batch's learnt tokens."""

    learner: Learner
    packer: Packer
    optimizer_steps: OptimizerSteps

    async def step(self, samples: Samples, learning_rate: float, prompts: Iterable[Prompt]) -> Made | None:
        """Make one optimizer step; None if it was skipped. Raises as `OptimizerSteps.step`."""
        batch = self.packer.pack(samples)
        made = await self.optimizer_steps.step(self.learner, batch, CrossEntropy(), learning_rate, prompts)
        await self.learner.forget()
        return made


@dataclass(slots=True, kw_only=True)
class HeldOutLoss:
    """The loss of ``learner`` on ``parts`` of held-out text, which are packed once."""

    learner: Learner
    packer: Packer
    parts: Sequence[Samples]
    _batches: list[Batch] = field(default_factory=list)

    async def row(self) -> Row:
        """``eval/loss``, the mean over learnt tokens of -log pi(token), and ``eval/perplexity``, its exponential."""
        self._batches = self._batches or [self.packer.pack(part) for part in self.parts]
        total, tokens = 0.0, 0
        for part, batch in zip(self.parts, self._batches, strict=True):
            scores = await self.learner.score(batch, frozenset({"logprobs"}))
            logprobs: Tensor = unpack(batch, scores["logprobs"], part)
            total -= float(logprobs[part.mask].double().sum())
            tokens += int(part.mask.sum())
            await self.learner.forget()
        loss = total / tokens
        return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuning(JobObjective):
    """Cross-entropy on what the rows' turns say."""

    supervised: SupervisedSteps
    loss: HeldOutLoss

    @override
    @staticmethod
    def samples_of(rows: Sequence[WrittenRow]) -> Samples:
        return written_samples(rows)

    @override
    async def begin(self, *, fresh: bool) -> None:
        """There is no other model."""

    @override
    async def step(self, samples: Samples, rate: float, prompts: Iterable[Prompt], watch: Stopwatch) -> Made | None:
        with watch("train"):
            return await self.supervised.step(samples, rate, prompts)

    @override
    async def held_out(self) -> Row:
        return await self.loss.row()
