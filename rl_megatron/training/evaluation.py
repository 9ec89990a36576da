"""Evaluates the policy on sets of held-out problems, at the steps of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rl_megatron.config.sections.eval import EvalSection
from rl_megatron.evaluation.sets import ProblemSet, measure, row_of
from rl_megatron.observability.recorder import Row
from rl_megatron.rollout.policy_sampler import PolicySampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Measures ``sets`` with the weights that were pushed last, one after the other. The first gives eval/accuracy."""

    sampler: PolicySampler
    own: Mapping[str, PolicySampler] = field(default_factory=dict)  # of the sets that have one, by name
    sets: Sequence[ProblemSet]
    section: EvalSection
    last_step: int  # after which all sets are due that have no steps of their own

    def due(self, step: int) -> bool:
        """Whether a set is evaluated after ``step``."""
        return bool(self._due(step))

    async def row(self, step: int | None = None, *, pushed: int | None = None) -> Row:
        """Metrics of the sets that are due after ``step``; without one, of the first set. With the version ``pushed``
        for it also the share of sampled tokens that are of that version."""
        row: Row = {}
        own = sampled = 0
        for one in self.sets[:1] if step is None else self._due(step):
            measured = await measure(self.own.get(one.name or "", self.sampler), one, self.section)
            own += measured.versions.get(pushed, 0) if pushed is not None else 0
            sampled += sum(measured.versions.values())
            if one is self.sets[0]:
                row["eval/accuracy"] = sum(measured.right) / (len(one.prompts) * one.section.samples)
                row["eval/errors"] = measured.errors
            if one.name is not None:
                row |= row_of(one.name, measured, one.section.pass_at)
        if pushed is not None and sampled:
            row["eval/own_version_fraction"] = own / sampled
        return row

    async def closed(self) -> None:
        """Wait for what its samplers still release, of training's groups too where these are from ``sampler``."""
        for one in (self.sampler, *self.own.values()):
            await one.closed()

    def _due(self, step: int) -> list[ProblemSet]:
        last = step == self.last_step
        return [one for one in self.sets if one.section.due(step, every=self.section.every, last=last)]
