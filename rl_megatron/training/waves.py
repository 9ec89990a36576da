"""Trains on a rollout batch while the rest of it is sampled: backward passes of full waves, then one optimizer step.

A wave is what fills ``train.stream_micro_batches`` micro-batches on every data-parallel rank. It is packed when its
groups are there, which binds them to ranks. How many tokens the batch will have is not known before its last group:
losses take planned counts, and the step multiplies gradients by the planned count over the actual one. So gradient,
step and metrics are those of the whole batch but for rounding, in any cut (`config.waves` refuses what is not so).
Which groups are in which wave depends on when they arrive.
"""

from __future__ import annotations

import math
from asyncio import to_thread
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor

from rl_megatron.algorithms.aggregation import Denominator
from rl_megatron.algorithms.losses import PolicyLoss
from rl_megatron.config.waves import micro_batches_filled
from rl_megatron.data.demonstrations import with_demonstrations
from rl_megatron.data.packing import padded_lengths
from rl_megatron.observability.recorder import Row, Stopwatch
from rl_megatron.training.credit.shaping import shape_rewards
from rl_megatron.training.credit.state import controlled
from rl_megatron.training.measures import Measured, advantage_row, policy_row
from rl_megatron.training.schedule import learning_rate
from rl_megatron.training.update import Update, positions_of
from rl_megatron.types import Batch, Counts, Metric, Prompt, RolloutGroup, Samples, SkippedStep

OfLoss = Mapping[str, Metric[float | Counts]]


@dataclass(slots=True, kw_only=True)
class _Trained:
    """The waves of a step so far."""

    loss: PolicyLoss
    prompts: list[Prompt] = field(default_factory=list)
    found: list[Measured] = field(default_factory=list)
    samples: list[Samples] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)  # of waves with a token to train on
    of_loss: list[OfLoss] = field(default_factory=list)  # of the same, over planned counts
    positions: int = 0  # of the same


@dataclass(slots=True, kw_only=True)
class WaveUpdate(Update):
    """An update in waves."""

    async def over(self, finished: AsyncIterator[RolloutGroup], step: int, watch: Stopwatch) -> Row:
        """Train on the batch of the groups that ``finished`` gives. Returns the metrics that a whole batch has, with
        ``waves/count`` and ``waves/early_fraction``; those of packing are of this cut.

        The phase ``rollout`` has only the seconds of waiting without a full wave.
        """
        loss = self._loss()
        assert isinstance(loss, PolicyLoss)  # of pairs: refused
        trained, waiting, early, more = _Trained(loss=loss), list[RolloutGroup](), 0, True
        while more:
            with watch("rollout"):
                group = await anext(finished, None)
            more = group is not None
            if group is not None:
                early = trained.positions
                waiting += with_demonstrations([group])
            if waiting and (not more or self._is_full(waiting)):
                await self._wave(waiting, trained, step, watch)
                waiting = []
        row = await self._stepped(trained, step, watch)
        await self.forget()
        if trained.batches:
            row |= {"waves/count": len(trained.batches), "waves/early_fraction": early / trained.positions}
        return row

    def _is_full(self, groups: Sequence[RolloutGroup]) -> bool:
        rows = [len(row.token_ids) - 1 for group in groups for one in group.trajectories for row in one.chains]
        positions = int(padded_lengths(np.array(rows), self.config.learner.dims).sum())
        filled = micro_batches_filled(self.config.learner, positions=positions, sequences=len(rows))
        return filled >= self.config.train.stream_micro_batches

    @property
    def _planned(self) -> dict[Denominator, int]:
        """The counts of a batch of the longest completions."""
        completions = self.config.completions_per_step
        return {
            "num_tokens": completions * self.config.most_sampled,
            "num_sequences": completions,
            "num_trajectories": completions,
            "num_prompts": self.config.rollout.prompts_per_step,
        }

    async def _wave(self, groups: Sequence[RolloutGroup], trained: _Trained, step: int, watch: Stopwatch) -> None:
        """Score the groups, and add their gradients."""
        c = self.config
        rewards = shape_rewards(groups, c.algorithm, self.state, max_new_tokens=c.most_sampled)
        found, samples, _ = await self._scored(groups, rewards, step, watch)  # the state that follows is this one
        trained.prompts += [group.prompt for group in groups]
        trained.found.append(found)
        trained.samples.append(samples)
        samples = await to_thread(self._weighted, samples, None, self._planned[trained.loss.denominator("loss")])
        batch = await to_thread(self.packers.packed, samples, step)
        if not batch.num_tokens:
            return
        tokens, sequences = self._planned["num_tokens"], self._planned["num_sequences"]
        with watch("train"):
            planned = replace(batch, num_tokens=tokens, num_sequences=sequences)
            said = await self.roles.policy.backward(planned, trained.loss)
        trained.batches.append(batch)
        trained.positions += sum(positions_of(batch))
        trained.of_loss.append(said)

    async def _stepped(self, trained: _Trained, step: int, watch: Stopwatch) -> Row:
        """Make the optimizer step on all waves; none if no token is left to train on. Returns the metrics."""
        row: Row = {"tokens/train": 0}
        if not trained.found:
            return row
        found, samples = await to_thread(lambda: (_cat_measured(trained.found), _cat_samples(trained.samples)))
        row |= await to_thread(self._gaps, found)
        if not trained.batches:
            return row
        rate = learning_rate(self.config, step)
        row |= {"learning_rate": rate, **await to_thread(advantage_row, samples)}
        row |= await to_thread(self.packers.own.metrics, trained.batches)
        for batch in trained.batches:
            self._count_work(batch, row, watch)
        actual: dict[Denominator, int] = {
            "num_tokens": int(samples.mask.sum()),
            "num_sequences": samples.num_sequences,
            "num_trajectories": samples.num_trajectories,
            "num_prompts": len(trained.prompts),
        }
        scales = {name: planned / actual[name] for name, planned in self._planned.items()}
        with watch("train"):
            result = await self.roles.policy.step(rate, scales[trained.loss.denominator("loss")])
        of_loss = of_whole_batch(trained.of_loss, trained.loss, scales)
        rows = await to_thread(_rows, trained.batches) if isinstance(result, SkippedStep) else ()
        made = self.policy_steps.judge(result, of_loss, rows, trained.prompts)
        row["steps/skipped"] = int(made is None)
        row |= policy_row([] if made is None else [made])
        row |= await self._flips(found, step, watch)
        self.state = await to_thread(controlled, self.state, samples, self.config.algorithm, row)
        return row


