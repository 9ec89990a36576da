"""Jobs on datasets: an optimizer step on each ``batch_size`` rows of the data, and a measurement on held-out rows. The
`DatasetObjective` decides what is learned from the rows.

Jobs on pairs learn to prefer answers (``job=dpo``, also of single answers with labels), or to score texts
(``job=reward_model``).

Cross-entropy on written text: optimizer steps, and the loss on held-out text (``job=sft``).
"""

from __future__ import annotations

import asyncio
import logging
import math
from asyncio import to_thread
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from rl_megatron.algorithms.auxiliary import KtoLoss
from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.algorithms.segments import segment_sum, sequence_ids
from rl_megatron.config.run import RunConfig
from rl_megatron.data.packing import Packer, unpack
from rl_megatron.data.problems.mixture import MixtureState
from rl_megatron.data.problems.pool import PromptStream
from rl_megatron.data.samples import (
    EndTokens,
    SupervisedRow,
    mismatched,
    set_margins,
    supervised_samples,
    warn_if_end_changed,
)
from rl_megatron.errors import DataError
from rl_megatron.files import remove_folder
from rl_megatron.interfaces import Learner, RunComponents, Scorer
from rl_megatron.observability.progress import seldom
from rl_megatron.observability.recorder import Row, Stopwatch
from rl_megatron.training.checkpoints import TrainerState
from rl_megatron.training.optimizer_steps import CompletedStep, OptimizerSteps, learning_rate, policy_row
from rl_megatron.types import Batch, Loss, LossInputs, Prompt, Samples, Want

logger = logging.getLogger(__name__)

_LOOKED_AT = 1 << 14  # rows of the data, before the first step
_UNEQUAL = 1.1  # ratio of the passes over two sources
TOKENS_KEPT = 1 << 22  # tokens of rows that are looked at before the first step; 16 MiB

Unit = tuple[SupervisedRow, ...]
"""Rows that are trained on together or not at all: one, or the two of a pair."""
UnitsOf = Callable[[Sequence[Prompt]], list[Unit]]
"""The units of prompts, in their order; of each prompt one or several."""
SamplesOf = Callable[[Sequence[SupervisedRow]], Samples]


