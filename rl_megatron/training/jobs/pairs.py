"""What jobs on pairs learn: to prefer answers (``job=dpo``), or to score texts (``job=reward_model``)."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from rl_megatron.algorithms.segments import segment_sum, sequence_ids
from rl_megatron.data.packing import Packer, unpack
from rl_megatron.data.pairs import with_margins
from rl_megatron.data.samples import WrittenRow, written_samples
from rl_megatron.durable import remove_folder
from rl_megatron.interfaces import Roles, Scorer
from rl_megatron.observability.recorder import Row, Stopwatch
from rl_megatron.training.jobs.written import JobObjective
from rl_megatron.training.measures import Made
from rl_megatron.training.optimizer_steps import OptimizerSteps
from rl_megatron.types import Loss, LossInputs, Prompt, Samples, Want


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The frozen model that answers are compared with."""

    packer: Packer  # for its ranks, which may have a layout of their own
    folder: Path | None  # None: the model that training starts from, which is kept in the folder below
    start_folder: Path

    async def begin(self, roles: Roles, *, fresh: bool) -> None:
        """Give its ranks its weights; a ``fresh`` run keeps the policy's first if they are these."""
        if fresh and self.folder is None:
            remove_folder(self.start_folder)  # left by a run that was killed before its first checkpoint
            await roles.weights.push(0)
            await roles.weights.export(self.start_folder)
        await roles.frozen["reference"].start_from(self.folder or self.start_folder)

    async def scored(self, roles: Roles, samples: Samples) -> Samples:
        """The samples with its log-probs."""
        scores = await _scores(roles.frozen["reference"], self.packer, samples, "logprobs")
        return replace(samples, ref_logprobs=scores)


@dataclass(slots=True, kw_only=True)
class PairObjective(JobObjective):
    """Of rows that are pairs: what the model says of both answers, in `wants`, beside the log-probs of the frozen
    ``reference`` if the loss compares with one, whose held-out ones are computed once."""

    wants: ClassVar[Want]
    loss: Loss
    roles: Roles
    packer: Packer
    optimizer_steps: OptimizerSteps
    parts: list[Samples]  # held out
    reference: Reference | None = None
    _referred: bool = False

    @override
    async def begin(self, *, fresh: bool) -> None:
        if self.reference is not None:
            await self.reference.begin(self.roles, fresh=fresh)

    @override
    async def step(self, samples: Samples, rate: float, prompts: Iterable[Prompt], watch: Stopwatch) -> Made | None:
        if self.reference is not None:
            with watch("reference"):
                samples = await self.reference.scored(self.roles, samples)
        with watch("train"):
            batch = self.packer.pack(samples)
            made = await self.optimizer_steps.step(self.roles.policy, batch, self.loss, rate, prompts)
        await self._forget()
        return made

    @override
    async def held_out(self) -> Row:
        if self.reference is not None and not self._referred:
            self.parts = [await self.reference.scored(self.roles, part) for part in self.parts]
            self._referred = True
        found = []
        for part in self.parts:
            scores = await _scores(self.roles.policy, self.packer, part, self.wants)
            found.append(await to_thread(_measured, self.loss, part, **{self.wants: scores}))
            await self._forget()
        return _eval_row(found, self.parts)

    async def _forget(self) -> None:
        for model in self.roles.models.values():
            await model.forget()


class Preferences(PairObjective):
    """The better answer is more probable than the worse."""

    wants = "logprobs"

    @override
    @staticmethod
    def samples_of(rows: Sequence[WrittenRow]) -> Samples:
        return written_samples(rows)


class Scoring(PairObjective):
    """A reward model: the score of the better answer above that of the worse."""

    wants = "values"

    @override
    @staticmethod
    def samples_of(rows: Sequence[WrittenRow]) -> Samples:
        return with_margins(rows)


async def _scores(model: Scorer, packer: Packer, samples: Samples, want: Want) -> Tensor:
    batch = packer.pack(samples)
    said = await model.score(batch, frozenset({want}))
    return await to_thread(unpack, batch, said[want], samples)


def _measured(
    loss: Loss, samples: Samples, *, logprobs: Tensor | None = None, values: Tensor | None = None
) -> dict[str, float]:
    """The loss and its metrics of all samples at once."""
    ids, zeros = sequence_ids(samples.cu_seqlens), torch.zeros(len(samples.targets))
    inputs = LossInputs(
        logprobs=zeros if logprobs is None else logprobs,
        values=values,
        entropy=zeros,
        old_logprobs=samples.old_logprobs,
        rollout_logprobs=samples.rollout_logprobs,
        advantages=samples.advantages,
        ref_logprobs=samples.ref_logprobs,
        returns=samples.returns,
        mask=samples.mask,
        segment_ids=ids,
        segment_sum=lambda values: segment_sum(values, ids, samples.num_sequences),
        num_tokens=int(samples.mask.sum()),
        num_sequences=samples.num_sequences,
    )
    output = loss(inputs)
    return {"loss": float(output.loss), **{name: float(metric.value) for name, metric in output.metrics.items()}}


def _eval_row(found: Sequence[Mapping[str, float]], parts: Sequence[Samples]) -> Row:
    """Means over all pairs of the parts."""
    pairs = [part.num_sequences // 2 for part in parts]
    named = {"eval/loss": "loss", "eval/preference_accuracy": "preference/accuracy"}
    named |= {"eval/preference_margin": "preference/margin"}
    return {
        name: sum(one[key] * count for one, count in zip(found, pairs, strict=True)) / sum(pairs)
        for name, key in named.items()
    }
