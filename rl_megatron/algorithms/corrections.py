"""Corrects the gap between the engine that samples and the learner that trains, by weights pi_old / pi_rollout.

TIS is truncate at 2; IcePop is mask to 0.5 .. 5; the geometric band is band at sequence level, 0.999 .. 1.002;
decoupled PPO is the clip objective with truncate at 5; reject is verl's rejection by k3.
Denominators stay those of the whole batch: a token left out counts as a loss of 0. Letters: T positions, S sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rl_megatron.algorithms.kl import k3
from rl_megatron.algorithms.objectives import LOG_RATIO_BOUND, mean_per_sequence
from rl_megatron.config.sections.algorithm import CorrectionSection
from rl_megatron.types import LossInputs


def _per_token(gap: Tensor, inputs: LossInputs, lengths: Tensor) -> Tensor:
    return gap


def _product(gap: Tensor, inputs: LossInputs, lengths: Tensor) -> Tensor:
    return inputs.segment_sum(gap)[inputs.segment_ids]


def _truncate(weight: Tensor, low: float, high: float) -> Tensor:
    return weight.clamp(low, high)


def _mask(weight: Tensor, low: float, high: float) -> Tensor:
    return torch.where((weight >= low) & (weight <= high), weight, 0.0)


def _band(weight: Tensor, low: float, high: float) -> Tensor:
    return ((weight >= low) & (weight <= high)).to(weight.dtype)


LEVELS: Mapping[str, Callable[[Tensor, LossInputs, Tensor], Tensor]] = {
    "token": _per_token,
    "sequence": mean_per_sequence,
    "product": _product,
}


def _mask_geometric(divergence: Tensor, inputs: LossInputs, high: float) -> Tensor:
    above = inputs.segment_sum((divergence > high).to(divergence.dtype))
    return above[inputs.segment_ids] == 0


def _from_ratios(
    bound: Callable[[Tensor, float, float], Tensor], one: CorrectionSection, inputs: LossInputs, lengths: Tensor
) -> Tensor:
    gap = inputs.old_logprobs - inputs.rollout_logprobs
    log_weight = LEVELS[one.level](gap, inputs, lengths).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return bound(log_weight.exp(), one.low, one.high)


def _reject(one: CorrectionSection, inputs: LossInputs, lengths: Tensor) -> Tensor:
    divergence = k3(inputs.rollout_logprobs, inputs.old_logprobs)
    level = LEVELS.get(one.level)  # None for the worst token: ranks add up a count, not its divergence
    near = (
        _mask_geometric(divergence, inputs, one.high)
        if level is None
        else level(divergence, inputs, lengths) <= one.high
    )
    return near.to(divergence.dtype)


MODES: Mapping[str, Callable[[CorrectionSection, LossInputs, Tensor], Tensor]] = {
    "truncate": partial(_from_ratios, _truncate),
    "mask": partial(_from_ratios, _mask),
    "band": partial(_from_ratios, _band),
    "reject": _reject,
}


def correction_weights(section: CorrectionSection, inputs: LossInputs, lengths: Tensor) -> Tensor:
    """Returns the weight of each token's loss, [T], without a gradient, for inputs already ``masked``; ``lengths`` [S].

    It is at the ``level`` (the product over a sequence grows with its length, the length-normalized one does not) and
    bounded by the ``mode``. Truncate clamps the weight to low .. high, mask zeroes a weight outside, band also replaces
    those inside by 1; reject drops what has a divergence above high. The weight is at most e^``LOG_RATIO_BOUND``.
    ``veto`` drops a whole sequence in which a token has pi_old / pi_rollout below it. ``off_policy_delta`` drops
    sequences of negative advantage with mean(log pi_rollout - log pi) above it, in nats (DeepSeek-V3.2).

    Every rank that shares a sequence calls it.
    """
    gap = inputs.old_logprobs - inputs.rollout_logprobs
    weight = torch.ones_like(gap)
    if section.mode != "none":
        weight = MODES[section.mode](section, inputs, lengths)
    if section.veto > 0:
        hits = inputs.segment_sum((gap < math.log(section.veto)).to(gap.dtype))
        weight = torch.where(hits[inputs.segment_ids] > 0, 0.0, weight)
    if section.off_policy_delta is not None:
        drift = mean_per_sequence(inputs.rollout_logprobs - inputs.logprobs, inputs, lengths)
        weight = torch.where((inputs.advantages < 0) & (drift > section.off_policy_delta), 0.0, weight)
    return weight


def second_moment_mask(log_ratios: Tensor, *, threshold: float) -> Tensor:
    """Returns the tokens of a whole minibatch that M2PO trains on, [N] bool (arXiv:2510.01161).

    Leaves out the tokens of largest squared log-ratio until the mean square of the rest is at most ``threshold``.
    """
    squares, order = log_ratios.double().square().sort(stable=True)
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    kept = torch.zeros_like(order, dtype=torch.bool)
    kept[order] = means <= threshold  # means of a growing sorted prefix never fall
    return kept


def proximal_share(rollout_version: Tensor, *, proximal_version: int, version: int) -> Tensor:
    """Returns the old policy's place, in weight versions, between the sampling and the current policy, [N] in 0 .. 1.

    ``rollout_version`` [N] is the version that sampled each token, at most ``proximal_version`` <= ``version``.
    """
    distance = (version - rollout_version).float()
    return torch.where(distance > 0, (proximal_version - rollout_version) / distance.clamp(min=1), 0.0)


def interpolate_old_logprobs(inputs: LossInputs, share: Tensor) -> LossInputs:
    """Returns inputs with old log-probs interpolated: ``share`` [T] of the way from the rollout's to the current ones.

    They replace a pass of the old policy over stale samples (arXiv:2505.24298's decoupled objective).
    """
    current, rollout = inputs.logprobs.detach(), inputs.rollout_logprobs
    return replace(inputs, old_logprobs=rollout + share * (current - rollout))
