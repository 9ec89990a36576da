"""Corrects the gap between the engine that samples and the learner that trains, by weights pi_old / pi_rollout.

TIS is truncate at 2; IcePop is mask to 0.5 .. 5; the geometric band is band at sequence level, 0.999 .. 1.002;
decoupled PPO is the clip objective with truncate at 5; reject is verl's rejection by k2 or k3. Several are multiplied.
Denominators stay those of the whole batch: a token left out counts as a loss of 0. Letters: T positions, S sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rl_megatron.algorithms.kl import ESTIMATORS
from rl_megatron.algorithms.ratios import LOG_RATIO_BOUND, masked, mean_per_sequence
from rl_megatron.algorithms.segments import segment_sum, sequence_ids
from rl_megatron.config.sections.correction import CorrectionSection, CorrectionWeight
from rl_megatron.types import LossInputs, Samples

_MOST = math.exp(LOG_RATIO_BOUND)


def _by_token(gap: Tensor, inputs: LossInputs, lengths: Tensor) -> Tensor:
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
    "token": _by_token,
    "sequence": mean_per_sequence,
    "product": _product,
}


def _all_near(divergence: Tensor, inputs: LossInputs, high: float) -> Tensor:
    above = inputs.segment_sum((divergence > high).to(divergence.dtype))
    return above[inputs.segment_ids] == 0


def _of_ratios(
    bound: Callable[[Tensor, float, float], Tensor], one: CorrectionWeight, inputs: LossInputs, lengths: Tensor
) -> Tensor:
    gap = inputs.old_logprobs - inputs.rollout_logprobs
    log_weight = LEVELS[one.level](gap, inputs, lengths).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return bound(log_weight.exp(), one.low, one.high)


def _reject(one: CorrectionWeight, inputs: LossInputs, lengths: Tensor) -> Tensor:
    divergence = ESTIMATORS[one.estimator](inputs.rollout_logprobs, inputs.old_logprobs)
    level = LEVELS.get(one.level)  # none of the worst token: its divergence is no sum over ranks, a count is
    near = _all_near(divergence, inputs, one.high) if level is None else level(divergence, inputs, lengths) <= one.high
    return near.to(divergence.dtype)


MODES: Mapping[str, Callable[[CorrectionWeight, LossInputs, Tensor], Tensor]] = {
    "truncate": partial(_of_ratios, _truncate),
    "mask": partial(_of_ratios, _mask),
    "band": partial(_of_ratios, _band),
    "reject": _reject,
}
SIGNS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "all": lambda advantages: torch.ones_like(advantages, dtype=torch.bool),
    "positive": lambda advantages: advantages > 0,
    "negative": lambda advantages: advantages < 0,
}


def correction_weights(section: CorrectionSection, inputs: LossInputs, lengths: Tensor) -> Tensor:
    """Weight of each token's loss, [T], without a gradient, for inputs already ``masked``; ``lengths`` [S].

    The product of the section's weights, each at its ``level`` (the length-normalised one of a sequence does not grow
    with its length, the product does) and bounded by its ``mode``: truncate clamps the weight to low .. high, mask
    zeroes a weight outside, band also replaces those inside by 1; reject drops what has a divergence above high. One is
    1 where the advantage is not one ``of`` its. The product is at most e^``LOG_RATIO_BOUND``, as each ratio.
    ``veto`` drops a whole sequence in which a token has pi_old / pi_rollout below it. ``off_policy_delta`` drops
    sequences of negative advantage with mean(log pi_rollout - log pi) above it, in nats (DeepSeek-V3.2).

    Every rank that shares a sequence calls it.
    """
    gap = inputs.old_logprobs - inputs.rollout_logprobs
    weight = torch.ones_like(gap)
    for one in section.weights:
        weight = (weight * _weight(one, inputs, lengths)).clamp(max=_MOST)  # five of them overflow float32
    if section.veto > 0:
        hits = inputs.segment_sum((gap < math.log(section.veto)).to(gap.dtype))
        weight = torch.where(hits[inputs.segment_ids] > 0, 0.0, weight)
    if section.off_policy_delta is not None:
        drift = mean_per_sequence(inputs.rollout_logprobs - inputs.logprobs, inputs, lengths)
        weight = torch.where((inputs.advantages < 0) & (drift > section.off_policy_delta), 0.0, weight)
    return weight


def _weight(one: CorrectionWeight, inputs: LossInputs, lengths: Tensor) -> Tensor:
    return torch.where(SIGNS[one.of](inputs.advantages), MODES[one.mode](one, inputs, lengths), 1.0)


def batch_scale(section: CorrectionSection, samples: Samples) -> Tensor | None:
    """What the controller multiplies the advantages of a whole batch by, [N] float32, so that each weight with
    ``normalise`` is divided by its mean over the tokens that it weighs, or over their sequences where its ``level`` is
    one of these. None if no weight is.

    An objective's loss is in proportion to the advantage under a given sign of it, so its gradient is that of divided
    weights. A mean of 0 divides nothing: all its tokens are left out.
    """
    normalised = [one for one in section.weights if one.normalise]
    if not normalised:
        return None
    ids, count = sequence_ids(samples.cu_seqlens), samples.num_sequences
    inputs = masked(
        LossInputs(
            logprobs=samples.old_logprobs.double(),
            entropy=torch.zeros_like(samples.old_logprobs),
            old_logprobs=samples.old_logprobs.double(),
            rollout_logprobs=samples.rollout_logprobs.double(),
            advantages=samples.advantages.double(),
            mask=samples.mask,
            segment_ids=ids,
            segment_sum=partial(segment_sum, ids=ids, num_segments=count),
            num_tokens=int(samples.mask.sum()),
            num_sequences=count,
        )
    )
    lengths, scale = inputs.segment_sum(samples.mask.double()), torch.ones_like(inputs.old_logprobs)
    for one in normalised:
        weighed = samples.mask & SIGNS[one.of](inputs.advantages)
        weights, share = _weight(one, inputs, lengths), weighed.double()
        if one.level != "token":
            share = share / inputs.segment_sum(share).clamp(min=1)[ids]
        mean = float((weights * share).sum() / share.sum().clamp(min=1e-300))
        scale = torch.where(weighed, scale / (mean or 1.0), scale)
    return scale.float()


def second_moment_mask(log_ratios: Tensor, *, threshold: float) -> Tensor:
    """The tokens of a whole minibatch that M2PO trains on, [N] bool (arXiv:2510.01161).

    Leaves out the tokens of largest squared log-ratio until the mean square of the rest is at most ``threshold``.
    """
    squares, order = log_ratios.double().square().sort(stable=True)
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    kept = torch.zeros_like(order, dtype=torch.bool)
    kept[order] = means <= threshold  # means of a growing sorted prefix never fall
    return kept


def proximal_share(rollout_version: Tensor, *, proximal_version: int, version: int) -> Tensor:
    """The old policy's place, in weight versions, between the policy that sampled and the current one, [N] in 0 .. 1.

    ``rollout_version`` [N] is the version that sampled each token, at most ``proximal_version`` <= ``version``.
    """
    distance = (version - rollout_version).float()
    return torch.where(distance > 0, (proximal_version - rollout_version) / distance.clamp(min=1), 0.0)


def with_proximal(inputs: LossInputs, share: Tensor) -> LossInputs:
    """The inputs with old log-probs interpolated: ``share`` [T] of the way from the rollout's to the current ones.

    They replace a pass of the old policy over stale samples (arXiv:2505.24298's decoupled objective).
    """
    current, rollout = inputs.logprobs.detach(), inputs.rollout_logprobs
    return replace(inputs, old_logprobs=rollout + share * (current - rollout))
