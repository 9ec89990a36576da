"""An algorithm's state from step to step, and the KL to the reference.

Letter: N positions of all sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rl_megatron.algorithms.kl import kl_per_token
from rl_megatron.algorithms.segments import segment_sum, sequence_ids
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.observability.recorder import Row
from rl_megatron.types import Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmState:
    """An algorithm's state from step to step. Part of a checkpoint."""

    baseline: float | None = None  # moving mean of the rewards; None before the first batch


def describe_kl(samples: Samples, section: AlgorithmSection, row: Row) -> None:
    """Writes the KL to the reference into the row, if there is one."""
    if section.kl.coefficient:
        row["kl/reference"] = mean_over_completions(reference_kl(samples, section), samples)


def reference_kl(samples: Samples, section: AlgorithmSection) -> Tensor:
    """Estimate of KL(old‖ref) at each position, [N]; 0 outside the mask."""
    assert samples.ref_logprobs is not None
    return kl_per_token(samples.old_logprobs, samples.ref_logprobs, samples.mask, estimator=section.kl.estimator)


def mean_over_completions(values: Tensor, samples: Samples) -> float:
    """Mean over completions of the mean over each one's trained tokens; NaN if there is none."""
    ids, of = sequence_ids(samples.cu_seqlens), samples.trajectory_of
    ids, num = ids if of is None else of[ids], samples.num_trajectories
    count = segment_sum(samples.mask.double(), ids, num)
    sums = segment_sum(values.double() * samples.mask, ids, num)
    return float((sums / count.clamp(min=1)).sum() / count.count_nonzero())
