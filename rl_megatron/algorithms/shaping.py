"""Shapes rewards before advantages are computed. Letters: n completions, N positions, S sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_megatron.algorithms.segments import differ, difference, segment_range, sequence_ids


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: float, factor: float = 1.0) -> Tensor:
    """Penalty [n] float32 in [-factor, 0]: -factor·excess/buffer over the last ``buffer`` tokens before ``max_length``.

    DAPO (arXiv:2503.14476), soft overlong punishment; ``lengths`` [n] are of completions. A ``buffer`` below 1 is a
    share of ``max_length``.
    """
    buffer = buffer if buffer >= 1 else buffer * max_length
    excess = lengths.double() - (max_length - buffer)
    return ((-excess / buffer).clamp(-1, 0) * factor).float()


def drop_truncated(mask: Tensor, truncated: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Mask [N] without the sequences whose ``truncated`` [S] is set (DAPO's overlong filter)."""
    return mask & ~truncated[sequence_ids(cu_seqlens)]


def score_finished(rewards: Tensor, finished: Tensor, *, unfinished_reward: float) -> Tensor:
    """Rewards [n] of completions that ended by themselves; the others get ``unfinished_reward``."""
    return torch.where(finished, rewards, unfinished_reward)


def to_unit_range(values: Tensor, ids: Tensor, rewards: Tensor, ids_of_rewards: Tensor) -> Tensor:
    """(value - least)/(greatest - least) of the rewards that have its id, [K] float32; least alone if all are equal.

    ``values`` [K] may be the ``rewards`` [n] themselves, or others under the same ``ids``, 0 .. without gaps.
    """
    low, high = segment_range(rewards, ids_of_rewards)
    return difference(values, low[ids]) / torch.where(differ(rewards, ids_of_rewards), high - low, 1.0)[ids]
