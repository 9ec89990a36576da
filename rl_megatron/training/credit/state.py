"""An algorithm's state from step to step, and how KL and entropy move its coefficients.

Letter: N positions of all sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from rl_megatron.algorithms.kl import adaptive_beta, kl_per_token
from rl_megatron.algorithms.segments import segment_sum, sequence_ids
from rl_megatron.algorithms.shaping import RunningMoments
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.observability.recorder import Row
from rl_megatron.types import Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmState:
    """An algorithm's state from step to step. Part of a checkpoint."""

    kl_coefficient: float
    entropy_coefficient: float = 0.0
    entropy: float | None = None  # mean of the last step that trained; None before the first, and without a target
    reward_moments: RunningMoments = field(default_factory=RunningMoments)
    baseline: float | None = None  # moving mean of the rewards; None before the first batch

    def entropy_weight(self, section: AlgorithmSection) -> float:
        """The weight of the entropy bonus in the next step: 0 while the entropy is above its target."""
        if section.entropy_target is None:
            return section.entropy_coefficient
        above = self.entropy is not None and self.entropy > section.entropy_target
        return 0.0 if above else self.entropy_coefficient


def controlled(state: AlgorithmState, samples: Samples, section: AlgorithmSection, row: Row) -> AlgorithmState:
    """The state with the next step's coefficients, which follow this step's KL and entropy where these have targets,
    if the policy made a step.

    Reads the row's ``entropy``; writes the KL and the coefficients that acted in this step into it.
    """
    entropy = row.get("entropy")  # the policy made no step without it
    if section.entropy_target is not None:
        row["entropy/coefficient"] = state.entropy_weight(section)
        if isinstance(entropy, float):
            change = section.entropy_step * float(np.sign(section.entropy_target - entropy))
            state = replace(state, entropy=entropy, entropy_coefficient=max(state.entropy_coefficient + change, 0.0))
    if not section.kl.coefficient:
        return state
    kl = mean_over_completions(reference_kl(samples, section), samples)
    row |= {"kl/reference": kl, "kl/coefficient": state.kl_coefficient}
    if section.kl.target is None or not isinstance(entropy, float):
        return state
    beta = adaptive_beta(
        state.kl_coefficient,
        kl,
        target=section.kl.target,
        num_samples=samples.num_trajectories,
        horizon=section.kl.horizon,
    )
    return replace(state, kl_coefficient=beta)


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
