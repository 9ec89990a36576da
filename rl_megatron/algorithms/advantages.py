"""Rewards [n] of completions to advantages [n]: a baseline and a scale, each over a group or over the whole batch.

GRPO is mean group, std group; Dr. GRPO mean group, std none; RLOO mean group, leave-one-out, std none; LitePPO mean
group, std batch; REINFORCE mean none or batch, std none. Groups may be ragged and in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rl_megatron.algorithms.choices import choose

LEVELS: Mapping[str, Callable[[Tensor], Tensor] | None] = {
    "none": None,
    "group": lambda group_ids: group_ids,
    "batch": torch.zeros_like,
}


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    mean: str,
    std: str,
    leave_one_out: bool,
    unbiased: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Advantages [n] float32 = (reward - mean) / (std + eps), computed in float64.

    ``group_ids`` [n] int64 are any integers, equal within a group. ``leave_one_out`` takes the mean of the *others*.
    ``unbiased`` divides the variance by n - 1. Where the mean or the std is over rewards that are all equal (a group
    of one among them) the advantage is exactly 0, never NaN. Raises ValueError for a reward that is not finite, an
    unknown level, or leave-one-out without a mean.
    """
    mean_of, std_of = choose(LEVELS, mean, key="mean"), choose(LEVELS, std, key="std")
    if leave_one_out and mean_of is None:
        raise ValueError("leave_one_out=True needs a mean to leave one out of; set mean='group' or mean='batch'")
    if not bool(torch.isfinite(rewards).all()):
        where = torch.nonzero(~torch.isfinite(rewards)).flatten().tolist()
        raise ValueError(f"rewards must be finite; those at {where} are {rewards[where].tolist()}")
    raw = rewards.double()
    advantages = raw
    if mean_of is not None:
        ids = _dense(mean_of(group_ids))
        count = _segment_sum(torch.ones_like(raw), ids)
        advantages = raw - _segment_mean(raw, ids)[ids]
        if leave_one_out:
            advantages = advantages * (count / (count - 1))[ids]
        advantages = torch.where(_differ(raw, ids)[ids], advantages, 0.0)
    if std_of is not None:
        ids = _dense(std_of(group_ids))
        variance = _segment_variance(raw, ids, unbiased=unbiased)
        scale = torch.where(_differ(raw, ids), 1 / (variance.sqrt() + eps), 0.0)
        advantages = advantages * scale[ids]
    return advantages.float()


def _dense(ids: Tensor) -> Tensor:
    """The same segments numbered 0, 1, 2, ..."""
    dense: Tensor = torch.unique(ids, return_inverse=True)[1]
    return dense


def _num_segments(ids: Tensor) -> int:
    return int(ids.max()) + 1 if len(ids) else 0


def _segment_sum(values: Tensor, ids: Tensor) -> Tensor:
    return values.new_zeros(_num_segments(ids)).index_add_(0, ids, values)


def _segment_mean(values: Tensor, ids: Tensor) -> Tensor:
    return _segment_sum(values, ids) / _segment_sum(torch.ones_like(values), ids)


def _segment_variance(values: Tensor, ids: Tensor, *, unbiased: bool) -> Tensor:
    count = _segment_sum(torch.ones_like(values), ids)
    squares = _segment_sum((values - _segment_mean(values, ids)[ids]).square(), ids)
    return squares / (count - int(unbiased))


def _differ(values: Tensor, ids: Tensor) -> Tensor:
    """Whether a segment has two different values; exact, where a variance would leave rounding noise."""
    segments = values.new_zeros(_num_segments(ids))
    low = segments.scatter_reduce(0, ids, values, "amin", include_self=False)
    high = segments.scatter_reduce(0, ids, values, "amax", include_self=False)
    return high > low
