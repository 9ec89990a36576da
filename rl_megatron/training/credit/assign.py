"""Assigns an advantage to every trained token: KL, baseline, credit, whitening, in that order, of shaped rewards.

Works on the whole rollout batch before it is split into minibatches, so advantages do not depend on the split.
Letters: K trajectories (a completion is one), S sequences, N positions of all of them. S is K unless a trajectory has
several rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rl_megatron.algorithms.advantages import moving_baseline, remax_advantages, row_advantages, turn_advantages
from rl_megatron.algorithms.kl import kl_in_sequence_rewards, kl_in_token_rewards
from rl_megatron.algorithms.returns import (
    discounted_returns,
    gae,
    last_token_rewards,
    length_adaptive_lambda,
    less_optimal_baseline,
    whiten,
)
from rl_megatron.algorithms.segments import difference, sequence_ids
from rl_megatron.algorithms.shaping import drop_truncated
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.errors import DataError
from rl_megatron.training.credit.parts import parts_advantages
from rl_megatron.training.credit.shaping import RewardedTurns, Rewards, group_ids, nums_sampled, truncated, turns_of
from rl_megatron.training.credit.state import AlgorithmState, reference_kl
from rl_megatron.types import RolloutGroup, Samples


def assign_credit(
    samples: Samples,
    groups: Sequence[RolloutGroup],
    rewards: Rewards,
    section: AlgorithmSection,
    *,
    success_reward: float,
    next_values: Tensor | None = None,
    logit_norms: Tensor | None = None,
) -> tuple[Samples, AlgorithmState]:
    """Add advantages [N] (and returns, and NLL marks) to ``samples`` of ``groups``; also returns the next state.

    ``next_values`` [S] are the critic's values after each completion's last token; ``logit_norms`` [N] are
    `types.Want`'s, of the policy at the start of the update. Raises DataError for a credit over tokens where a
    trajectory has several rows.
    """
    state = rewards.state
    penalty = torch.zeros_like(samples.old_logprobs)
    values = rewards.values
    if section.kl.coefficient and section.kl.placement != "loss":
        kl = reference_kl(samples, section)
        if section.kl.placement == "token_reward":
            penalty = kl_in_token_rewards(penalty, kl, beta=section.kl.coefficient)
        else:
            values = kl_in_sequence_rewards(
                values, kl, samples.cu_seqlens, beta=section.kl.coefficient, trajectory_of=samples.trajectory_of
            )
    if section.credit == "turn":
        whole = None
        if section.turn_weight is not None:
            whole = _completion_advantages(groups, replace(rewards, values=values), section)
        samples = _by_turn(samples, turns_of(groups, values, section), whole, section)
    else:
        advantages = _completion_advantages(groups, replace(rewards, values=values), section)
        if section.whiten and section.whiten_of == "completions":
            advantages = whiten(advantages, torch.ones_like(advantages, dtype=torch.bool))
        state = _with_baseline(state, values, section)
        goes_on = truncated(groups) & (section.unfinished_reward is None)  # which sets the reward of an end
        credit = _Credit(advantages, penalty, goes_on, next_values, logit_norms, group_ids(groups))
        samples = _CREDITS[section.credit](samples, credit, section)
    if section.whiten and section.whiten_of == "tokens":
        samples = replace(samples, advantages=whiten(samples.advantages, samples.mask))
    if section.drop_truncated:
        cut = _of_sequences(truncated(groups), samples)
        samples = replace(samples, mask=drop_truncated(samples.mask, cut, samples.cu_seqlens))
    if section.nll_coefficient:
        right = torch.tensor([r >= success_reward for g in groups for r in g.rewards])
        if section.unfinished_reward is not None:
            right &= ~truncated(groups)
        marks = _of_sequences(right, samples)[sequence_ids(samples.cu_seqlens)] & samples.mask
        samples = replace(samples, nll_weights=section.nll_coefficient * marks.float())
    return samples, state


def _of_sequences(values: Tensor, samples: Samples) -> Tensor:
    """[K] -> [S]"""
    return values if samples.trajectory_of is None else values[samples.trajectory_of]


@dataclass(frozen=True, slots=True)
class _Credit:
    of_completions: Tensor  # [K] rewards minus their baseline
    of_tokens: Tensor  # [N] the reward of each token by itself
    goes_on: Tensor  # [K] bool, whether to bootstrap from ``next_values``
    next_values: Tensor | None  # [S]
    logit_norms: Tensor | None  # [N]
    group_of: Tensor  # [K]

    def per_token(self, samples: Samples, section: AlgorithmSection) -> Tensor:
        if samples.trajectory_of is not None:
            raise DataError(
                f"algorithm.credit={section.credit} goes from token to token, but here trajectories have several rows: "
                "the context of a later turn does not extend the row before it. Set credit=completion or turn"
            )
        return last_token_rewards(self.of_completions, samples.mask, samples.cu_seqlens) + self.of_tokens


def _by_completion(samples: Samples, credit: _Credit, section: AlgorithmSection) -> Samples:
    everywhere = np.repeat(_of_sequences(credit.of_completions, samples).numpy(), samples.cu_seqlens.diff().numpy())
    return replace(samples, advantages=torch.from_numpy(everywhere).mul_(samples.mask))


def _discounted(samples: Samples, credit: _Credit, section: AlgorithmSection) -> Samples:
    rewards = credit.per_token(samples, section)
    return replace(
        samples, advantages=discounted_returns(rewards, samples.mask, samples.cu_seqlens, gamma=section.gamma)
    )


def _less_optimal(samples: Samples, credit: _Credit, section: AlgorithmSection) -> Samples:
    """Returns less the baseline of the group's tokens at the same place of least variance of the gradient."""
    returns, norms = _discounted(samples, credit, section).advantages, credit.logit_norms
    assert norms is not None
    advantages = less_optimal_baseline(returns, norms, samples.mask, samples.cu_seqlens, group_of=credit.group_of)
    return replace(samples, advantages=advantages)


