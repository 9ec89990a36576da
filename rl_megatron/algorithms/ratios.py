"""Computes the log of the importance ratio pi / pi_old of each token, at token or at sequence level.

Letters: T positions, S sequences. ``inputs`` come from ``masked``, so they are finite outside the mask.

Computes quantiles over micro-batches and ranks from counts in fixed bins, which add up.

The bins are of log-ratios: 1e-6 nats wide around 0, then 24 a decade in both directions, up to 20 nats. A quantile is
the middle of its bin, so it is off by at most 5 % of the log-ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rl_megatron.types import LossInputs

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this before ``exp`` (e^20 is 4.9e8): values stay finite in float32, and a token beyond
it has no gradient through its ratio."""

LogRatio = Callable[[LossInputs, Tensor], Tensor]


_VALUES = (
    "logprobs",
    "entropy",
    "old_logprobs",
    "rollout_logprobs",
    "advantages",
    "values",
    "ref_logprobs",
    "ref_top",
    "top_logprobs",
    "old_values",
    "returns",
    "proximal_share",
    "nll_weights",
    "old_kl_weights",
    "token_weight",
)


def masked(inputs: LossInputs) -> LossInputs:
    """The same micro-batch with zeros at every position outside the mask, so that inf or NaN there change nothing.

    ``torch.where`` selects before any arithmetic: a product with 0 would keep NaN, in value and in gradient. Converts
    lower precision to float32, because sums over many tokens follow.
    """
    given = {name: x for name in _VALUES if (x := getattr(inputs, name)) is not None}
    wide = {name: x.to(torch.promote_types(x.dtype, torch.float32)) for name, x in given.items()}
    cut: dict[str, Any] = {
        name: torch.where(inputs.mask.view(-1, *[1] * (x.dim() - 1)), x, 0.0) for name, x in wide.items()
    }
    return replace(inputs, **cut)


def required(column: Tensor | None, name: str) -> Tensor:
    """The column. Raises ValueError if the batch has none."""
    if column is None:
        raise ValueError(f"this loss needs the samples' {name}, and the batch was made without them")
    return column


def mean_per_sequence(values: Tensor, inputs: LossInputs, lengths: Tensor) -> Tensor:
    """Mean of ``values`` [T] over the masked-in tokens of each token's sequence, [T], detached."""
    return (inputs.segment_sum(values.detach()) / lengths.clamp(min=1))[inputs.segment_ids]


def token_log_ratio(inputs: LossInputs, lengths: Tensor) -> Tensor:
    """log pi - log pi_old of each token, [T]."""
    return inputs.logprobs - inputs.old_logprobs


def sequence_log_ratio(inputs: LossInputs, lengths: Tensor) -> Tensor:
    """Mean log-ratio of the token's sequence, [T]; its gradient is that of this token's own log-prob.

    The token form of GSPO (arXiv:2507.18071, eq. 14): the mean is detached, so no autograd crosses context-parallel
    ranks. With one advantage per sequence, the mean over tokens has the value and the gradient of the sequence form.
    """
    mean = mean_per_sequence(inputs.logprobs - inputs.old_logprobs, inputs, lengths)
    return mean + (inputs.logprobs - inputs.logprobs.detach())


def turn_log_ratio(inputs: LossInputs, lengths: Tensor) -> Tensor:
    """Mean log-ratio of the token's turn, [T]; else as ``sequence_log_ratio`` (arXiv:2511.20718, arXiv:2605.13217)."""
    if inputs.turn_sum is None:
        raise ValueError("this loss needs the samples' turn_of, and the batch was made without it")
    tokens = inputs.turn_sum(inputs.mask.to(inputs.logprobs.dtype))
    mean = inputs.turn_sum((inputs.logprobs - inputs.old_logprobs).detach()) / tokens.clamp(min=1)
    return mean + (inputs.logprobs - inputs.logprobs.detach())


def sequence_sum_log_ratio(inputs: LossInputs, lengths: Tensor) -> Tensor:
    """Log-ratio of the whole sequence, not length-normalised, [T], detached: TOPR's weight of a trajectory."""
    return inputs.segment_sum((inputs.logprobs - inputs.old_logprobs).detach())[inputs.segment_ids]


RATIO_LEVELS: Mapping[str, LogRatio] = {
    "token": token_log_ratio,
    "sequence": sequence_log_ratio,
    "turn": turn_log_ratio,
    "sequence_sum": sequence_sum_log_ratio,
}
