"""Computes advantages [n] from rewards [n] of completions or turns: a baseline and a scale, over a group or the batch.

GRPO is mean group, std group; Dr. GRPO mean group, std none; RLOO mean group, leave-one-out, std none; LitePPO mean
group, std batch; ScaleRL mean group, std advantages; REINFORCE mean none or batch, std none. Groups may be ragged and
in any order. Advantages from rewards or values of tokens are in returns.py.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rl_megatron.algorithms.segments import (
    dense,
    differ,
    difference,
    discounted_sum,
    segment_mean,
    segment_range,
    segment_sum,
    segment_variance,
)
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.errors import ConfigError
from rl_megatron.user_code import describe_error, load_named

ROUNDING = 1e-6
"""Advantages up to this count as 0."""
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
    best_of: int = 1,
) -> Tensor:
    """Returns advantages [n] float32 = (reward - mean) / (std + ``eps``), computed in float64.

    ``mean`` is a level, or a custom function (`custom_group_advantages`) that replaces rewards less their mean and may
    take ``lengths`` [n], sampled tokens. ``std`` is that of the rewards of the group or the batch, or of the batch's
    ``advantages`` (rewards less the mean). Its variance is over n - 1, or over n if not ``unbiased``. ``group_ids`` [n]
    int64 are any integers, equal within a group. ``leave_one_out`` takes the mean of the *others*. Above 1 ``best_of``
    compares like `best_of_subsets`. The std of a group is then that of its bests, or with ``leave_one_out`` of its
    rewards. If the rewards under the mean or the std are all equal up to rounding, as in a group of one, the advantage
    is exactly 0, never NaN. Raises ValueError for a reward that is not finite, leave-one-out without a mean, or
    ``best_of`` without the group's."""
    mean_of, std_of = LEVELS.get(mean), LEVELS["batch" if std == "advantages" else std]
    if leave_one_out and mean_of is None:
        raise ValueError("leave_one_out=True needs a mean to leave one out of; set mean='group' or mean='batch'")
    raw = _finite(rewards).double()
    advantages = raw if mean in LEVELS else custom_group_advantages(mean, raw, group_ids, lengths)
    if best_of > 1:
        if mean != "group":
            raise ValueError(f"best_of={best_of} compares subsets of a group; set mean='group', not {mean!r}")
        ids = dense(group_ids)
        advantages, deviation = best_of_subsets(raw, ids, best_of, leave_one_out=leave_one_out, unbiased=unbiased)
        if std == "group" and not leave_one_out:
            return (advantages / (deviation + eps)).float()
    elif mean_of is not None:
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
        unbiased=row.std_unbiased,
        lengths=lengths,
        best_of=row.best_of,
    )


def best_of_subsets(
    rewards: Tensor, group_ids: Tensor, k: int, *, leave_one_out: bool, unbiased: bool
) -> tuple[Tensor, Tensor]:
    """Compares the best reward of ``k`` completions of a group, over all such subsets of it.

    Returns the advantages [n] float64, and the standard deviation [n] float64 of the best over all subsets of the
    group. An advantage is the mean of the best over subsets with the completion, less that over all subsets: Pass@k
    training (arXiv:2508.10751). Its A_pos and A_neg are these for rewards of 0 and 1, once divided by the deviation.
    With ``leave_one_out`` it is less the mean over the same subsets without it (arXiv:2505.15201). If ``k`` is the
    whole group, that is the best less the second best, for the best alone (arXiv:2503.19595). It is exactly 0 where no
    two bests differ, as in a group of fewer than ``k``. ``rewards`` [n] are float64, ``group_ids`` [n] are 0 .. K - 1.
    """
    advantages, deviation = torch.zeros(2, len(rewards), dtype=torch.float64)
    order = rewards.argsort(stable=True)
    order = order[group_ids[order].argsort(stable=True)]
    sizes = group_ids.bincount()
    starts = sizes.cumsum(0) - sizes
    for size in sizes.unique().tolist():
        if size < k:
            continue  # a group that lost completions, for example
        places = order[starts[sizes == size][:, None] + torch.arange(size)]  # [groups, size], by rewards
        ranked, (above, share) = rewards[places], _rank_weights(size, k, leave_one_out)
        count = math.comb(size, k)
        variance = (ranked - (ranked @ share)[:, None]).square() @ share * (count / max(count - unbiased, 1))
        advantages[places], deviation[places] = ranked @ above.T, variance.sqrt()[:, None]
    some = best_subsets_differ(rewards, group_ids, k, leave_one_out=leave_one_out)
    return torch.where(some[group_ids], advantages, 0.0), deviation