def of_whole_batch(waves: Sequence[OfLoss], loss: PolicyLoss, scales: Mapping[Denominator, float]) -> OfLoss:
    """The loss and its metrics over the whole batch, of waves that have them over planned counts.

    ``scales`` are planned counts over actual ones.
    """
    out: dict[str, Metric[float | Counts]] = {}
    for name, kind in waves[0].items():
        parts = [wave[name].value for wave in waves]
        value: float | Counts
        if kind.over == "histogram":
            value = tuple(map(math.fsum, zip(*(part for part in parts if isinstance(part, tuple)), strict=True)))
        else:
            numbers = [part for part in parts if isinstance(part, float)]
            value = {"min": min, "max": max}.get(kind.over, math.fsum)(numbers)
            value *= scales[loss.denominator(name)] if kind.over == "mean" else 1.0
        out[name] = replace(kind, value=value)
    return out


def _rows(waves: Sequence[Batch]) -> list[list[Samples]]:
    """The micro-batches of all waves, in their order on each rank, in which culprits are numbered."""
    return [[one for wave in waves for one in wave.micro_batches[d]] for d in range(len(waves[0].micro_batches))]


def _cat_samples(parts: Sequence[Samples]) -> Samples:
    columns = {name: torch.cat([part.columns[name] for part in parts]) for name in parts[0].columns}
    lengths = torch.cat([part.cu_seqlens.diff() for part in parts])
    return Samples(
        **columns,
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        group_of=_cat_ids([part.group_of for part in parts], parts),
        trajectory_of=_cat_ids([part.trajectory_of for part in parts], parts),
    )


def _cat_ids(every: Sequence[Tensor | None], parts: Sequence[Samples]) -> Tensor | None:
    """Ids that are not those of another part; a part without any has one for each sequence."""
    if all(ids is None for ids in every):
        return None
    each = [torch.arange(p.num_sequences) if ids is None else ids for ids, p in zip(every, parts, strict=True)]
    after = np.cumsum([0, *(int(ids.max()) + 1 for ids in each)])
    return torch.cat([ids + int(first) for ids, first in zip(each, after, strict=False)])


def _cat_measured(parts: Sequence[Measured]) -> Measured:
    tensors = {one.name: [getattr(part, one.name) for part in parts] for one in fields(Measured)}
    samples = _cat_samples(tensors.pop("samples"))
    return Measured(samples, **{name: _cat_column(column) for name, column in tensors.items()})


def _cat_column(column: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in column if part is not None]
    return torch.cat(present) if present else None