class DatasetObjective(Protocol):
    """The objective of a job on rows, and its measurement on held-out ones."""

    samples_of: SamplesOf
    """Makes the samples of rows, those of a unit next to each other."""

    async def begin(self, *, fresh: bool) -> None:
        """Loads the models that it needs besides the one that is trained."""
        ...

    async def step(
        self, samples: Samples, rate: float, prompts: Iterable[Prompt], watch: Stopwatch
    ) -> CompletedStep | None:
        """Makes one optimizer step; None if skipped. Raises as `OptimizerSteps.step`, to which ``prompts`` go."""
        ...

    async def eval_metrics(self) -> Row:
        """Returns the metrics of the held-out rows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedRows:
    """Units with rows that fit, and how many rows were left out and cut."""

    units: Sequence[Unit]
    num_dropped: int
    num_cut: int

    @property
    def rows(self) -> list[SupervisedRow]:
        """The rows of all units."""
        return [row for unit in self.units for row in unit]


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRows:
    """Prompts that have no units: of those that are refused, why, and the ids of those without a turn to learn."""

    refused: tuple[str, ...] = ()
    unlearned: tuple[str, ...] = ()

    def __add__(self, other: SkippedRows) -> SkippedRows:
        return SkippedRows(refused=self.refused + other.refused, unlearned=self.unlearned + other.unlearned)

    def sequences(self, config: RunConfig) -> int:
        """Returns their number, a conversation counted once: the sequences that it would have are not known."""
        return (len(self.refused) + len(self.unlearned)) * (2 if config.kind.rows == "pairs" else 1)

    def describe(self, of: str, config: RunConfig) -> list[str]:
        """Returns a sentence for each reason, of the prompts that ``of`` counts."""
        told = list[str]()
        if self.refused:
            told.append(
                f"{len(self.refused)} of {of} are refused and left out, by {config.job}.on_refused=drop; the first: "
                f"{self.refused[0]}"
            )
        if self.unlearned:
            told.append(
                f"{len(self.unlearned)} of {of} have no turn to learn and are left out: their messages of the "
                f"assistant have a weight of 0, or there are none; the first: prompt {self.unlearned[0]!r}"
            )
        return told


def make_units(prompts: Sequence[Prompt], units_of: UnitsOf, config: RunConfig) -> tuple[list[Unit], SkippedRows]:
    """Returns the units of ``prompts``, and those without. Raises as ``units_of``, where ``on_refused`` is fail."""
    try:
        units, refused = units_of(prompts), list[tuple[str, str]]()
    except DataError as error:
        if config.written.on_refused == "fail":
            raise DataError(f"{error}; {drop_advice(config)}") from error
        units, refused = units_of_each(prompts, units_of)
    known = {unit[0].id for unit in units}.union(name for name, _ in refused)
    unlearned = tuple(prompt.id for prompt in prompts if prompt.id not in known)
    return units, SkippedRows(refused=tuple(why for _, why in refused), unlearned=unlearned)


def drop_advice(config: RunConfig) -> str:
    """Returns the alternative to fixing rows that are refused."""
    return f"or leave such rows out with {config.job}.on_refused=drop, which a resume may set"


def units_of_each(prompts: Sequence[Prompt], units_of: UnitsOf) -> tuple[list[Unit], list[tuple[str, str]]]:
    """Returns the units of ``prompts``, and the ids of others with why they are refused."""
    units, refused = list[Unit](), list[tuple[str, str]]()
    for prompt in prompts:
        try:
            units += units_of([prompt])
        except DataError as error:
            refused.append((prompt.id, str(error)))
    return units, refused


def fit_rows(units: Sequence[Unit], config: RunConfig) -> FittedRows:
    """Returns the units with rows that fit the job's ``max_tokens``. Raises DataError that names the first longer row,
    where ``on_long`` is fail."""
    section, most = config.written, _max_length(config)
    kept, cut, dropped = list[Unit](), 0, 0
    for unit in units:
        long = [row for row in unit if len(row.token_ids) > most]
        if not long:
            kept.append(unit)
            continue
        if section.on_long == "fail":
            raise DataError(
                f"{_length(long[0], config)}; raise it, or set {config.job}.on_long=drop"
                + ("" if config.kind.rows != "answers" else " or cut")
            )
        short = [shorter for row in unit if (shorter := _cut(row, most)) is not None]
        if section.on_long == "cut" and len(short) == len(unit):
            kept.append(tuple(short))
            cut += len(long)
        else:
            dropped += len(unit)
    return FittedRows(units=kept, num_dropped=dropped, num_cut=cut)


def _max_length(config: RunConfig) -> int:
    """Returns the most tokens of a row that fits: a scored one has one after its text."""
    return config.written.max_tokens + int(config.kind.scores)


def _length(row: SupervisedRow, config: RunConfig) -> str:
    limit, tokens = config.written.max_tokens, len(row.token_ids) - int(config.kind.scores)
    return f"prompt {row.id!r} has {tokens} tokens with its answers, {config.job}.max_tokens={limit}"


def _cut(row: SupervisedRow, limit: int) -> SupervisedRow | None:
    """Returns the row without tokens after ``max_length``, and after the last turn before that; None if nothing is
    left."""
    turns = tuple((start, min(stop, limit)) for start, stop in row.turns if start < limit)
    return replace(row, token_ids=np.array(row.token_ids[: turns[-1][1]]), turns=turns) if turns else None


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The rows and samples of a step (None: no row fits), as they are made, and the place in the data before them."""

    before: dict[str, int] | MixtureState
    rows: Future[tuple[FittedRows, Samples | None]]


