"""Samples sets of held-out problems with the weights that are served, and computes their figures."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rl_megatron.config.sections.eval import EvalSection, EvalSetSection
from rl_megatron.evaluation.figures import (
    all_at_k,
    chance_interval,
    majority,
    rate_interval,
    share_interval,
)
from rl_megatron.evaluation.figures import (
    pass_at_k as pass_at,
)
from rl_megatron.observability.intervals import Interval
from rl_megatron.rollout.policy_sampler import EvalRequest, PolicySampler, Tell
from rl_megatron.rollout.stream import GroupResult
from rl_megatron.types import Prompt, Turn

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """The problems of a set. ``name`` is None for the run's own held-out data where ``eval.sets`` has no set."""

    name: str | None
    prompts: Sequence[Prompt]
    section: EvalSetSection
    temperature: float

    @property
    def purpose(self) -> str:
        """The name in requests, on which seeds depend."""
        return "evaluation" if self.name is None else f"evaluation {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSetSamples:
    """The samples of a set's P problems, n of each."""

    problems: tuple[str, ...]  # ids
    samples: int
    right: tuple[int, ...]  # [P], samples whose own reward is at least eval.success_reward
    votes: tuple[float, ...] | None  # [P], maj@n of each; None where the reward reads no answers, or n is 1
    errors: int  # samples without a finite reward; they count as wrong
    length: float | None  # mean tokens of a sample, of all its turns; None: no group was sampled whole
    truncated: float | None  # share of samples with a turn that reached max_new_tokens
    seconds: float
    versions: Mapping[int, int] = field(default_factory=dict)  # sampled tokens by the version of the weights

    def metrics(self, pass_at_k: Sequence[int] = ()) -> dict[str, Interval]:
        """Returns the set's figures by name, as ``pass@8``, over its problems."""
        mean = rate_interval(self.right, samples=self.samples)
        out = {f"mean@{self.samples}": mean}
        for k in pass_at_k:
            for name, one in (("pass", pass_at), ("all", all_at_k)):
                values = [one(c, self.samples, k) for c in self.right]
                out[f"{name}@{k}"] = mean if k == 1 else chance_interval(values, samples=self.samples)
        if self.votes is not None:
            out[f"maj@{self.samples}"] = share_interval(self.votes, samples=self.samples)
        return out


async def measure(
    sampler: PolicySampler, problems: EvalSet, section: EvalSection, tell: Tell | None = None
) -> EvalSetSamples:
    """Samples and scores a set; logs how many samples have no reward. Raises as `PolicySampler.held_out`."""
    one, began = problems.section, time.perf_counter()
    params = sampler.params(
        temperature=problems.temperature,
        top_p=one.top_p,
        top_k=one.top_k,
        min_p=one.min_p,
        max_new_tokens=one.max_new_tokens,
    )
    asked = EvalRequest(
        prompts=problems.prompts, params=params, purpose=problems.purpose, samples=one.samples, on_progress=tell
    )
    answered = await sampler.sample_eval(asked)
    judged = [_judged(answer, one.samples, section.success_reward) for answer in answered]
    samples = [trajectory for a in answered if a.group is not None for trajectory in a.group.trajectories]
    total = len(problems.prompts) * one.samples
    errors = total - sum(scored.error is None for answer in answered for scored in answer.scored)
    if errors:
        said = "%s: %d of %d samples have no reward and count as wrong; the lines above say why"
        logger.warning(said, problems.purpose, errors, total)
    if missing := total - len(samples):
        said = "%s: length and truncated are of %d of %d samples; the other %d are of prompts of which one is missing"
        logger.warning(said, problems.purpose, len(samples), total, missing)
    cut = sum(any(turn.finish_reason == "length" for turn in one.turns) for one in samples)
    return EvalSetSamples(
        problems=tuple(prompt.id for prompt in problems.prompts),
        samples=one.samples,
        right=tuple(map(sum, judged)),
        votes=_votes(answered, judged) if one.samples > 1 else None,
        errors=errors,
        length=sum(one.num_sampled for one in samples) / len(samples) if samples else None,
        truncated=cut / len(samples) if samples else None,
        seconds=time.perf_counter() - began,
        versions=_versions([turn for one in samples for turn in one.turns]),
    )


def _versions(turns: Sequence[Turn]) -> Mapping[int, int]:
    counts = Counter[int]()
    for turn in turns:
        ends = (*(span.start for span in turn.spans[1:]), len(turn.logprobs))
        for span, end in zip(turn.spans, ends, strict=False):
            counts[span.version] += end - span.start
    return dict(counts)


def _judged(answer: GroupResult, samples: int, success_reward: float) -> list[bool]:
    """Returns whether each sample is right: none of a prompt that was not sampled, and none without a finite reward,
    whatever number trains in its place."""
    judged = [one.error is None and one.total >= success_reward for one in answer.scored]
    return judged or [False] * samples


def _votes(answered: Sequence[GroupResult], judged: Sequence[Sequence[bool]]) -> tuple[float, ...] | None:
    if all(one.answer is None for answer in answered for one in answer.scored):
        return None
    votes = []
    for answer, right in zip(answered, judged, strict=True):
        given = [one.answer or "" for one in answer.scored]
        votes.append(majority(given, right[: len(given)]))
    return tuple(votes)


def set_metrics(name: str, measured: EvalSetSamples, pass_at_k: Sequence[int]) -> Mapping[str, float | None]:
    """Returns metrics of a set, ``eval/<name>/...`` of docs/metrics.md."""
    row: dict[str, float | None] = {}
    for figure, interval in measured.metrics(pass_at_k).items():
        if not figure.startswith("all@"):
            row[f"eval/{name}/{figure.replace('@', '_at_')}"] = interval.value
    rest = {"length": measured.length, "truncated": measured.truncated, "errors": measured.errors}
    row |= {f"eval/{name}/{key}": value for key, value in rest.items()}
    return {key: value for key, value in row.items() if value is not None}
