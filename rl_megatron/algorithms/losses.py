"""The losses the learner is given: pure, picklable functions of one micro-batch (``rl_megatron.types.Loss``).

A policy-gradient algorithm is a row of choices (docs/algorithms.md); the functions behind each choice are in
ratios.py, objectives.py and aggregation.py. T positions, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_megatron.algorithms.aggregation import AGGREGATIONS, seq_mean_token_mean, token_mean
from rl_megatron.algorithms.choices import choose
from rl_megatron.algorithms.divergence import k3
from rl_megatron.algorithms.objectives import OBJECTIVES, Limits, clip, reinforce
from rl_megatron.algorithms.ratios import LOG_RATIO_BOUND, RATIO_LEVELS, masked, sequence_log_ratio
from rl_megatron.types import LossInputs, LossOutput

_RATIO_MEANS = {"token": token_mean, "sequence": seq_mean_token_mean}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss(Limits):
    """A policy-gradient loss. Raises ValueError for an unknown choice or a combination that is not sound.

    Means: ``entropy``, ``kl/old_policy`` (k3 of KL(old‖current), from tokens the old policy sampled), ``kl/rollout``
    (k3 of KL(rollout‖old)) and ``mismatch/logprob_abs_mean`` (|old - rollout|) over tokens; ``ratio/mean``,
    ``ratio/clamped_fraction`` (log-ratio beyond ±``LOG_RATIO_BOUND``) and ``clip_fraction`` over tokens at token
    level, over sequences at sequence level.
    Minima ``ratio/min`` and maxima ``ratio/max``, ``mismatch/logprob_abs_max`` are ±inf where a micro-batch is empty.
    """

    ratio_level: str = "token"
    objective: str = "clip"
    aggregation: str = "token_mean"

    def __post_init__(self) -> None:
        """Raises ValueError that names every problem of the row."""
        choose(RATIO_LEVELS, self.ratio_level, key="ratio_level")
        choose(OBJECTIVES, self.objective, key="objective")
        choose(AGGREGATIONS, self.aggregation, key="aggregation")
        problems = _unsound(self)
        if problems:
            raise ValueError("; ".join(problems))

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """This rank's share of the loss; every rank that shares a sequence calls it (``segment_sum`` may wait)."""
        inputs = masked(inputs)
        lengths = inputs.segment_sum(inputs.mask.to(inputs.logprobs.dtype))
        raw = RATIO_LEVELS[self.ratio_level](inputs, lengths)
        log_ratio = raw.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        per_token, limited = OBJECTIVES[self.objective](log_ratio, inputs.logprobs, inputs.advantages, self)
        loss = (per_token * AGGREGATIONS[self.aggregation](inputs, lengths)).sum()

        with torch.no_grad():
            ratio = log_ratio.exp()
            mismatch = (inputs.old_logprobs - inputs.rollout_logprobs).abs()
            over_tokens = token_mean(inputs, lengths)
            over_ratios = _RATIO_MEANS[self.ratio_level](inputs, lengths)
            means = {
                "entropy": (inputs.entropy * over_tokens).sum(),
                "kl/old_policy": (k3(inputs.old_logprobs, inputs.logprobs) * over_tokens).sum(),
                "clip_fraction": (limited * over_ratios).sum(),
                "ratio/mean": (ratio * over_ratios).sum(),
                "ratio/clamped_fraction": ((raw.abs() > LOG_RATIO_BOUND) * over_ratios).sum(),
                "kl/rollout": (k3(inputs.rollout_logprobs, inputs.old_logprobs) * over_tokens).sum(),
                "mismatch/logprob_abs_mean": (mismatch * over_tokens).sum(),
            }
            return LossOutput(
                loss=loss,
                means=means,
                minima={"ratio/min": -_masked_max(-ratio, inputs.mask)},
                maxima={
                    "ratio/max": _masked_max(ratio, inputs.mask),
                    "mismatch/logprob_abs_max": _masked_max(mismatch, inputs.mask),
                },
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy:
    """Supervised loss: mean over the batch's tokens of -log pi(target). Means: ``entropy``."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """This rank's share of the mean."""
        inputs = masked(inputs)
        num_tokens = max(inputs.num_tokens, 1)
        return LossOutput(
            loss=-inputs.logprobs.sum() / num_tokens,
            means={"entropy": inputs.entropy.detach().sum() / num_tokens},
        )


def _masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Greatest value inside the mask, [] ; -inf where the mask is empty (also with T = 0)."""
    lowest = values.new_full((1,), -torch.inf)
    return torch.cat([torch.where(mask, values, lowest), lowest]).amax()


def _unsound(loss: PolicyLoss) -> list[str]:
    """Why this row of choices cannot be meant, one reason each."""
    out = []
    sequence = RATIO_LEVELS[loss.ratio_level] is sequence_log_ratio
    objective, aggregation = OBJECTIVES[loss.objective], AGGREGATIONS[loss.aggregation]
    if sequence and objective is reinforce:
        out.append(
            f"objective={loss.objective!r} has no ratio, ratio_level={loss.ratio_level!r} would do nothing; "
            "set ratio_level='token'"
        )
    if sequence and objective is clip and aggregation is not seq_mean_token_mean:
        out.append(
            f"aggregation={loss.aggregation!r} lets the clipped ratio of a long sequence weigh more than that of a "
            f"short one under ratio_level={loss.ratio_level!r}; set aggregation='seq_mean_token_mean'"
        )
    if not (loss.clip_low >= 0 and loss.clip_high >= 0):
        out.append(f"clip_low={loss.clip_low}, clip_high={loss.clip_high} are distances from 1; set both to 0 or more")
    if not 0 <= loss.cap_low <= loss.cap_high:
        out.append(f"cap_low={loss.cap_low}, cap_high={loss.cap_high} are ratios; set 0 <= cap_low <= cap_high")
    return out
