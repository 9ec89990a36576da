"""Rollouts -> Samples with an advantage for every trained token: shaping, baseline, credit, whitening, in that order.

Everything here sees the whole rollout batch, before it is cut into minibatches, so nothing depends on the cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rl_megatron.algorithms.advantages import group_advantages, remax_advantages
from rl_megatron.algorithms.corrections import second_moment_mask
from rl_megatron.algorithms.returns import discounted_returns, last_token_rewards, whiten
from rl_megatron.algorithms.shaping import drop_truncated, overlong_penalty, score_finished
from rl_megatron.config import AlgorithmSection
from rl_megatron.data.samples import to_samples
from rl_megatron.types import Batch, RolloutGroup, Samples


def make_samples(groups: Sequence[RolloutGroup], section: AlgorithmSection, *, max_new_tokens: int) -> Samples:
    """All completions of ``groups`` with their advantages [N], in order. Raises DataError as ``to_samples`` does."""
    completions = [c for g in groups for c in g.completions]
    lengths = torch.tensor([len(c.token_ids) for c in completions])
    truncated = torch.tensor([c.finish_reason != "stop" for c in completions])
    rewards = _shape(torch.tensor([r for g in groups for r in g.rewards]), lengths, truncated, section, max_new_tokens)
    samples = to_samples(groups, _completion_advantages(groups, rewards, section))
    advantages, mask = samples.advantages, samples.mask
    if section.credit == "discounted":
        at_end = last_token_rewards(_completion_advantages(groups, rewards, section), mask, samples.cu_seqlens)
        advantages = discounted_returns(at_end, mask, samples.cu_seqlens, gamma=section.gamma)
    if section.whiten:
        advantages = whiten(advantages, mask)
    if section.drop_truncated:
        mask = drop_truncated(mask, truncated, samples.cu_seqlens)
    return replace(samples, advantages=advantages, mask=mask)


def limit_second_moment(batches: Sequence[Batch], current: Sequence[Batch], limit: float) -> list[Batch]:
    """``batches`` with M2PO's mask, chosen over all of them together.

    ``current`` are the same batches with the current policy's log-probs. Denominators stay those of all tokens.
    """
    rows = [(s, c) for b, n in zip(batches, current, strict=True) for s, c in zip(_flat(b), _flat(n), strict=True)]
    log_ratios = torch.cat([c.old_logprobs - s.rollout_logprobs for s, c in rows])
    kept = second_moment_mask(log_ratios, torch.cat([s.mask for s, _ in rows]), threshold=limit)
    masks = iter(kept.split([len(s.mask) for s, _ in rows]))
    return [
        replace(b, micro_batches=tuple(tuple(replace(s, mask=next(masks)) for s in row) for row in b.micro_batches))
        for b in batches
    ]


def masked_in(batches: Sequence[Batch]) -> int:
    """Tokens that are trained on."""
    return sum(int(samples.mask.sum()) for batch in batches for samples in _flat(batch))


def _flat(batch: Batch) -> list[Samples]:
    return [samples for row in batch.micro_batches for samples in row]


def _shape(
    rewards: Tensor, lengths: Tensor, truncated: Tensor, section: AlgorithmSection, max_new_tokens: int
) -> Tensor:
    if section.unfinished_reward is not None:
        rewards = score_finished(rewards, ~truncated, unfinished_reward=section.unfinished_reward)
    if section.overlong_buffer:
        rewards = rewards + overlong_penalty(
            lengths, max_length=max_new_tokens, buffer=section.overlong_buffer, factor=section.overlong_factor
        )
    return rewards


def _completion_advantages(groups: Sequence[RolloutGroup], rewards: Tensor, section: AlgorithmSection) -> Tensor:
    sizes = torch.tensor([len(g.rewards) for g in groups])
    if section.advantage_mean == "greedy":
        greedy = torch.tensor([g.greedy_reward for g in groups]).repeat_interleave(sizes)
        return remax_advantages(rewards, greedy)
    return group_advantages(
        rewards,
        torch.repeat_interleave(torch.arange(len(groups)), sizes),
        mean=section.advantage_mean,
        std=section.advantage_std,
        leave_one_out=section.leave_one_out,
    )
