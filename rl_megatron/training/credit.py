"""Assigns an advantage to every trained token: shaping, KL, baseline, credit, whitening, in that order.

Works on the whole rollout batch before it is split into minibatches, so advantages do not depend on the split.
Letters: K trajectories (a completion is one), n turns of all of them, S sequences, N positions of all of them. S is K
unless a trajectory has several rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from rl_megatron.algorithms.advantages import group_advantages, moving_baseline, remax_advantages, turn_advantages
from rl_megatron.algorithms.kl import adaptive_beta, kl_in_sequence_rewards, kl_in_token_rewards, kl_per_token
from rl_megatron.algorithms.returns import discounted_returns, gae, last_token_rewards, length_adaptive_lambda, whiten
from rl_megatron.algorithms.segments import dense, differ, segment_sum, sequence_ids
from rl_megatron.algorithms.shaping import (
    RunningMoments,
    drop_truncated,
    overlong_penalty,
    score_finished,
    to_unit_range,
)
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.errors import DataError
from rl_megatron.observability.recorder import Row
from rl_megatron.types import RolloutGroup, Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmState:
    """An algorithm's state from step to step. Part of a checkpoint."""

    kl_coefficient: float
    entropy_coefficient: float = 0.0
    entropy: float | None = None  # mean of the last step that trained; None before the first, and without a target
    reward_moments: RunningMoments = field(default_factory=RunningMoments)
    baseline: float | None = None  # moving mean of the rewards; None before the first batch

    def entropy_weight(self, section: AlgorithmSection) -> float:
        """The weight of the entropy bonus in the next step: 0 while the entropy is above its target."""
        if section.entropy_target is None:
            return section.entropy_coefficient
        above = self.entropy is not None and self.entropy > section.entropy_target
        return 0.0 if above else self.entropy_coefficient


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """Shaped rewards [K] float32 in the order of trajectories, and the algorithm's state after shaping them."""

    values: Tensor
    state: AlgorithmState
    greedy: Tensor | None = None  # [groups], of greedy completions, if they were sampled
    tracked: Tensor | None = None  # [groups], what each prompt's earlier completions have shown, where it is tracked


def shape_rewards(
    groups: Sequence[RolloutGroup], section: AlgorithmSection, state: AlgorithmState, *, max_new_tokens: int
) -> Rewards:
    """Apply unfinished and overlong rewards, bias, scale, range, running whitening and clip, in this order, where set.

    Greedy completions are shaped likewise, but do not enter the ranges and the running moments.
    """
    judged = _judged(groups, section, max_new_tokens)
    greedy = [g.greedy for g in groups if g.greedy is not None]
    baseline = _judged(greedy, section, max_new_tokens) if greedy else None
    if section.normalise_rewards != "none":
        raw, ids = judged, _ids_of_range(groups, section)
        judged = to_unit_range(raw, ids, raw, ids)
        if baseline is not None:
            baseline = to_unit_range(baseline, _ids_of_range(greedy, section), raw, ids)
    if section.whiten_rewards:
        state = replace(state, reward_moments=state.reward_moments.update(judged))
        judged = state.reward_moments.whiten(judged)
        baseline = None if baseline is None else state.reward_moments.whiten(baseline)
    return Rewards(
        values=_clipped(judged, section),
        state=state,
        greedy=None if baseline is None else _clipped(baseline, section),
    )


def _judged(groups: Sequence[RolloutGroup], section: AlgorithmSection, max_new_tokens: int) -> Tensor:
    """Rewards [K] after the rules that look at one completion alone."""
    rewards = torch.tensor([r for g in groups for r in g.rewards])
    if section.unfinished_reward is not None:
        rewards = score_finished(rewards, ~truncated(groups), unfinished_reward=section.unfinished_reward)
    if section.overlong_buffer:
        lengths = torch.tensor([one.num_sampled for g in groups for one in g.trajectories])
        rewards = rewards + overlong_penalty(
            lengths, max_length=max_new_tokens, buffer=section.overlong_buffer, factor=section.overlong_factor
        )
    return (rewards + section.reward_bias) * section.reward_scale


def _ids_of_range(groups: Sequence[RolloutGroup], section: AlgorithmSection) -> Tensor:
    """[K] of each group, or one of the batch."""
    ids = _group_ids(groups)
    return ids if section.normalise_rewards == "group" else torch.zeros_like(ids)


def _clipped(rewards: Tensor, section: AlgorithmSection) -> Tensor:
    bound = section.reward_clip
    return rewards if bound is None else rewards.clamp(-bound, bound)


