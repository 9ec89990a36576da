"""Computes advantages [n] from rewards [n] of completions or turns: a baseline and a scale, over a group or the batch.

GRPO is mean group, std group; Dr. GRPO mean group, std none; RLOO mean group, leave-one-out, std none; LitePPO mean
group, std batch; ScaleRL mean group, std advantages; REINFORCE mean none or batch, std none. Groups may be ragged and
in any order. Advantages from rewards or values of tokens are in returns.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rl_megatron.algorithms.segments import (
    dense,
    differ,
    discounted_sum,
    segment_mean,
    segment_sum,
    segment_variance,
)
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.errors import ConfigError
from rl_megatron.user_code import describe_error, load_named

ROUNDING = 1e-6
"""Of an advantage that is 0."""
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
    eps: float = 1e-6,
    unbiased: bool = True,
    lengths: Tensor | None = None,
) -> Tensor:
    """Advantages [n] float32 = (reward - mean) / (std + ``eps``), computed in float64.

    ``mean`` is a level, or a function of the user's own that has the rewards' place less their mean (`of_each_group`),
    for which are ``lengths`` [n], sampled tokens.
    ``std`` is that of the rewards of the group or the batch, or of the batch's ``advantages`` (rewards less the mean),
    its variance over n - 1, or over n if not ``unbiased``. ``group_ids`` [n] int64 are any integers, equal within a
    group. ``leave_one_out`` takes the mean of the *others*. If the rewards under the mean or the std are all equal, as
    in a group of one, the advantage is exactly 0, never NaN. Raises ValueError for a reward that is not finite, or
    leave-one-out without a mean.
    """
    mean_of, std_of = LEVELS.get(mean), LEVELS["batch" if std == "advantages" else std]
    if leave_one_out and mean_of is None:
        raise ValueError("leave_one_out=True needs a mean to leave one out of; set mean='group' or mean='batch'")
    raw = _finite(rewards).double()
    advantages = raw if mean in LEVELS else of_each_group(mean, raw, group_ids, lengths)
    if mean_of is not None:
        ids = dense(mean_of(group_ids))
        advantages = raw - segment_mean(raw, ids)[ids]
        if leave_one_out:
            count = segment_sum(torch.ones_like(raw), ids)
            advantages = advantages * (count / (count - 1))[ids]
        advantages = torch.where(differ(raw, ids)[ids], advantages, 0.0)
    if std_of is not None:
        ids, spread = dense(std_of(group_ids)), advantages if std == "advantages" else raw
        scale = 1 / (segment_variance(spread, ids, unbiased=unbiased).sqrt() + eps)
        advantages = advantages * torch.where(differ(spread, ids), scale, 0.0)[ids]
    return advantages.float()


def row_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    lengths: Tensor,
    row: AlgorithmSection,
    *,
    mean: str | None = None,
    std: str | None = None,
) -> Tensor:
    """`group_advantages` by the choices of a row, or with another mean or std."""
    return group_advantages(
        rewards,
        group_ids,
        mean=row.advantage_mean if mean is None else mean,
        std=row.advantage_std if std is None else std,
        leave_one_out=row.leave_one_out,
        eps=row.std_eps,
        unbiased=row.std_unbiased,
        lengths=lengths,
    )


@functools.cache
def _own(name: str) -> tuple[Callable[..., Tensor], bool]:
    """The function of ``advantage_mean=package.module:name``, and whether it has an argument ``lengths``. Raises as
    `load_named`."""
    own: Callable[..., Tensor] = load_named(name, "algorithm.advantage_mean", "function", callable)
    try:
        return own, "lengths" in inspect.signature(own).parameters
    except ValueError:  # one of C tells none
        return own, False


def of_each_group(name: str, rewards: Tensor, group_ids: Tensor, lengths: Tensor | None) -> Tensor:
    """Advantages [n] float64 by the user's function, which gets one group's rewards [n] float64 at a time, and their
    ``lengths`` [n] float64 where it has that argument.

    Raises ConfigError if it raises, or returns anything but as many finite numbers.
    """
    given, advantages = f"algorithm.advantage_mean={name}", torch.empty_like(rewards)
    for group in group_ids.unique():
        mine = group_ids == group
        told = f"{given}, of a group's rewards {rewards[mine].tolist()}"
        try:
            own, by_length = _own(name)
            if by_length:
                assert lengths is not None
                found = own(rewards[mine].clone(), lengths=lengths[mine].double())
            else:
                found = own(rewards[mine].clone())
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{told}, {describe_error(error)}") from error
        if not (isinstance(found, Tensor) and found.shape == rewards[mine].shape and found.isfinite().all()):
            shown = found.tolist() if isinstance(found, Tensor) else type(found).__name__
            raise ConfigError(f"{told}, must return a tensor of as many finite advantages; it returned {shown!s:.200}")
        advantages[mine] = found.double()
    return advantages


def own_gives(name: str, rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    """Whether the user's function gives a group any advantage beyond rounding [K], of ``group_ids`` 0 .. K - 1. Raises
    as `of_each_group`."""
    found = of_each_group(name, rewards.double(), group_ids, lengths).abs() > ROUNDING
    return segment_sum(found.int(), group_ids) > 0


def turn_advantages(of_turns: Tensor, lengths: Tensor, *, gamma: float) -> Tensor:
    """A_k = Σ_{j≥k} gamma^(j-k)·a_j of each turn k, [n] float32: process supervision (arXiv:2402.03300, 4.1.3).

    ``of_turns`` [n] are rewards of turns less their baseline, one trajectory's ``lengths`` [K] turns after another's.
    """
    return discounted_sum(of_turns.double(), lengths, torch.tensor([gamma], dtype=torch.float64)).float()


def remax_advantages(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """Reward less that of the greedy completion of the same prompt, [n] float32 (arXiv:2310.10505)."""
    return (_finite(rewards).double() - _finite(greedy_rewards).double()).float()


def moving_baseline(baseline: float, rewards: Tensor, *, decay: float) -> float:
    """The next baseline of REINFORCE: an exponential moving mean of the batches' mean rewards."""
    return decay * baseline + (1 - decay) * float(_finite(rewards).double().mean())


def _finite(rewards: Tensor) -> Tensor:
    bad = torch.nonzero(~torch.isfinite(rewards)).flatten().tolist()
    if bad:
        raise ValueError(f"rewards must be finite; those at {bad} are {rewards[bad].tolist()}")
    return rewards
