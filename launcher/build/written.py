"""Builds the job of a run that trains on what somebody wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby

from launcher.build.data import Data
from launcher.build.roles import Parts
from launcher.runs.resume import START_FOLDER
from rl_megatron.algorithms.auxiliary import PreferenceLoss, ScoreLoss
from rl_megatron.algorithms.own import check_own_pair_loss
from rl_megatron.config.sections.data import weights_of
from rl_megatron.config.sections.jobs import JobName
from rl_megatron.data.packing import Packer, packer_of
from rl_megatron.data.problems.conversations import refuse_bad_answers
from rl_megatron.data.problems.prompt_stream import PromptStream
from rl_megatron.data.samples import answer_pairs, check_ends, check_tokens, scored_pairs, supervised_rows
from rl_megatron.interfaces import Roles
from rl_megatron.models.shape import ModelShape
from rl_megatron.placement.names import LEARNER
from rl_megatron.rollout.conversation.pairs import paired_answers, paired_texts
from rl_megatron.rollout.conversation.written import WrittenConversations
from rl_megatron.scaling.flops import seconds_at_peak, training_flops
from rl_megatron.training.jobs.warm_start import answers
from rl_megatron.training.jobs.written import (
    FineTuning,
    HeldOutLoss,
    JobObjective,
    Preferences,
    Reference,
    SamplesOf,
    Scoring,
    SupervisedSteps,
    Unit,
    UnitsOf,
    WrittenJob,
    held_out_parts,
)
from rl_megatron.training.optimizer_steps import OptimizerSteps
from rl_megatron.types import Prompt, Samples


@dataclass(kw_only=True)
class _Rows:
    """Makes the rows of prompts, which are problems, with tokens, or conversations, without."""

    data: Data
    vocab_size: int  # of the model that is trained

    @cached_property
    def _conversations(self) -> WrittenConversations:
        return WrittenConversations(self.data.tokenizer, self.data.stop_token_ids)

    def learnt(self, prompts: Sequence[Prompt]) -> list[Unit]:
        """The rows to train on, one a unit: the answer of a problem, or the turns of a conversation. Raises DataError
        for one that is marked as bad."""
        made, tokenizer = list[Unit](), self.data.tokenizer
        for is_problem, some in _runs(prompts):
            if is_problem:
                rows = supervised_rows(some, answers(some, 0), tokenizer, self.data.end_token_ids)
            else:
                refuse_bad_answers(some)
                rows = self._conversations.rows(some)
            made += [(row,) for row in rows]
        return self._known(made)

    def preferred(self, prompts: Sequence[Prompt]) -> list[Unit]:
        """Both answers of each."""
        made = list[Unit]()
        for is_problem, some in _runs(prompts):
            if is_problem:
                made += answer_pairs(some, self.data.tokenizer, self.data.end_token_ids)
            else:
                made += paired_answers(some, self._conversations)
        return self._known(made)

    def scored(self, prompts: Sequence[Prompt]) -> list[Unit]:
        """Both whole texts of each, as ``reward.function=hf:`` reads them: with special tokens, which the chat template
        of a conversation writes itself."""
        made = list[Unit]()
        for is_problem, some in _runs(prompts):
            texts = (
                [(one.text + one.answer, one.text + one.rejected[0]) for one in some]
                if is_problem
                else paired_texts(some, self._conversations)
            )
            made += scored_pairs(some, texts, self.data.tokenizer, add_special_tokens=is_problem)
        return self._known(made)

    def _known(self, units: list[Unit]) -> list[Unit]:
        """Raises as `check_tokens` and `check_ends`."""
        rows = [row for unit in units for row in unit]
        check_tokens(rows, self.vocab_size)
        check_ends(rows, self.data.stop_token_ids)
        return units


def _runs(prompts: Sequence[Prompt]) -> list[tuple[bool, list[Prompt]]]:
    """Neighbours of one form, and whether they are problems."""
    return [(is_problem, list(some)) for is_problem, some in groupby(prompts, lambda one: bool(one.token_ids))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Building:
    """What an objective is built from."""

    parts: Parts
    roles: Roles
    data: Data
    rows: _Rows
    attention_cost: float
    steps: OptimizerSteps

    def held_out(self, units_of: UnitsOf, samples_of: SamplesOf) -> list[Samples]:
        return held_out_parts(self.data.held_out, units_of, samples_of, self.parts.config)

    def packer(self, unit: int = 1, role: str = LEARNER) -> Packer:
        return packer_of(self.parts.config.learner_of(role), attention_cost=self.attention_cost, unit=unit)


def _fine_tuning(b: _Building) -> tuple[UnitsOf, FineTuning]:
    policy, packer, units_of = b.roles.policy, b.packer(), b.rows.learnt
    return units_of, FineTuning(
        supervised=SupervisedSteps(learner=policy, packer=packer, optimizer_steps=b.steps),
        loss=HeldOutLoss(learner=policy, packer=packer, parts=b.held_out(units_of, FineTuning.samples_of)),
    )


def _preferences(b: _Building) -> tuple[UnitsOf, Preferences]:
    section, units_of = b.parts.config.dpo, b.rows.preferred
    check_own_pair_loss(section)
    reference = Reference(
        packer=b.packer(unit=2, role="reference"),
        folder=section.reference,
        start_folder=b.parts.folder / START_FOLDER,
    )
    return units_of, Preferences(
        loss=PreferenceLoss(row=section, beta=section.beta),
        roles=b.roles,
        packer=b.packer(unit=2),
        optimizer_steps=b.steps,
        parts=b.held_out(units_of, Preferences.samples_of),
        reference=None if section.reference_free else reference,
    )


def _scoring(b: _Building) -> tuple[UnitsOf, Scoring]:
    units_of = b.rows.scored
    return units_of, Scoring(
        loss=ScoreLoss(centring=b.parts.config.reward_model.centring),
        roles=b.roles,
        packer=b.packer(unit=2),
        optimizer_steps=b.steps,
        parts=b.held_out(units_of, Scoring.samples_of),
    )


_OBJECTIVES: Mapping[JobName, tuple[str, Callable[[_Building], tuple[UnitsOf, JobObjective]]]] = {
    "sft": ("fine-tuning", _fine_tuning),
    "dpo": ("preferences", _preferences),
    "reward_model": ("reward model", _scoring),
}
"""What progress calls a job, and the builder of its rows and its objective."""


def written_job(
    parts: Parts,
    shape: ModelShape,
    roles: Roles,
    data: Data,
    *,
    attention_cost: float,
    note: Callable[[str], None],
) -> WrittenJob:
    """The job of ``parts.config.job``, which samples nothing and shows by ``note`` how far its look at the data is.
    ``attention_cost`` as in `causal_attention_cost`."""
    config = parts.config
    rows = _Rows(data=data, vocab_size=shape.vocab_size)
    name, built = _OBJECTIVES[config.job]
    steps = OptimizerSteps(name="policy", most=config.train.most_skipped)
    units_of, objective = built(
        _Building(parts=parts, roles=roles, data=data, rows=rows, attention_cost=attention_cost, steps=steps)
    )
    return WrittenJob(
        config=config,
        roles=roles,
        prompts=PromptStream(data.train, seed=config.seed, weights=weights_of(config.data)),
        size=len(data.train),
        units_of=units_of,
        objective=objective,
        optimizer_steps=steps,
        name=name,
        end_token_ids={} if config.kind.scores else data.end_token_ids,
        dropped=data.train.dropped * (2 if config.kind.pairs else 1),
        seconds_at_peak=seconds_at_peak(shape, roles.gpus, config.learner),
        training_flops=partial(training_flops, shape, learner=config.learner),
        note=note,
    )