def groups_that_differ(groups: Sequence[RolloutGroup], section: AlgorithmSection, *, max_new_tokens: int) -> list[bool]:
    """Whether each group has two different shaped rewards; dynamic sampling keeps these groups (DAPO).

    With credit=turn, whether two of its turns that have one baseline differ. Ignores running moments and the range of
    the batch, which shift all rewards alike and would make the choice depend on when it is made.
    """
    if not groups:
        return []
    judged = _judged(groups, section, max_new_tokens)
    if section.credit == "turn":
        turns = _turns(groups, judged, section)
        some = differ(turns.rewards, dense(turns.baseline_of))[dense(turns.baseline_of)]
        return (segment_sum(some.int(), turns.group_of, len(groups)) > 0).tolist()
    ids = _group_ids(groups)
    if section.normalise_rewards == "group":
        judged = to_unit_range(judged, ids, judged, ids)
    if not section.whiten_rewards and section.normalise_rewards != "batch":
        judged = _clipped(judged, section)
    return differ(judged, ids).tolist()


@dataclass(frozen=True, slots=True)
class _Turns:
    rewards: Tensor  # [n]
    lengths: Tensor  # [n] tokens
    group_of: Tensor  # [n]
    baseline_of: Tensor  # [n] those with an equal number are compared
    each: Tensor  # [K] turns of each trajectory


def _turns(groups: Sequence[RolloutGroup], judged: Tensor, section: AlgorithmSection) -> _Turns:
    """The last turn of a trajectory has what earlier turns leave of its reward, and of what shaping made of that.

    Sums are Python's floats, so that equal rewards stay equal in float32; ``judged`` [K] is taken where shaping acted.
    """
    trajectories = [one for group in groups for one in group.trajectories]
    each = torch.tensor([len(one.turns) for one in trajectories])
    own = []
    for one in trajectories:
        earlier = [turn.reward or 0.0 for turn in one.turns[:-1]]
        own += [*earlier, one.reward - math.fsum(earlier)]
    rewards, last = torch.tensor(own) * section.reward_scale, each.cumsum(0) - 1
    trajectory_of = torch.repeat_interleave(torch.arange(len(each)), each)
    left = judged - segment_sum(rewards.index_fill(0, last, 0.0), trajectory_of, len(each))
    as_given = judged == torch.tensor([one.reward for one in trajectories]) * section.reward_scale
    rewards[last] = torch.where(as_given, rewards[last], left)
    group_of = _group_ids(groups)[trajectory_of]
    index = torch.arange(len(own)) - (each.cumsum(0) - each)[trajectory_of]
    by_index = section.turn_baseline == "index"
    return _Turns(
        rewards=rewards,
        lengths=torch.tensor([len(turn.logprobs) for one in trajectories for turn in one.turns]),
        group_of=group_of,
        baseline_of=group_of * int(each.max()) + index if by_index else group_of,
        each=each,
    )


def _group_ids(groups: Sequence[RolloutGroup]) -> Tensor:
    """[K]"""
    return torch.repeat_interleave(torch.arange(len(groups)), torch.tensor([len(g.rewards) for g in groups]))


def truncated(groups: Sequence[RolloutGroup]) -> Tensor:
    """Which trajectories did not end by themselves, [K] bool."""
    return torch.tensor([one.stop != "done" for g in groups for one in g.trajectories])


def _of_sequences(values: Tensor, samples: Samples) -> Tensor:
    """[K] -> [S]"""
    return values if samples.trajectory_of is None else values[samples.trajectory_of]


def assign_credit(
    samples: Samples,
    groups: Sequence[RolloutGroup],
    rewards: Rewards,
    section: AlgorithmSection,
    *,
    success_reward: float,
    next_values: Tensor | None = None,
) -> tuple[Samples, AlgorithmState]:
    """Add advantages [N] (and returns, and NLL marks) to ``samples`` of ``groups``; also returns the next state.

    ``next_values`` [S] are the critic's values after each completion's last token. Raises DataError for a credit over
    tokens where a trajectory has several rows.
    """
    state = rewards.state
    penalty = torch.zeros_like(samples.old_logprobs)
    values = rewards.values
    if section.kl.coefficient and section.kl.placement != "loss":
        kl = reference_kl(samples, section)
        if section.kl.placement == "token_reward":
            penalty = kl_in_token_rewards(penalty, kl, beta=state.kl_coefficient)
        else:
            values = kl_in_sequence_rewards(
                values, kl, samples.cu_seqlens, beta=state.kl_coefficient, trajectory_of=samples.trajectory_of
            )
    if section.credit == "turn":
        samples = _by_turn(samples, _turns(groups, values, section), section)
    else:
        advantages = _completion_advantages(groups, replace(rewards, values=values), section)
        state = _with_baseline(state, values, section)
        goes_on = truncated(groups) & (section.unfinished_reward is None)  # which sets the reward of an end
        samples = _CREDITS[section.credit](samples, _Credit(advantages, penalty, goes_on, next_values), section)
    if section.whiten:
        levels, group_of = {"mean": section.whiten_mean, "std": section.whiten_std}, None
        if "group" in levels.values():
            group_of = _of_sequences(_group_ids(groups), samples)[sequence_ids(samples.cu_seqlens)]
        samples = replace(samples, advantages=whiten(samples.advantages, samples.mask, group_of=group_of, **levels))
    if section.drop_truncated:
        cut = _of_sequences(truncated(groups), samples)
        samples = replace(samples, mask=drop_truncated(samples.mask, cut, samples.cu_seqlens))
    if section.nll_coefficient:
        right = torch.tensor([r >= success_reward for g in groups for r in g.rewards])
        marks = _of_sequences(right, samples)[sequence_ids(samples.cu_seqlens)] & samples.mask
        samples = replace(samples, nll_weights=section.nll_coefficient * marks.float())
    return samples, state


