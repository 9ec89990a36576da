"""What teachers read of a batch, and what several say of it as one reference: log-probs by weight, and the tokens that
one names.

Letters: S sequences, N positions (N' of what a teacher reads by a prompt of its own), k tokens of a teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_megatron.config.beside import with_own_prompt
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.teachers import TeacherSection, teacher_role
from rl_megatron.data.samples import read_by_teacher, rows_of
from rl_megatron.types import RolloutGroup, Samples, Want


def judged_by(config: RunConfig, samples: Samples) -> dict[str, NDArray[np.int64]]:
    """The sequences that each teacher judges, by its role; one without any has no entry."""
    known, every = config.source_names, np.arange(samples.num_sequences)
    found = {}
    for name, one in config.algorithm.kl.teachers.items():
        part = every
        if one.sources and samples.source_of is not None:
            part = every[np.isin(samples.source_of.numpy(), [known.index(source) for source in one.sources])]
        if len(part):
            found[teacher_role(name)] = part
    return found


def read_by(
    config: RunConfig, judged: Mapping[str, NDArray[np.int64]], groups: Sequence[RolloutGroup]
) -> dict[str, Samples]:
    """What each teacher with a prompt of its own reads of the groups, by its role: the sequences that it judges."""
    own = {teacher_role(name): name for name in with_own_prompt(config)}
    right = config.eval.success_reward
    return {
        role: read_by_teacher(groups, own[role], part, success_reward=right)
        for role, part in judged.items()
        if role in own
    }


def as_sampled(column: Tensor, read: Samples, samples: Samples, part: NDArray[np.int64]) -> Tensor:
    """What a teacher said [N', ...] of the tokens of ``read``, where the policy sampled them [N, ...]: of the sequences
    ``part`` of the samples. It is 0 elsewhere."""
    places, _ = rows_of(samples.cu_seqlens, torch.from_numpy(part))
    out = column.new_zeros((len(samples.targets), *column.shape[1:]))
    out[places[samples.mask[places]]] = column[read.mask]
    return out


def one_reference(
    teachers: Mapping[str, TeacherSection],
    judged: Mapping[str, NDArray[np.int64]],
    found: Mapping[tuple[str, Want], Tensor],
    samples: Samples,
) -> dict[str, Tensor]:
    """``ref_logprobs`` [N] float32, the weighted means of the log-probs of each sequence's teachers; and ``ref_top``
    [N, 2, k] of the only one, where it was asked for.

    ``found`` has 0 where a teacher was not asked. The weighted mean's k1 is the weighted sum of the teachers'.
    """
    of = {teacher_role(name): one.weight for name, one in teachers.items() if teacher_role(name) in judged}
    weights = {role: torch.zeros(samples.num_sequences, dtype=torch.float64) for role in of}
    for role, weight in of.items():
        weights[role][judged[role]] = weight
    total = torch.stack(list(weights.values())).sum(0)
    lengths = samples.cu_seqlens.diff()
    logprobs = torch.zeros(len(samples.targets), dtype=torch.float64)
    for role in of:
        logprobs += (weights[role] / total).repeat_interleave(lengths) * found[role, "logprobs"]
    columns = {"ref_logprobs": logprobs.float()}
    if top := [found[role, "top"] for role in of if (role, "top") in found]:
        columns["ref_top"] = torch.stack(top).sum(0)
    return columns