@dataclass(slots=True, kw_only=True)
class DatasetJob:
    """A Job of ``training.loop``. The rows of the next step are made while this one trains."""

    config: RunConfig
    roles: RunComponents
    prompts: PromptStream
    size: int  # rows of the data
    units_of: UnitsOf
    objective: DatasetObjective
    optimizer_steps: OptimizerSteps
    """The optimizer steps of the objective."""
    name: str
    end_token_ids: EndTokens = field(default_factory=dict)
    """The tokens after what is learned of each source; empty where there are none."""
    dropped: int = 0
    """Rows that are not in the data, as they were too long when it was read."""
    seconds_at_peak: Callable[[Iterable[int]], float] | None = None
    """Seconds at the GPUs' peak of training on sequences of these lengths; None where that is not known."""
    training_flops: Callable[[Iterable[int]], float] | None = None
    """Operations of training on them."""
    note: Callable[[str], None] = logger.info
    """Shows how far a look at the data is."""
    first_step_is_saved: bool = False
    number: int = 0  # number of the last step
    _next: _Drawn | None = None
    _ahead: deque[tuple[list[Unit], SkippedRows]] = field(
        default_factory=deque
    )  # units of the next steps, which were looked at
    _maker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "rows"))

    async def start(self, *, fresh: bool) -> Row | None:
        """Reads ahead, logs which of the next rows are too long, and loads other models."""
        await asyncio.to_thread(self.prompts.read_ahead)
        self._warn_of_passes()
        await self._prefetch_rows()
        await self.objective.begin(fresh=fresh)
        return self._row() if fresh else None

    def _warn_of_passes(self) -> None:
        """Warns where the steps of ``epochs`` are other passes over one source of a mixture than over another."""
        section, steps = self.config.written, self.config.train.steps
        passes = self.prompts.epochs((steps - self.number) * section.batch_size)
        if section.epochs is not None and passes and max(passes.values()) > _UNEQUAL * min(passes.values()):
            each = ", ".join(f"{count:.3g} times over {name}" for name, count in passes.items())
            logger.warning(
                "%s.epochs=%g: by data.sources.<name>.weight the %d steps pass %s; for equal passes, make each weight "
                "its source's number of rows",
                *(self.config.job, section.epochs, steps, each),
            )

    async def _prefetch_rows(self) -> None:
        """Makes rows, a batch at a time, and keeps them for their steps. They are those of the next epoch, of the steps
        that are left, or as many as ``_LOOKED_AT`` allows, whichever is least. Logs which of them are left out or cut.
        Raises as `make_units`, as `fit_rows`, with the number of long rows in front, and for a new run that has no row
        left."""
        before, left_out, batch = self.prompts.state(), tuple(self.prompts.left_out), self.config.written.batch_size
        wanted = min(self.size, (self.config.train.steps - self.number) * batch)
        count = min(wanted, _LOOKED_AT)
        long, rows, tokens, drawn, note = list[SupervisedRow](), 0, 0, 0, seldom(self.note)
        without, is_any = SkippedRows(), False
        self._ahead.clear()
        while drawn < count and tokens < TOKENS_KEPT:
            some = min(batch, count - drawn)
            units, others = await asyncio.wrap_future(self._maker.submit(self._prefetched, some))
            found = [row for unit in units for row in unit]
            drawn, rows, tokens = drawn + some, rows + len(found), tokens + sum(len(row.token_ids) for row in found)
            note(f"looking for rows that are too long: {drawn} of {count}")
            without, is_any = without + others, is_any or self._is_any_left(units)
            long += [row for row in found if len(row.token_ids) > _max_length(self.config)]
        self.prompts.restore(before, left_out)
        of = f"the first {drawn} rows to train on"
        told = without.describe(of, self.config)
        if long:
            said = f"{len(long)} of the first {rows} sequences to train on are too long: "
            told.append(self._describe_long_rows(long[0], said))
        if drawn == wanted > 0 and not is_any and not self.number:
            if long:
                longest = max(len(row.token_ids) for row in long) - int(self.config.kind.scores)
                told.append(f"the longest has {longest} tokens: raise {self.config.job}.max_tokens")
            raise DataError(f"none of {of} is left: {'; '.join(told)}")
        for one in told:
            logger.warning("%s", one)

    def _is_any_left(self, units: Sequence[Unit]) -> bool:
        return bool(units if self.config.written.on_long == "fail" else fit_rows(units, self.config).units)

    def _describe_long_rows(self, row: SupervisedRow, key: str) -> str:
        """Returns what happens to rows that are as long as ``row``. Raises as `fit_rows`, with ``key`` in front."""
        try:
            fit_rows([(row,)], self.config)
        except DataError as error:
            raise DataError(f"{key}{error}") from error
        return f"{key}{_length(row, self.config)}; {self.config.job}.on_long={self.config.written.on_long}"

    def _prefetched(self, count: int) -> tuple[list[Unit], SkippedRows]:
        made = make_units(self.prompts.next_prompts(count), self.units_of, self.config)
        if count == self.config.written.batch_size:
            self._ahead.append(made)
        return made

    async def step(self, number: int, watch: Stopwatch) -> Row:
        """Makes an optimizer step; without a row that fits, none is made. Its loss is missing if it was skipped."""
        drawn, self.number = self._next or self._draw(), number
        found, samples = await asyncio.wrap_future(drawn.rows)
        passes = {f"source/{name}/epoch": count for name, count in self.prompts.epochs().items()}
        self._next = self._draw() if number < self.config.train.steps else None
        rate = learning_rate(self.config, number)
        row: Row = {**self._row(), "learning_rate": rate, "tokens/train": 0}
        row |= {
            "data/dropped": found.num_dropped + (self.dropped if number == 1 else 0),
            "data/truncated": found.num_cut,
        }
        row["data/epoch"] = number * self.config.written.batch_size / self.size
        row |= passes
        if samples is not None:
            made = await self.objective.step(samples, rate, map(_as_prompt, found.rows), watch)
            row["tokens/train"] = len(samples.input_ids)
            watch.count("train", len(samples.input_ids))
            row |= self._work(samples, watch)
            row |= {"steps/skipped": int(made is None), **policy_row([] if made is None else [made])}
        return {**row, **self.roles.rank_metrics()}

    def _work(self, samples: Samples, watch: Stopwatch) -> Row:
        """Returns metrics of the work of training on the samples; adds its seconds at the GPUs' peak to the phase."""
        lengths = samples.cu_seqlens.diff().tolist()
        if self.seconds_at_peak is not None:
            watch.add_peak_seconds(self.seconds_at_peak(lengths))
        return {} if self.training_flops is None else {"flops/train": self.training_flops(lengths)}

    def _draw(self) -> _Drawn:
        return _Drawn(self.prompts.state(), self._maker.submit(self._make_rows))

    def _make_rows(self) -> tuple[FittedRows, Samples | None]:
        prompts = self.prompts.next_prompts(self.config.written.batch_size)
        units, without = self._ahead.popleft() if self._ahead else make_units(prompts, self.units_of, self.config)
        found = fit_rows(units, self.config)
        found = replace(found, num_dropped=found.num_dropped + without.sequences(self.config))
        return found, self.objective.samples_of(found.rows) if found.units else None

    def _row(self) -> Row:
        return {"step": self.number, "phase": self.config.job}

    async def evaluate(self, watch: Stopwatch) -> Row:
        """Returns the metrics of held-out rows, timed as ``eval``."""
        with watch("eval"):
            return await self.objective.eval_metrics()

    def should_stop(self, row: Row) -> bool:
        """Always False: the job makes all its steps."""
        return False

    def learners(self) -> dict[str, Learner]:
        """Returns the trained model alone, keyed by its subfolder of a checkpoint."""
        return {"learner": self.roles.policy}

    async def flush(self, stop: asyncio.Event) -> None:
        """Does nothing: a resume draws again what is drawn ahead."""

    def state(self) -> TrainerState:
        """Returns the position in the data after the last step."""
        prompts = self.prompts.state() if self._next is None else self._next.before
        skipped = {self.optimizer_steps.name: self.optimizer_steps.skipped_in_a_row}
        return TrainerState(
            step=self.number, prompts=prompts, stream=None, ends=dict(self.end_token_ids), skipped=skipped
        )

    async def restore(self, state: TrainerState) -> None:
        """Continues from ``state``."""
        self.number = state.step
        self.optimizer_steps.skipped_in_a_row = state.skipped.get(self.optimizer_steps.name, 0)
        await asyncio.to_thread(self.prompts.digest)
        self.prompts.restore(state.prompts)
        warn_if_end_changed(state.ends, self.end_token_ids)

    async def close(self) -> None:
        """Ends the making of rows, and forgets those of steps that an early end left out."""
        self._maker.shutdown(wait=False, cancel_futures=True)
        self._ahead.clear()