@dataclass(frozen=True, slots=True)
class _Credit:
    of_completions: Tensor  # [K] rewards minus their baseline
    of_tokens: Tensor  # [N] the reward of each token by itself
    goes_on: Tensor  # [K] bool, whether to bootstrap from ``next_values``
    next_values: Tensor | None  # [S]

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
    return replace(samples, advantages=of_policy, returns=torch.where(samples.mask, of_critic + values, 0.0))


def _by_turn(samples: Samples, turns: _Turns, section: AlgorithmSection) -> Samples:
    """The tokens of a turn, which are masked in one turn after another, have its advantage."""
    above = group_advantages(
        turns.rewards,
        turns.baseline_of,
        mean=section.advantage_mean,
        std=section.advantage_std,
        leave_one_out=section.leave_one_out,
        eps=section.std_eps,
        unbiased=section.std_unbiased,
    )
    of_turns = turn_advantages(above, turns.each, gamma=section.gamma_turn)
    advantages = torch.zeros_like(samples.advantages)
    advantages[samples.mask] = torch.repeat_interleave(of_turns, turns.lengths)
    return replace(samples, advantages=advantages)


_CREDITS: Mapping[str, Callable[[Samples, _Credit, AlgorithmSection], Samples]] = {
    "completion": _by_completion,
    "discounted": _discounted,
    "gae": _generalised,
}


def _completion_advantages(groups: Sequence[RolloutGroup], rewards: Rewards, section: AlgorithmSection) -> Tensor:
    ids = _group_ids(groups)
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
        values, mean = values - rewards.tracked[ids], "batch"
    if mean == "moving":
        values, mean = values - (float(values.double().mean()) if before is None else before), "none"
    return group_advantages(
        values,
        ids,
        mean=mean,
        std=section.advantage_std,
        leave_one_out=section.leave_one_out,
        eps=section.std_eps,
        unbiased=section.std_unbiased,
    )


def _with_baseline(state: AlgorithmState, rewards: Tensor, section: AlgorithmSection) -> AlgorithmState:
    if section.advantage_mean != "moving":
        return state
    before = float(rewards.double().mean()) if state.baseline is None else state.baseline
    return replace(state, baseline=moving_baseline(before, rewards, decay=section.baseline_decay))


def reference_kl(samples: Samples, section: AlgorithmSection) -> Tensor:
    """Estimate of KL(old‖ref) at each position, [N]; 0 outside the mask."""
    assert samples.ref_logprobs is not None
    return kl_per_token(samples.old_logprobs, samples.ref_logprobs, samples.mask, estimator=section.kl.estimator)


def controlled(state: AlgorithmState, samples: Samples, section: AlgorithmSection, row: Row) -> AlgorithmState:
    """The state with the next step's coefficients, which follow this step's KL and entropy where these have targets.

    Reads the row's ``entropy``; writes the KL and the coefficients that acted in this step into it.
    """
    if section.entropy_target is not None:
        row["entropy/coefficient"] = state.entropy_weight(section)
        if isinstance(entropy := row.get("entropy"), float):  # no step was made without it
            change = section.entropy_step * float(np.sign(section.entropy_target - entropy))
            state = replace(state, entropy=entropy, entropy_coefficient=max(state.entropy_coefficient + change, 0.0))
    if not section.kl.coefficient:
        return state
    kl = mean_over_completions(reference_kl(samples, section), samples)
    row |= {"kl/reference": kl, "kl/coefficient": state.kl_coefficient}
    if section.kl.target is None:
        return state
    beta = adaptive_beta(
        state.kl_coefficient,
        kl,
        target=section.kl.target,
        num_samples=samples.num_trajectories,
        horizon=section.kl.horizon,
    )
    return replace(state, kl_coefficient=beta)


def mean_over_completions(values: Tensor, samples: Samples) -> float:
    """Mean over completions of the mean over each one's trained tokens; NaN if there is none."""
    ids, of = sequence_ids(samples.cu_seqlens), samples.trajectory_of
    ids, num = ids if of is None else of[ids], samples.num_trajectories
    count = segment_sum(samples.mask.double(), ids, num)
    sums = segment_sum(values.double() * samples.mask, ids, num)
    return float((sums / count.clamp(min=1)).sum() / count.count_nonzero())


def explained_variance(samples: Samples) -> float:
    """1 - Var(returns - values)/Var(returns) over trained tokens: 1 is a perfect critic; 0 if all returns are equal."""
    assert samples.returns is not None
    assert samples.old_values is not None
    returns, values = (x[samples.mask].double() for x in (samples.returns, samples.old_values))
    spread = float(returns.var(correction=0))
    return 1 - float((returns - values).var(correction=0)) / spread if spread > 0 else 0.0
