"""Teachers in place of the reference: the samples that each reads of a batch, and the mean of several teachers.

Letters: S sequences, N positions (N' of the samples of a teacher with its own prompt), k tokens of a teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nlargest

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from rl_megatron.config.beside import longest_scored_row, teachers_with_prompt
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.teachers import OTHER_COMPLETION_TOKEN, teacher_role
from rl_megatron.data.samples import gather_rows, join_rows
from rl_megatron.feature import Judge, Judges, StepHooks
from rl_megatron.interfaces import RunComponents
from rl_megatron.types import Prompt, RolloutGroup, Samples, Trajectory, Want


def make_hooks(config: RunConfig, roles: RunComponents) -> Teachers | None:
    """Returns the hooks of a run's teachers; None without ``algorithm.kl.teachers``."""
    return Teachers(config, frozenset(roles.models)) if config.algorithm.kl.teachers else None


@dataclass(frozen=True, slots=True)
class Teachers(StepHooks):
    """Teachers; each scores the prompts of its sources. One outside ``models`` is the policy or its average."""

    config: RunConfig
    models: frozenset[str]

    @override
    def judges(self, samples: Samples, groups: Sequence[RolloutGroup]) -> Judges:
        known = [group.prompt.source for group in groups for one in group.trajectories for _ in one.chains]
        own, itself = teachers_with_prompt(self.config), "reference" if self.config.taught_by_average else "policy"
        right, asked, weights = self.config.eval.success_reward, list[Judge](), dict[str, float]()
        for name, one in self.config.algorithm.kl.teachers.items():
            sources, role = np.array(known), teacher_role(name)
            part = np.flatnonzero(np.isin(sources, one.sources)) if one.sources else np.arange(samples.num_sequences)
            if len(part):
                weights[role] = one.weight
                read = teacher_samples(groups, name, part, success_reward=right) if name in own else None
                longest = longest_scored_row(self.config, role)[1]
                model = role if role in self.models else itself
                asked.append(Judge(role=role, model=model, part=part, read=read, longest=longest))
        return Judges(judges=asked, columns=partial(merge_teacher_logprobs, asked, weights, samples=samples))


def teacher_samples(
    groups: Sequence[RolloutGroup], name: str, part: NDArray[np.int64], *, success_reward: float
) -> Samples:
    """Returns the rows ``part`` of `to_samples`, with the prompt that the teacher ``name`` reads in place of the
    policy's. Their log-probs are 0. Each has one turn.

    ``OTHER_COMPLETION_TOKEN`` in that prompt stands for the group's best other completion, without its end token. If
    that one's reward is below ``success_reward``, the row has the policy's own prompt."""
    ranked = [(group, nlargest(2, group.trajectories, key=lambda one: one.reward)) for group in groups]
    rows = [(of.prompt, best, one, row) for of, best in ranked for one in of.trajectories for row in one.chains]
    chosen = [rows[number] for number in part.tolist()]
    before = [_before(prompt, name, best, one, success_reward) for prompt, best, one, _ in chosen]
    behind = [row.token_ids[row.turns[0].start :] for *_, row in chosen]
    tokens = [np.concatenate([np.array(one, np.int32), ids]) for one, ids in zip(before, behind, strict=True)]
    turns = [[(len(one), np.zeros(len(ids), np.float32))] for one, ids in zip(before, behind, strict=True)]
    return join_rows([prompt.id for prompt, *_ in chosen], tokens, turns)


def _before(
    prompt: Prompt, name: str, two_best: Sequence[Trajectory], own: Trajectory, success_reward: float
) -> Sequence[int]:
    """Returns the tokens before the sampled ones, as the teacher ``name`` reads them. One of the ``two_best``
    trajectories of the group differs from ``own``, if it has several."""
    read = prompt.read_by[name]
    if OTHER_COMPLETION_TOKEN not in read:
        return read
    best = next((one for one in two_best if one is not own), None)
    if best is None or best.reward < success_reward:
        return prompt.token_ids
    (row,), at = best.chains, read.index(OTHER_COMPLETION_TOKEN)
    ended = row.turns[-1].finish_reason == "stop"
    shown = row.token_ids[row.turns[0].start : len(row.token_ids) - ended].tolist()
    return [*read[:at], *shown, *read[at + 1 :]]


def merge_teacher_logprobs(
    judges: Sequence[Judge],
    weights: Mapping[str, float],
    found: Mapping[tuple[str, Want], Tensor],
    *,
    samples: Samples,
) -> dict[str, Tensor]:
    """Returns ``ref_logprobs`` [N] float32, the means of the log-probs of each sequence's teachers by their
    ``weights``; and ``ref_top`` [N, 2, k] of the only teacher, if requested.

    ``found`` is 0 outside a teacher's sequences. Scores by a teacher with its own prompt move to the policy's places of
    the sampled tokens; other places are 0. The weighted mean's k1 is the weighted sum of the teachers'.
    """

    def describe(one: Judge, what: Want) -> Tensor:
        column = found[one.role, what]
        if one.read is None:
            return column
        places, _ = gather_rows(samples.cu_seqlens, torch.from_numpy(one.part))
        out = column.new_zeros((len(samples.targets), *column.shape[1:]))
        out[places[samples.mask[places]]] = column[one.read.mask]  # [N', ...], tokens that the policy sampled
        return out

    of_sequences = torch.zeros(len(judges), samples.num_sequences, dtype=torch.float64)
    for row, one in zip(of_sequences, judges, strict=True):
        row[one.part] = weights[one.role]
    total, lengths = of_sequences.sum(0), samples.cu_seqlens.diff()
    logprobs = torch.zeros(len(samples.targets), dtype=torch.float64)
    for row, one in zip(of_sequences, judges, strict=True):
        logprobs += (row / total).repeat_interleave(lengths) * describe(one, "logprobs")
    columns = {"ref_logprobs": logprobs.float()}
    if top := [describe(one, "top") for one in judges if (one.role, "top") in found]:
        columns["ref_top"] = torch.stack(top).sum(0)
    return columns