def _as_prompt(row: SupervisedRow) -> Prompt:
    """Returns its prompt, named by what the row's sequence begins with: a conversation has no tokens."""
    return Prompt(id=row.id, text="", token_ids=tuple(row.token_ids[:-1].tolist()), answer="")


def held_out_parts(
    prompts: Sequence[Prompt], units_of: UnitsOf, samples_of: SamplesOf, config: RunConfig
) -> list[Samples]:
    """Returns held-out rows that fit, in parts of ``batch_size`` prompts; logs how many do not. Raises DataError if
    none does."""
    section, parts, kept, dropped, cut, without = config.written, list[Samples](), 0, 0, 0, SkippedRows()
    for start in range(0, len(prompts), section.batch_size):
        units, others = make_units(prompts[start : start + section.batch_size], units_of, config)
        found, without = fit_rows(units, config), without + others
        kept, dropped, cut = kept + len(found.rows), dropped + found.num_dropped, cut + found.num_cut
        if found.units:
            parts.append(samples_of(found.rows))
    told, limit = (
        without.describe(f"{len(prompts)} held-out rows", config),
        f"{config.job}.max_tokens={section.max_tokens}",
    )
    if not parts:
        long = [f"{dropped} held-out sequences have more tokens than {limit}"] if dropped else []
        raise DataError(f"none of {len(prompts)} held-out rows is left: {'; '.join(told + long)}")
    if dropped or cut:
        told.append(
            f"{dropped} of {kept + dropped} held-out sequences are left out and {cut} are cut, by {limit} and "
            f"on_long={section.on_long}: metrics of eval/ are of the others, and of what fits"
        )
    for one in told:
        logger.warning("%s", one)
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenReference:
    """The frozen model that answers are compared with."""

    packer: Packer  # packs for its ranks, which may have a layout of their own
    folder: Path | None  # None: the model that training starts from, which is kept in the folder below
    start_folder: Path

    async def begin(self, roles: RunComponents, *, fresh: bool) -> None:
        """Gives its ranks its weights; a ``fresh`` run keeps the policy's first if they are these."""
        if fresh and self.folder is None:
            remove_folder(self.start_folder)  # left by a run that was killed before its first checkpoint
            await roles.weight_sync.push(0)
            await roles.weight_sync.export(self.start_folder)
        await roles.frozen_models["reference"].load_weights(self.folder or self.start_folder)

    async def scored(self, roles: RunComponents, samples: Samples) -> Samples:
        """Returns the samples with its log-probs."""
        scores = await _scores(roles.frozen_models["reference"], self.packer, samples, "logprobs")
        return replace(samples, ref_logprobs=scores)


