"""Builds the jobs of a run, in order, from roles, data and configuration.

Builds the job of a run that trains on a dataset of supervised rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING

from launcher.build.data import Data
from launcher.build.roles import RunParts, attention_cost
from launcher.build.sampler import demonstrations, load_environment, make_sampler, make_set_samplers
from launcher.runs.resume import START_FOLDER
from rl_megatron.agents.conversation.written import ConversationRows, single_answers, split_answer_pair, split_text_pair
from rl_megatron.algorithms.auxiliary import KtoLoss, PreferenceLoss, ScoreLoss
from rl_megatron.algorithms.own import check_custom_pair_loss
from rl_megatron.config.resume import fixed
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import source_weights
from rl_megatron.config.sections.jobs import DpoSection, JobName
from rl_megatron.data.packing import Packer, make_packer
from rl_megatron.data.problems.pool import PromptStream
from rl_megatron.data.problems.rendering import is_desirable, refuse_bad_answers
from rl_megatron.data.samples import (
    EndTokens,
    answer_pairs,
    check_ends,
    check_tokens,
    scored_pairs,
    set_margins,
    supervised_rows,
    supervised_samples,
)
from rl_megatron.evaluation.results import eval_digest
from rl_megatron.interfaces import RunComponents
from rl_megatron.models.shape import ModelShape
from rl_megatron.observability.recorder import Recorder
from rl_megatron.observability.timeline import profile_folder
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.routes import find_route
from rl_megatron.rollout.stream import Ledger
from rl_megatron.training.checkpoints import CheckpointStore
from rl_megatron.training.evaluation import BackgroundEvaluator, Evaluator
from rl_megatron.training.flops import seconds_at_peak, training_flops
from rl_megatron.training.jobs.rl import RLJob, make_stream
from rl_megatron.training.jobs.warm_start import WarmStart, answers, warm_start_rows
from rl_megatron.training.jobs.written import (
    DatasetJob,
    DatasetObjective,
    FrozenReference,
    LabeledAnswers,
    PairObjective,
    SamplesOf,
    SFTObjective,
    SupervisedSteps,
    Unit,
    UnitsOf,
    held_out_parts,
)
from rl_megatron.training.loop import Intervals, Loop
from rl_megatron.training.optimizer_steps import OptimizerSteps
from rl_megatron.training.update import PolicyUpdate
from rl_megatron.types import Prompt, Samples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(kw_only=True)
class LearnedRows:
    """Makes the rows that are learned of prompts: problems, with tokens, or conversations, without."""

    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: Sequence[int]
    end_token_ids: EndTokens
    vocab_size: int  # vocabulary of the trained model

    def units(self, config: RunConfig) -> UnitsOf:
        """Returns the method that makes the rows of the job of ``config``."""
        if config.kind.samples:
            return partial(self.warm, config=config)
        if config.kind.rows == "labels":
            return partial(self.labeled, section=config.dpo)
        return {"sft": self.learned, "dpo": self.preferred, "reward_model": self.scored}[config.job]

    @cached_property
    def _conversations(self) -> ConversationRows:
        return ConversationRows(self.tokenizer, self.stop_token_ids)

    def warm(self, prompts: Sequence[Prompt], config: RunConfig) -> list[Unit]:
        """Returns the answers that a warm start learns, one a unit. Raises the errors of `warm_start_rows`."""
        given = (self.tokenizer, self.end_token_ids, self.stop_token_ids, self.vocab_size)
        return [(row,) for row in warm_start_rows(prompts, answers(prompts, 0), config, *given)]

    def learned(self, prompts: Sequence[Prompt]) -> list[Unit]:
        """Returns the rows to train on, one a unit: the answer of a problem, or the turns of a conversation. Raises
        DataError for one that is marked as bad."""
        made = list[Unit]()
        for is_problem, some in _runs(prompts):
            if is_problem:
                rows = supervised_rows(some, answers(some, 0), self.tokenizer, self.end_token_ids)
            else:
                refuse_bad_answers(some)
                rows = self._conversations.rows(some)
            made += [(row,) for row in rows]
        return self._known(made)

    def preferred(self, prompts: Sequence[Prompt]) -> list[Unit]:
        """Returns both answers of each prompt, one pair a unit."""
        made = list[Unit]()
        for is_problem, some in _runs(prompts):
            if is_problem:
                made += answer_pairs(some, self.tokenizer, self.end_token_ids)
            else:
                made += split_answer_pair(some, self._conversations)
        return self._known(made)

    def labeled(self, prompts: Sequence[Prompt], section: DpoSection) -> list[Unit]:
        """Returns each prompt's answer, one a unit; its margin is the weight of its label, negative where it is
        undesirable. Raises DataError for one without a label."""
        made = list[Unit]()
        for is_problem, some in _runs(prompts):
            if is_problem:
                texts = [(one.answer,) for one in some]
                rows = list(zip(some, supervised_rows(some, texts, self.tokenizer, self.end_token_ids), strict=True))
            else:
                rows = single_answers(some, self._conversations)
            weights = section.desirable_weight, -section.undesirable_weight
            made += [(replace(row, margin=weights[not is_desirable(prompt)]),) for prompt, row in rows]
        return self._known(made)

    def scored(self, prompts: Sequence[Prompt]) -> list[Unit]:
        """Returns each prompt's two whole texts, as ``reward.function=hf:`` reads them: with special tokens, which the
        chat template of a conversation writes itself."""
        made = list[Unit]()
        for is_problem, some in _runs(prompts):
            texts = (
                [(one.text + one.answer, one.text + one.rejected[0]) for one in some]
                if is_problem
                else split_text_pair(some, self._conversations)
            )
            made += scored_pairs(some, texts, self.tokenizer, add_special_tokens=is_problem)
        return self._known(made)

    def _known(self, units: list[Unit]) -> list[Unit]:
        """Returns the units. Raises the errors of `check_tokens` and `check_ends`."""
        rows = [row for unit in units for row in unit]
        check_tokens(rows, self.vocab_size)
        check_ends(rows, self.stop_token_ids)
        return units


def _runs(prompts: Sequence[Prompt]) -> list[tuple[bool, list[Prompt]]]:
    """Returns neighbors of one form, and whether they are problems."""
    return [(is_problem, list(some)) for is_problem, some in groupby(prompts, lambda one: bool(one.token_ids))]


_NAMES: Mapping[JobName, str] = {"sft": "fine-tuning", "dpo": "preferences", "reward_model": "reward model"}
"""The name of each job in progress lines."""


def _objective(
    parts: RunParts, roles: RunComponents, data: Data, units_of: UnitsOf, attention_cost: float, steps: OptimizerSteps
) -> DatasetObjective:
    """Returns the objective of the job ``parts.config.job``."""
    config, section = parts.config, parts.config.dpo

    def packer(unit: int = 1, role: str = LEARNER) -> Packer:
        return make_packer(config.role_learner(role), attention_cost=attention_cost, unit=unit)

    def held_out(samples_of: SamplesOf) -> list[Samples]:
        return held_out_parts(data.held_out, units_of, samples_of, config)

    if config.job == "sft":
        supervised = SupervisedSteps(learner=roles.policy, packer=packer(), optimizer_steps=steps)
        return SFTObjective(supervised=supervised, parts=held_out(supervised_samples))
    if config.job == "reward_model":
        return PairObjective(
            wants="values",
            samples_of=set_margins,
            loss=ScoreLoss(centering=config.reward_model.centring),
            roles=roles,
            packer=packer(unit=2),
            optimizer_steps=steps,
            parts=held_out(set_margins),
        )
    reference = FrozenReference(
        packer=packer(unit=1 if section.is_unpaired else 2, role="reference"),
        folder=config.reference,
        start_folder=parts.folder / START_FOLDER,
    )
    if section.is_unpaired:
        return LabeledAnswers(
            loss=KtoLoss(beta=section.beta),
            roles=roles,
            packer=packer(),
            optimizer_steps=steps,
            parts=held_out(set_margins),
            reference=reference,
            max_length=section.max_tokens - 1,
        )
    check_custom_pair_loss(section)
    return PairObjective(
        loss=PreferenceLoss(row=section, beta=section.beta),
        roles=roles,
        packer=packer(unit=2),
        optimizer_steps=steps,
        parts=held_out(supervised_samples),
        reference=None if section.reference_free else reference,
    )


def dataset_job(
    parts: RunParts,
    shape: ModelShape,
    roles: RunComponents,
    data: Data,
    *,
    attention_cost: float,
    note: Callable[[str], None],
) -> DatasetJob:
    """Returns the job of ``parts.config.job``, which samples nothing. ``note`` gets the progress of its look at the
    data. ``attention_cost`` is that of `causal_attention_cost`."""
    config = parts.config
    stops, ends, size = data.stop_token_ids, data.end_token_ids, shape.vocab_size
    rows = LearnedRows(tokenizer=data.tokenizer, stop_token_ids=stops, end_token_ids=ends, vocab_size=size)
    units_of = rows.units(config)
    steps = OptimizerSteps(name="policy")
    return DatasetJob(
        config=config,
        roles=roles,
        prompts=PromptStream(data.train, seed=config.seed, weights=source_weights(config.data)),
        size=len(data.train),
        units_of=units_of,
        objective=_objective(parts, roles, data, units_of, attention_cost, steps),
        optimizer_steps=steps,
        name=_NAMES[config.job],
        end_token_ids={} if config.kind.scores else data.end_token_ids,
        dropped=data.train.dropped * (2 if config.kind.rows == "pairs" else 1),
        seconds_at_peak=seconds_at_peak(shape, roles.gpu_names, config.learner),
        training_flops=partial(training_flops, shape, learner=config.learner),
        note=note,
    )


def make_loops(
    parts: RunParts, shape: ModelShape, roles: RunComponents, data: Data, recorder: Recorder, stop: asyncio.Event
) -> tuple[Loop | None, Loop]:
    """Returns the loop of the warm start, if the job has one, and the loop of the job. The processes must be up."""
    config = parts.config
    saves = config.checkpoint
    store = CheckpointStore(
        parts.folder / "checkpoints",
        keep=saves.keep,
        keep_best=saves.keep_best,
        config=fixed(config),
        measured_by=eval_digest(config.model_dump(mode="json"), data.sets[0]),
        claimed=parts.check_claim,
    )
    looped = partial(Loop, checkpoints=store, recorder=recorder, stop=stop, async_save=saves.async_save)
    every = Intervals(steps=config.train.steps, metrics=1, evaluations=config.eval.every, checkpoints=saves.every)
    steps, run = config.profile.steps, parts.folder.resolve()

    def profiled(step: int) -> AbstractAsyncContextManager[None]:
        return roles.record_kernels(profile_folder(run, step)) if step in steps else nullcontext()

    if not config.kind.samples:
        return None, looped(
            job=dataset_job(
                parts, shape, roles, data, attention_cost=attention_cost(shape), note=recorder.progress.note
            ),
            pace=every,
            profiled=profiled,
        )
    warm, job = _sampling(parts, shape, roles, data, recorder)
    check = config.warm_start.check_every
    first = Intervals(steps=config.warm_start.steps, metrics=check, evaluations=check, checkpoints=None)
    pace = replace(every, sets_due=job.evaluation.due)
    return looped(job=warm, pace=first), looped(job=job, pace=pace, profiled=profiled)


def _sampling(
    parts: RunParts, shape: ModelShape, roles: RunComponents, data: Data, recorder: Recorder
) -> tuple[WarmStart, RLJob]:
    """Returns the warm start, and the job on groups of completions."""
    config, size, cost = parts.config, shape.vocab_size, attention_cost(shape)
    made = load_environment(config)
    sampler = make_sampler(config, made, roles.engine, parts.reward, data, vocab_size=size)
    evaluation = Evaluator(
        sampler=sampler,
        own_samplers=make_set_samplers(config, roles.engine, data, vocab_size=size),
        sets=data.sets,
        section=config.eval,
        last_step=config.train.steps,
    )
    prompts = PromptStream(
        data.train,
        seed=config.seed,
        weights=source_weights(config.data),
        curriculum=config.data.curriculum,
        track_decay=config.algorithm.track_decay,
    )
    update = PolicyUpdate(
        config=config,
        roles=roles,
        attention_cost=cost,
        seconds_at_peak=seconds_at_peak(shape, roles.gpu_names, config.learner),
        training_flops=partial(training_flops, shape, learner=config.learner),
        tracked=None if prompts.table is None else prompts.table.prompt_value,
    )
    packer = make_packer(config.learner, attention_cost=cost)
    warm = WarmStart(
        config=config,
        roles=roles,
        prompts=PromptStream(data.train, seed=config.seed + 1, weights=source_weights(config.data)),
        tokenizer=data.tokenizer,
        end_token_ids=data.end_token_ids,
        stop_token_ids=data.stop_token_ids,
        vocab_size=size,
        targets=answers if made is None else demonstrations(made, config),
        evaluation=evaluation,
        supervised=SupervisedSteps(learner=roles.policy, packer=packer, optimizer_steps=update.policy_steps),
        note=recorder.progress.note,
    )
    beside = BackgroundEvaluator(evaluation=evaluation, recorder=recorder, max_requests=config.eval.at_once)
    return warm, RLJob(
        config=config,
        roles=roles,
        prompts=prompts,
        stream=make_stream(config, prompts, sampler, Ledger(parts.folder / "ledger.jsonl")),
        evaluation=evaluation,
        update=update,
        start_folder=parts.folder / START_FOLDER,
        recorder=recorder,
        push_route=find_route(config).name,
        background_eval=beside if config.eval.mode != "blocking" else None,
    )
