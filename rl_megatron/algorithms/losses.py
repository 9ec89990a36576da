"""The losses the learner is given: pure, picklable functions of one micro-batch (``rl_megatron.types.Loss``).

A policy-gradient algorithm is a row of choices (docs/algorithms.md); the functions behind each choice are in
ratios.py, objectives.py and aggregation.py. T positions, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rl_megatron.algorithms.aggregation import AGGREGATIONS, seq_mean_token_mean, seq_mean_token_sum_norm, token_mean
from rl_megatron.algorithms.choices import choose
from rl_megatron.algorithms.corrections import Correction, with_proximal
from rl_megatron.algorithms.divergence import ESTIMATORS, k3
from rl_megatron.algorithms.kl import kl_term
from rl_megatron.algorithms.objectives import OBJECTIVES, Limits, clip, importance, reinforce, sapo
from rl_megatron.algorithms.quantiles import histogram
from rl_megatron.algorithms.ratios import (
    LOG_RATIO_BOUND,
    RATIO_LEVELS,
    masked,
    sequence_log_ratio,
    sequence_sum_log_ratio,
    token_log_ratio,
)
from rl_megatron.types import LossInputs, LossOutput

_RATIO_MEANS = {"token": token_mean, "sequence": seq_mean_token_mean, "sequence_sum": seq_mean_token_mean}
_THROUGH_RATIO = (clip, importance, sapo)  # objectives whose gradient goes through the ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss(Limits):
    """A policy-gradient loss. Raises ValueError for an unknown choice or a combination that is not sound.

    Beside the objective, under the same aggregation: ``kl_coefficient`` times KL(pi‖ref) and less
    ``entropy_coefficient`` times the entropy; and the samples' ``nll_weights`` times -log pi. Where the samples hold a
    ``proximal_share``, the old log-probs lie so far from the rollout's to the current ones.

    Means: ``entropy``, ``kl/old_policy`` (k3 of KL(old‖current), from tokens the old policy sampled), ``kl/rollout``
    (k3 of KL(rollout‖old)) and ``mismatch/logprob_abs_mean`` (|old - rollout|) over tokens; ``ratio/mean``,
    ``ratio/second_moment``, ``ratio/clamped_fraction`` (log-ratio beyond ±``LOG_RATIO_BOUND``), ``clip_fraction`` and
    its two sides over tokens at token level, over sequences at sequence level; with a correction,
    ``correction/weight_mean`` and ``correction/dropped_fraction`` over tokens; with a KL or an NLL term, ``loss/kl``
    and ``loss/nll``, their parts of the loss.
    Minima ``ratio/min`` and maxima ``ratio/max``, ``mismatch/logprob_abs_max`` are ±inf where a micro-batch is empty.
    The histogram ``ratio`` counts the log-ratios of tokens.
    """

    ratio_level: str = "token"
    objective: str = "clip"
    aggregation: str = "token_mean"
    max_length: int = 0
    correction: Correction | None = None
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"
    kl_importance_weighted: bool = False
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError that names every problem of the row."""
        choose(RATIO_LEVELS, self.ratio_level, key="ratio_level")
        choose(OBJECTIVES, self.objective, key="objective")
        choose(AGGREGATIONS, self.aggregation, key="aggregation")
        choose(ESTIMATORS, self.kl_estimator, key="kl_estimator")
        problems = _unsound(self)
        if problems:
            raise ValueError("; ".join(problems))

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """This rank's share of the loss; every rank that shares a sequence calls it (``segment_sum`` may wait)."""
        inputs = with_proximal(masked(inputs))
        lengths = inputs.segment_sum(inputs.mask.to(inputs.logprobs.dtype))
        raw = RATIO_LEVELS[self.ratio_level](inputs, lengths)
        log_ratio = raw.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        per_token, limited = OBJECTIVES[self.objective](log_ratio, inputs.logprobs, inputs.advantages, self)
        correction = None if self.correction is None else self.correction(inputs, lengths)
        if correction is not None:
            per_token = per_token * correction
        if self.entropy_coefficient:
            per_token = per_token - self.entropy_coefficient * inputs.entropy
        weights = AGGREGATIONS[self.aggregation](inputs, lengths, self.max_length)
        parts = self._extra_terms(inputs, weights)
        output = self._describe(inputs, lengths, raw, limited, correction)
        means = {**output.means, **{f"loss/{name}": part.detach() for name, part in parts.items()}}
        return replace(output, loss=(per_token * weights).sum() + sum(parts.values()), means=means)

    def _extra_terms(self, inputs: LossInputs, weights: Tensor) -> dict[str, Tensor]:
        """Terms of the loss, [] each, that stand beside the objective."""
        out = {}
        if self.kl_coefficient:
            kl = kl_term(inputs, estimator=self.kl_estimator, importance_weighted=self.kl_importance_weighted)
            out["kl"] = self.kl_coefficient * (kl * weights).sum()
        if inputs.nll_weights is not None:
            out["nll"] = -(inputs.logprobs * inputs.nll_weights).sum()
        return out

    @torch.no_grad()
    def _describe(
        self, inputs: LossInputs, lengths: Tensor, raw: Tensor, limited: Tensor, correction: Tensor | None
    ) -> LossOutput:
        """The metrics, with a loss of 0."""
        log_ratio = raw.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        ratio = log_ratio.exp()
        mismatch = (inputs.old_logprobs - inputs.rollout_logprobs).abs()
        over_tokens = token_mean(inputs, lengths)
        over_ratios = _RATIO_MEANS[self.ratio_level](inputs, lengths)
        means = {
            "entropy": (inputs.entropy * over_tokens).sum(),
            "kl/old_policy": (k3(inputs.old_logprobs, inputs.logprobs) * over_tokens).sum(),
            "clip_fraction": (limited * over_ratios).sum(),
            "clip_fraction/low": ((limited & (ratio < 1)) * over_ratios).sum(),
            "clip_fraction/high": ((limited & (ratio >= 1)) * over_ratios).sum(),
            "ratio/mean": (ratio * over_ratios).sum(),
            "ratio/second_moment": (ratio.square() * over_ratios).sum(),
            "ratio/clamped_fraction": ((raw.abs() > LOG_RATIO_BOUND) * over_ratios).sum(),
            "kl/rollout": (k3(inputs.rollout_logprobs, inputs.old_logprobs) * over_tokens).sum(),
            "mismatch/logprob_abs_mean": (mismatch * over_tokens).sum(),
        }
        if correction is not None:
            means["correction/weight_mean"] = (correction * over_tokens).sum()
            means["correction/dropped_fraction"] = ((correction == 0) * over_tokens).sum()
        return LossOutput(
            loss=ratio.new_zeros(()),
            means=means,
            minima={"ratio/min": -_masked_max(-ratio, inputs.mask)},
            maxima={
                "ratio/max": _masked_max(ratio, inputs.mask),
                "mismatch/logprob_abs_max": _masked_max(mismatch, inputs.mask),
            },
            histograms={"ratio": histogram(log_ratio, inputs.mask)},
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
    level, objective = RATIO_LEVELS[loss.ratio_level], OBJECTIVES[loss.objective]
    aggregation = AGGREGATIONS[loss.aggregation]
    if objective is reinforce and level is not token_log_ratio:
        out.append(
            f"objective={loss.objective!r} has no ratio, ratio_level={loss.ratio_level!r} would do nothing; "
            "set ratio_level='token'"
        )
    if objective in _THROUGH_RATIO and level is sequence_sum_log_ratio:
        out.append(
            f"ratio_level={loss.ratio_level!r} gives a detached weight, but objective={loss.objective!r} needs a ratio "
            "with a gradient; set ratio_level='sequence'"
        )
    if objective in _THROUGH_RATIO and level is sequence_log_ratio and aggregation is not seq_mean_token_mean:
        out.append(
            f"aggregation={loss.aggregation!r} lets the ratio of a long sequence weigh more than that of a short one "
            f"under ratio_level={loss.ratio_level!r}; set aggregation='seq_mean_token_mean'"
        )
    if aggregation is seq_mean_token_sum_norm and loss.max_length < 1:
        out.append(f"aggregation={loss.aggregation!r} divides by max_length={loss.max_length}; set max_length >= 1")
    return out + _bad_numbers(loss)


def _bad_numbers(loss: Limits) -> list[str]:
    """Written so that NaN is refused too."""
    out = []
    if not (loss.clip_low >= 0 and loss.clip_high >= 0):
        out.append(f"clip_low={loss.clip_low}, clip_high={loss.clip_high} are distances from 1; set both to 0 or more")
    if not loss.dual_clip > 1:
        out.append(f"dual_clip={loss.dual_clip} would clip at ratio 1 already; set it above 1 (inf is off)")
    if not 0 <= loss.cap_low <= loss.cap_high:
        out.append(f"cap_low={loss.cap_low}, cap_high={loss.cap_high} are ratios; set 0 <= cap_low <= cap_high")
    if not (loss.tau_positive > 0 and loss.tau_negative > 0):
        out.append(f"tau_positive={loss.tau_positive}, tau_negative={loss.tau_negative} divide; set both above 0")
    return out