@dataclass(slots=True, kw_only=True)
class PairObjective(DatasetObjective):
    """The objective of rows that are pairs: the better answer is more probable than the worse, or has the higher score.
    The model gives its ``wants`` of both. The loss may compare these with log-probs of the frozen ``reference``, which
    are computed once for held-out rows."""

    wants: Want = "logprobs"
    samples_of: SamplesOf = supervised_samples
    loss: Loss
    roles: RunComponents
    packer: Packer
    optimizer_steps: OptimizerSteps
    parts: list[Samples]  # held out
    reference: FrozenReference | None = None
    _referred: list[list[Samples]] = field(default_factory=list)  # results of `_compared` for each part

    async def _compared(self, samples: Samples) -> list[Samples]:
        """Returns the samples, with the reference's log-probs if there is one, and others that `_loss_of` needs."""
        return [samples if self.reference is None else await self.reference.scored(self.roles, samples)]

    async def _loss_of(self, compared: Sequence[Samples]) -> Loss:
        return self.loss

    @override
    async def begin(self, *, fresh: bool) -> None:
        if self.reference is not None:
            await self.reference.begin(self.roles, fresh=fresh)

    @override
    async def step(
        self, samples: Samples, rate: float, prompts: Iterable[Prompt], watch: Stopwatch
    ) -> CompletedStep | None:
        with watch("reference") if self.reference is not None else nullcontext():
            compared = await self._compared(samples)
            loss = await self._loss_of(compared)
        with watch("train"):
            batch = self.packer.pack(compared[0])
            made = await self.optimizer_steps.step(self.roles.policy, batch, loss, rate, prompts)
        await self._forget()
        return made

    @override
    async def eval_metrics(self) -> Row:
        self._referred = self._referred or [await self._compared(part) for part in self.parts]
        found = []
        for compared in self._referred:
            loss, part = await self._loss_of(compared), compared[0]
            scores = await _scores(self.roles.policy, self.packer, part, self.wants)
            found.append(await to_thread(_measured, loss, part, **{self.wants: scores}))
            await self._forget()
        return _eval_row(found, self.parts)

    async def _forget(self) -> None:
        for model in self.roles.models.values():
            await model.free_step()


