"""Advantages and returns a token, from rewards a token: GAE, discounted returns, whitening. Float64 inside.

Letters: N positions of S sequences, concatenated; ``cu_seqlens`` [S + 1]. Positions outside ``mask`` (prompts, tool
outputs) are skipped as if they were not there, whatever they hold, and get 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_megatron.algorithms.segments import dense, discounted_sum, segment_sum, sequence_ids


def last_token_rewards(rewards: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Rewards [S] put on the last masked-in position of each sequence, [N]; a sequence without one loses its reward."""
    ids = sequence_ids(cu_seqlens)[mask]
    last = torch.ones_like(ids, dtype=torch.bool)
    last[:-1] = ids[1:] != ids[:-1]
    out = rewards.new_zeros(len(mask))
    out[mask] = torch.where(last, rewards[ids], 0.0)
    return out


def discounted_returns(rewards: Tensor, mask: Tensor, cu_seqlens: Tensor, *, gamma: float) -> Tensor:
    """Reward-to-go [N] float32 of rewards [N]; whitened over the batch, it is REINFORCE++ (arXiv:2501.03262)."""
    kept = rewards[mask].double()
    sums = discounted_sum(kept, dense(sequence_ids(cu_seqlens)[mask]), torch.full_like(kept, gamma))
    return _scatter(sums, mask)


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    next_values: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: Tensor | float,
) -> Tensor:
    """Generalised advantages [N] float32 (arXiv:1506.02438); add ``values`` for the critic's targets.

    ``next_values`` [S] is the value after a sequence's last position: used where ``truncated`` [S] bool, 0 where the
    sequence ended by itself. ``lam`` is one number, or [S] (VAPO's length-adaptive one).
    """
    sequences = sequence_ids(cu_seqlens)[mask]
    kept_rewards, kept_values = rewards[mask].double(), values[mask].double()
    after_last = torch.where(truncated, next_values.double(), 0.0)[sequences]
    following = after_last.clone()
    following[:-1] = torch.where(sequences[1:] == sequences[:-1], kept_values[1:], after_last[:-1])
    deltas = kept_rewards + gamma * following - kept_values
    decay = torch.as_tensor(lam, dtype=torch.float64, device=values.device).expand(len(cu_seqlens) - 1)[sequences]
    return _scatter(discounted_sum(deltas, dense(sequences), gamma * decay), mask)


def length_adaptive_lambda(mask: Tensor, cu_seqlens: Tensor, *, alpha: float = 0.05) -> Tensor:
    """λ = 1 - 1/(alpha·length) of each sequence's policy, [S], at least 0 (VAPO, arXiv:2504.05118)."""
    lengths = segment_sum(mask.double(), sequence_ids(cu_seqlens), len(cu_seqlens) - 1)
    return (1 - 1 / (alpha * lengths)).clamp(min=0)


def whiten(
    values: Tensor, mask: Tensor, *, shift_mean: bool = True, unbiased: bool = True, eps: float = 1e-8
) -> Tensor:
    """Values [N] over the masked-in ones' std, less their mean, float32; 0 outside the mask or where all are equal.

    ``shift_mean=False`` divides alone and keeps the mean. ``values`` are those of the whole global batch.
    """
    kept = values[mask].double()
    if len(kept) == 0 or bool((kept == kept[0]).all()):
        return _scatter(torch.zeros_like(kept), mask)
    centre = kept.mean() if shift_mean else 0.0
    return _scatter((kept - centre) / (kept.std(correction=int(unbiased)) + eps), mask)


def _scatter(kept: Tensor, mask: Tensor) -> Tensor:
    out = torch.zeros(len(mask), dtype=torch.float32, device=mask.device)
    out[mask] = kept.float()
    return out