def _generalised(samples: Samples, credit: _Credit, section: AlgorithmSection) -> Samples:
    """GAE twice: with the policy's lambda for advantages, with the critic's for returns (VAPO decouples them)."""
    values, after = samples.old_values, credit.next_values
    assert values is not None
    assert after is not None
    rewards = credit.per_token(samples, section)

    def advantages(lam: Tensor | float) -> Tensor:
        return gae(
            rewards,
            values,
            samples.mask,
            samples.cu_seqlens,
            next_values=after,
            truncated=credit.goes_on,
            gamma=section.gamma,
            lam=lam,
        )

    factor = section.lam_length_factor
    lam = section.lam if factor is None else length_adaptive_lambda(samples.mask, samples.cu_seqlens, alpha=factor)
    critic_lam = section.lam if section.critic.lam is None else section.critic.lam
    of_policy = advantages(lam)
    of_critic = of_policy if lam is critic_lam else advantages(critic_lam)
    return replace(samples, advantages=of_policy, returns=of_critic + values)


def _by_turn(samples: Samples, turns: RewardedTurns, whole: Tensor | None, section: AlgorithmSection) -> Samples:
    """The tokens of a turn, which are masked in one turn after another, have its advantage, beside the ``whole``
    completion's [K] under ``turn_weight``."""
    of_turns = row_advantages(turns.compared, turns.baseline_of, turns.lengths, section)
    if section.turn_compared == "rewards":
        of_turns = turn_advantages(of_turns, turns.each, gamma=section.gamma_turn)
    if whole is not None:
        assert section.turn_weight is not None
        of_turns = whole[turns.trajectory_of] + section.turn_weight * of_turns
    advantages = torch.zeros_like(samples.advantages)
    advantages[samples.mask] = torch.repeat_interleave(of_turns[turns.in_rows], turns.lengths[turns.in_rows])
    return replace(samples, advantages=advantages)


_CREDITS: Mapping[str, Callable[[Samples, _Credit, AlgorithmSection], Samples]] = {
    "completion": _by_completion,
    "discounted": _discounted,
    "optimal": _less_optimal,
    "gae": _generalised,
}


def _completion_advantages(groups: Sequence[RolloutGroup], rewards: Rewards, section: AlgorithmSection) -> Tensor:
    ids, lengths = group_ids(groups), nums_sampled(groups)
    if section.advantage_of == "parts":
        return parts_advantages(groups, ids, lengths, section)
    values, mean, before = rewards.values, section.advantage_mean, rewards.state.baseline
    if mean == "greedy":
        if rewards.greedy is None:
            raise DataError(
                "algorithm.advantage_mean=greedy, but these groups have no greedy completion: they were sampled before "
                "it was set; start a new run"
            )
        return remax_advantages(values, rewards.greedy[ids])
    if mean == "tracked":
        assert rewards.tracked is not None
        values, mean = difference(values, rewards.tracked[ids]), "batch"
    if mean == "moving":
        baseline = values.double().mean() if before is None else torch.tensor(before, dtype=torch.float64)
        values, mean = difference(values.double(), baseline).float(), "none"
    return row_advantages(values, ids, lengths, section, mean=mean)


def _with_baseline(state: AlgorithmState, rewards: Tensor, section: AlgorithmSection) -> AlgorithmState:
    if section.advantage_mean != "moving":
        return state
    before = float(rewards.double().mean()) if state.baseline is None else state.baseline
    return replace(state, baseline=moving_baseline(before, rewards, decay=section.baseline_decay))