@dataclass(slots=True, kw_only=True)
class LabeledAnswers(PairObjective):
    """The objective of rows that are single answers. Those with the label true become more probable, the others less,
    by `KtoLoss` with the reference point of each batch."""

    samples_of: SamplesOf = set_margins
    loss: KtoLoss
    max_length: int  # positions of a sequence

    @override
    async def _compared(self, samples: Samples) -> list[Samples]:
        assert self.reference is not None
        both = samples, mismatched(samples, self.max_length)
        return [await self.reference.scored(self.roles, one) for one in both]

    @override
    async def _loss_of(self, compared: Sequence[Samples]) -> Loss:
        """Returns the loss with its reference point: the mean over the batch of log pi/ref of each prompt with another
        row's answer, at least 0. It is 0 where one row alone is left."""
        _, apart = compared
        if apart.num_sequences < 2 or apart.ref_logprobs is None:
            return self.loss
        scores = await _scores(self.roles.policy, self.packer, apart, "logprobs")
        ratios = (scores.double() - apart.ref_logprobs.double())[apart.mask]
        return replace(self.loss, reference_point=max(0.0, float(ratios.sum()) / apart.num_sequences))


async def _scores(model: Scorer, packer: Packer, samples: Samples, want: Want) -> Tensor:
    batch = packer.pack(samples)
    said = await model.score(batch, frozenset({want}))
    return await to_thread(unpack, batch, said[want], samples)


def _measured(
    loss: Loss, samples: Samples, *, logprobs: Tensor | None = None, values: Tensor | None = None
) -> dict[str, float]:
    """Returns the loss and its metrics of all samples together."""
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
    """Returns means over all pairs, or single answers, of the parts."""
    counts = [part.num_sequences for part in parts]
    named = {"eval/loss": "loss", "eval/preference_accuracy": "preference/accuracy"}
    named |= {"eval/preference_margin": "preference/margin"}
    return {
        name: sum(one[key] * count for one, count in zip(found, counts, strict=True)) / sum(counts)
        for name, key in named.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedSteps:
    """Steps of ``learner`` by the mean cross-entropy of a batch's learned tokens."""

    learner: Learner
    packer: Packer
    optimizer_steps: OptimizerSteps

    async def step(self, samples: Samples, learning_rate: float, prompts: Iterable[Prompt]) -> CompletedStep | None:
        """Makes one optimizer step; None if it was skipped. Raises as `OptimizerSteps.step`."""
        batch = self.packer.pack(samples)
        made = await self.optimizer_steps.step(self.learner, batch, CrossEntropy(), learning_rate, prompts)
        await self.learner.free_step()
        return made


@dataclass(slots=True, kw_only=True)
class SFTObjective(DatasetObjective):
    """Cross-entropy on what the rows' turns say."""

    samples_of: SamplesOf = supervised_samples
    supervised: SupervisedSteps
    parts: Sequence[Samples]  # held out, which are packed once
    _batches: list[Batch] = field(default_factory=list)

    @override
    async def begin(self, *, fresh: bool) -> None:
        """Does nothing: there is no other model."""

    @override
    async def step(
        self, samples: Samples, rate: float, prompts: Iterable[Prompt], watch: Stopwatch
    ) -> CompletedStep | None:
        with watch("train"):
            return await self.supervised.step(samples, rate, prompts)

    @override
    async def eval_metrics(self) -> Row:
        """``eval/loss``, the mean over learned tokens of -log pi(token), and ``eval/perplexity``, its exponential."""
        learner, total, tokens = self.supervised.learner, 0.0, 0
        self._batches = self._batches or [self.supervised.packer.pack(part) for part in self.parts]
        for part, batch in zip(self.parts, self._batches, strict=True):
            scores = await learner.score(batch, frozenset({"logprobs"}))
            logprobs: Tensor = unpack(batch, scores["logprobs"], part)
            total -= float(logprobs[part.mask].double().sum())
            tokens += int(part.mask.sum())
            await learner.free_step()
        loss = total / tokens
        return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}