def best_subsets_differ(rewards: Tensor, group_ids: Tensor, k: int, *, leave_one_out: bool) -> Tensor:
    """Returns which groups have two different bests in `best_of_subsets`, [K] bool. So many rewards are below their
    best one that a subset can do without it."""
    below = difference(rewards, segment_range(rewards, group_ids)[1][group_ids])
    return segment_sum((below < 0).int(), group_ids) >= k - leave_one_out


@functools.cache
def _rank_weights(size: int, k: int, leave_one_out: bool) -> tuple[Tensor, Tensor]:
    """Returns the matrix that turns a group's ascending rewards [size] into advantages, and the share of subsets with
    each as the best. The completion of rank j, from 0, is the best of C(j, k - 1) subsets. C(j - 1, k - 2) of these
    have a given one below it."""
    own, every = math.comb(size - 1, k - 1), math.comb(size, k)
    first = torch.tensor([math.comb(j, k - 1) / own for j in range(size)], dtype=torch.float64)
    below = torch.tensor([math.comb(j, k - 2) / own for j in range(size)], dtype=torch.float64).expand(size, size)
    share = torch.tensor([math.comb(j, k - 1) / every for j in range(size)], dtype=torch.float64)
    if leave_one_out:  # a better one that is the best is so without the completion too
        return first.diag() - below.tril(-1), share
    return first.diag() + below.roll(1, 1).triu(1) - share, share


@functools.cache
def _load_custom(name: str) -> tuple[Callable[..., Tensor], bool]:
    """Returns the function of ``advantage_mean=package.module:name``, and whether it has an argument ``lengths``.
    Raises as `load_named`."""
    own: Callable[..., Tensor] = load_named(name, "algorithm.advantage_mean", "function", callable)
    try:
        return own, "lengths" in inspect.signature(own).parameters
    except ValueError:  # one of C tells none
        return own, False


def custom_group_advantages(name: str, rewards: Tensor, group_ids: Tensor, lengths: Tensor | None) -> Tensor:
    """Returns advantages [n] float64 by the user's function, which gets one group's rewards [n] float64 at a time, and
    their ``lengths`` [n] float64 where it has that argument. A group with none beyond `ROUNDING` has exactly 0.

    Raises ConfigError if it raises, or returns anything but as many finite numbers.
    """
    given, advantages = f"algorithm.advantage_mean={name}", torch.empty_like(rewards)
    for group in group_ids.unique():
        mine = group_ids == group
        told = f"{given}, of a group's rewards {rewards[mine].tolist()}"
        try:
            own, by_length = _load_custom(name)
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
        advantages[mine] = found.double() * bool((found.abs() > ROUNDING).any())
    return advantages


def custom_has_advantage(name: str, rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    """Returns which groups get an advantage beyond rounding from the user's function, [K], of ``group_ids`` 0 .. K - 1.
    Raises as `custom_group_advantages`."""
    found = custom_group_advantages(name, rewards.double(), group_ids, lengths)
    return segment_sum((found != 0).int(), group_ids) > 0


def turn_advantages(of_turns: Tensor, lengths: Tensor, *, gamma: float) -> Tensor:
    """A_k = Σ_{j≥k} gamma^(j-k)·a_j of each turn k, [n] float32: process supervision (arXiv:2402.03300, 4.1.3).

    ``of_turns`` [n] are rewards of turns less their baseline, one trajectory's ``lengths`` [K] turns after another's.
    """
    return discounted_sum(of_turns.double(), lengths, torch.tensor([gamma], dtype=torch.float64)).float()


def remax_advantages(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """Returns the reward less that of the greedy completion of the same prompt, [n] float32 (arXiv:2310.10505)."""
    return difference(_finite(rewards).double(), _finite(greedy_rewards).double()).float()


def moving_baseline(baseline: float, rewards: Tensor, *, decay: float) -> float:
    """Returns the next baseline of REINFORCE: an exponential moving mean of the batches' mean rewards."""
    return decay * baseline + (1 - decay) * float(_finite(rewards).double().mean())


def _finite(rewards: Tensor) -> Tensor:
    bad = torch.nonzero(~torch.isfinite(rewards)).flatten().tolist()
    if bad:
        raise ValueError(f"rewards must be finite; those at {bad} are {rewards[bad].tolist()}")
    return rewards
