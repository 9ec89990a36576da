"""Assigns an advantage to every trained token: KL, baseline, credit, whitening, in that order, of shaped rewards.

Works on the whole rollout batch before it is split into minibatches, so advantages do not depend on the split. First
rewards are shaped, and the groups found that have different ones. A weighted sum of rewards may be split into its
parts, each with advantages of its own: GDPO (arXiv:2601.05242).
Letters: K trajectories (a completion is one), k of them with a reward that has a part, n turns of all of them. S
sequences, N positions of all of them. S is K unless a trajectory has several rows.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from rl_megatron.algorithms.advantages import (
    LEVELS,
    ROUNDING,
    best_subsets_differ,
    custom_has_advantage,
    moving_baseline,
    remax_advantages,
    row_advantages,
    turn_advantages,
)
from rl_megatron.algorithms.kl import kl_in_sequence_rewards, kl_in_token_rewards, kl_per_token
from rl_megatron.algorithms.returns import (
    discounted_returns,
    drop_truncated,
    gae,
    last_token_rewards,
    length_adaptive_lambda,
    less_optimal_baseline,
    overlong_penalty,
    set_unfinished_rewards,
    whiten,
)
from rl_megatron.algorithms.segments import dense, differ, difference, discounted_sum, segment_sum, sequence_ids
from rl_megatron.columns import TokenIds
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.data.samples import tokens_after_prompt, with_demonstrations
from rl_megatron.errors import DataError
from rl_megatron.observability.recorder import Row
from rl_megatron.types import RolloutGroup, Samples, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmState:
    """An algorithm's state from step to step. Part of a checkpoint."""

    baseline: float | None = None  # moving mean of the rewards; None before the first batch


def describe_kl(samples: Samples, section: AlgorithmSection, row: Row) -> None:
    """Writes the KL to the reference into the row, if there is one."""
    if section.kl.coefficient:
        row["kl/reference"] = mean_over_completions(reference_kl(samples, section), samples)


def reference_kl(samples: Samples, section: AlgorithmSection) -> Tensor:
    """Returns an estimate of KL(old‖ref) at each position, [N]; 0 outside the mask."""
    assert samples.ref_logprobs is not None
    return kl_per_token(samples.old_logprobs, samples.ref_logprobs, samples.mask, estimator=section.kl.estimator)


def mean_over_completions(values: Tensor, samples: Samples) -> float:
    """Returns the mean over completions of the mean over each one's trained tokens; NaN if there is none."""
    ids, of = sequence_ids(samples.cu_seqlens), samples.trajectory_of
    ids, num = ids if of is None else of[ids], samples.num_trajectories
    count = segment_sum(samples.mask.double(), ids, num)
    sums = segment_sum(values.double() * samples.mask, ids, num)
    return float((sums / count.clamp(min=1)).sum() / count.count_nonzero())


def parts_advantages(groups: Sequence[RolloutGroup], ids: Tensor, lengths: Tensor, section: AlgorithmSection) -> Tensor:
    """Returns the weighted sum [K] float32 of `row_advantages` of each part; ``ids`` and ``lengths`` [K].

    The mean and the std of a batch are over the trajectories that have the part. Raises DataError for a trajectory
    without parts.
    """
    return _summed(groups, ids, lengths, section)[0].float()


def parts_differ(groups: Sequence[RolloutGroup], ids: Tensor, lengths: Tensor, section: AlgorithmSection) -> Tensor:
    """Marks groups, [groups] bool, with parts that give an advantage: a sum that is not 0 but for rounding.

    It looks at the group alone: where the std is of the batch, advantages of two parts are taken not to cancel.
    """
    mean = "group" if section.advantage_mean in LEVELS else None
    scaled = section.advantage_std == "group"
    total, largest = _summed(groups, ids, lengths, section, mean=mean, std=None if scaled else "none")
    found = total.abs() if scaled or section.advantage_std == "none" else largest
    return segment_sum((found > ROUNDING).int(), ids, len(groups)) > 0


def _summed(
    groups: Sequence[RolloutGroup],
    ids: Tensor,
    lengths: Tensor,
    section: AlgorithmSection,
    *,
    mean: str | None = None,
    std: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the weighted sum of parts' advantages, and the largest of its terms, [K] float64 each.

    Terms that cancel leave exactly 0: whitening divides a batch's sums by their std, and would make rounding large.
    """
    total, largest = torch.zeros(2, len(ids), dtype=torch.float64)
    for part in _parts_of(groups):
        above = part.weights * row_advantages(
            part.values, ids[part.trajectories], lengths[part.trajectories], section, mean=mean, std=std
        )
        total[part.trajectories] += above
        largest[part.trajectories] = largest[part.trajectories].maximum(above.abs())
    return torch.where(total.abs() > ROUNDING * largest, total, 0.0), largest


@dataclass(frozen=True, slots=True)
class _Part:
    trajectories: Tensor  # [k] int64, the trajectories
    values: Tensor  # [k] float32
    weights: Tensor  # [k] float64


def _parts_of(groups: Sequence[RolloutGroup]) -> Iterator[_Part]:
    """Yields each part by name: sources have their own. One of weight 0 is recorded only; it may exceed float32."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    trajectories = ((group.prompt.id, one) for group in groups for one in group.trajectories)
    for place, (prompt, one) in enumerate(trajectories):
        if not one.parts:
            raise DataError(
                f"algorithm.advantage_of=parts, but a reward of prompt {prompt!r} has no parts: it was given by a "
                "version that kept none, or by a source of your own; start a new run, or set advantage_of=sum"
            )
        for name, (value, weight) in one.parts.items():
            if weight:
                found.setdefault(name, []).append((place, value, weight))
    for rows in found.values():
        of, values, weights = zip(*rows, strict=True)
        yield _Part(torch.tensor(of), torch.tensor(values), torch.tensor(weights, dtype=torch.float64))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedRewards:
    """Shaped rewards [K] float32 in the order of trajectories, and the algorithm's state of the last step."""

    values: Tensor
    state: AlgorithmState
    greedy: Tensor | None = None  # [groups], of greedy completions, if they were sampled
    tracked: Tensor | None = None  # [groups], what each prompt's earlier completions have shown, where it is tracked


def shape_rewards(
    groups: Sequence[RolloutGroup], section: AlgorithmSection, state: AlgorithmState, *, max_new_tokens: int
) -> ShapedRewards:
    """Applies unfinished and overlong rewards, in this order, where set; to greedy completions, too."""
    judged = _judged(groups, section, max_new_tokens)
    greedy = [g.greedy for g in groups if g.greedy is not None]
    baseline = _judged(greedy, section, max_new_tokens) if greedy else None
    return ShapedRewards(values=judged, state=state, greedy=baseline)


def _judged(groups: Sequence[RolloutGroup], section: AlgorithmSection, max_new_tokens: int) -> Tensor:
    """Returns rewards [K] after the rules that look at one completion alone."""
    rewards = torch.tensor([r for g in groups for r in g.rewards])
    if section.unfinished_reward is not None:
        rewards = set_unfinished_rewards(rewards, ~truncated(groups), unfinished_reward=section.unfinished_reward)
    if section.overlong_buffer:
        lengths = torch.tensor([tokens_after_prompt(one) for g in groups for one in g.trajectories])
        rewards = rewards + overlong_penalty(
            lengths, max_length=max_new_tokens, buffer=section.overlong_buffer, factor=section.overlong_factor
        )
    return rewards


def groups_with_gradient(
    groups: Sequence[RolloutGroup], section: AlgorithmSection, *, max_new_tokens: int
) -> list[bool]:
    """Marks groups that have two different shaped rewards, or bests of ``best_of`` of them, and so a gradient.

    With credit=turn, two of its turns that have one baseline must differ, or with a ``turn_weight`` two of its
    trajectories. With custom advantages, their function must give some. With advantage_of=parts, it is `parts_differ`.
    Demonstrations are compared, too.
    """
    if not groups:
        return []
    groups = with_demonstrations(groups)
    if section.advantage_of == "parts":
        return parts_differ(groups, group_ids(groups), sampled_counts(groups), section).tolist()
    judged = _judged(groups, section, max_new_tokens)
    ids = group_ids(groups)
    if section.credit == "turn":
        turns = rewarded_turns(groups, judged, section)
        alike = dense(turns.baseline_of)
        some = _teaching(turns.values, alike, turns.lengths, section)[alike]
        teach = segment_sum(some.int(), ids[turns.trajectory_of], len(groups)) > 0
        if section.turn_weight is not None:
            teach |= _teaching(judged, ids, sampled_counts(groups), section)
        return teach.tolist()
    return _teaching(judged, ids, sampled_counts(groups), section).tolist()


def trainable_groups(groups: Sequence[RolloutGroup], section: AlgorithmSection, *, max_new_tokens: int) -> list[bool]:
    """Marks groups that dynamic sampling keeps (DAPO): `groups_with_gradient`, before the overlong penalty too."""
    found = groups_with_gradient(groups, section, max_new_tokens=max_new_tokens)
    if not section.overlong_buffer:
        return found
    unpenalized = section.model_copy(update={"overlong_buffer": 0.0})
    before = groups_with_gradient(groups, unpenalized, max_new_tokens=max_new_tokens)
    return [one and other for one, other in zip(found, before, strict=True)]


def _teaching(rewards: Tensor, ids: Tensor, lengths: Tensor, section: AlgorithmSection) -> Tensor:
    """Marks rewards that differ from others with their baseline, and so give a gradient, [K] bool."""
    if section.best_of > 1:
        return best_subsets_differ(rewards, ids, section.best_of, leave_one_out=section.leave_one_out)
    if not section.own_decides:
        return differ(rewards, ids)
    own = custom_has_advantage(section.advantage_mean, rewards, ids, lengths)
    return own & differ(rewards, ids) if section.levels_equal else own


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardedTurns:
    """The turns of all trajectories, in the order in which they were sampled, and what of each is compared."""

    values: Tensor  # [n] float32, rewards or returns
    lengths: Tensor  # [n] tokens
    row_order: Tensor  # [n] their places here, in the order of rows
    trajectory_of: Tensor  # [n]
    baseline_of: Tensor  # [n] those with an equal number are compared
    turns_per_trajectory: Tensor  # [K] turns of each trajectory


def rewarded_turns(groups: Sequence[RolloutGroup], judged: Tensor, section: AlgorithmSection) -> RewardedTurns:
    """Returns all turns. The last one of a trajectory has the rest of its reward, and the change that shaping made.

    Sums are in float64, so that equal rewards and returns stay equal in float32. ``judged`` [K] is taken where shaping
    acted, and where it is that of a single turn.
    """
    trajectories = [one for group in groups for one in group.trajectories]
    turns = [turn for one in trajectories for turn in one.turns]
    numbers = [turn.number for one in trajectories for row in one.chains for turn in row.turns]
    each = torch.tensor([len(one.turns) for one in trajectories])
    own = []
    for one in trajectories:
        earlier = [turn.reward or 0.0 for turn in one.turns[:-1]]
        own += [*earlier, one.reward - math.fsum(earlier)]
    rewards, last = torch.tensor(own, dtype=torch.float64), each.cumsum(0) - 1
    trajectory_of = torch.repeat_interleave(torch.arange(len(each)), each)
    left = judged - segment_sum(rewards.index_fill(0, last, 0.0), trajectory_of, len(each))
    as_given = judged == torch.tensor([one.reward for one in trajectories])
    rewards[last] = torch.where(as_given & (each > 1), rewards[last], left)
    if section.turn_compared == "returns":
        rewards = discounted_sum(rewards, each, torch.tensor([section.gamma_turn], dtype=torch.float64))
    return RewardedTurns(
        values=rewards.float(),
        lengths=torch.tensor([len(turn.logprobs) for turn in turns]),
        row_order=torch.from_numpy(np.lexsort((np.array(numbers), trajectory_of.numpy())).argsort()),
        trajectory_of=trajectory_of,
        baseline_of=_BASELINES[section.turn_baseline](groups, each),
        turns_per_trajectory=each,
    )


def turn_states(groups: Sequence[RolloutGroup]) -> Tensor:
    """Returns the number of the state that each turn began from, [n] int64. Turns of a group with an equal one are
    compared by ``turn_baseline=state``; turns of two groups have none in common."""
    numbers: dict[tuple[int, str | bytes], int] = {}
    states = ((place, state) for place, g in enumerate(groups) for one in g.trajectories for state in _states(one))
    return torch.tensor([numbers.setdefault(state, len(numbers)) for state in states])


_known: WeakKeyDictionary[Trajectory, list[str | bytes]] = WeakKeyDictionary()


def _states(one: Trajectory) -> list[str | bytes]:
    """Returns the result of `_hashed`, computed once: a step needs it for groups with gradient and for advantages."""
    if (found := _known.get(one)) is None:
        found = _known[one] = _hashed(one)
    return found


def _hashed(one: Trajectory) -> list[str | bytes]:
    """Returns the state of each turn: the name that its environment gave, or 128 bits of BLAKE2b. They are of the
    tokens that were read since the last sampled one before it, or of its whole context where that continues no turn."""
    ends = sorted({turn.stop for row in one.chains for turn in row.turns})
    before = [_digests(row.token_ids, ends) for row in one.chains]
    sampled = {until[turn.stop] for row, until in zip(one.chains, before, strict=True) for turn in row.turns}
    found = {}
    for row, until in zip(one.chains, before, strict=True):
        known = [0, *(end for end, digest in until.items() if digest in sampled)]  # a row's context has others' turns
        for turn in row.turns:
            begin = known[bisect_right(known, turn.start) - 1]
            (found[id(turn)],) = _digests(row.token_ids[begin : turn.start], [turn.start - begin]).values()
    return [found[id(turn)] if turn.state is None else turn.state for turn in one.turns]


def _digests(tokens: TokenIds, ends: Sequence[int]) -> dict[int, bytes]:
    """Returns the digests of the first tokens up to each of the ascending ``ends`` that the row reaches."""
    found, start, sum_so_far = {}, 0, hashlib.blake2b(digest_size=16)
    for end in ends:
        if end <= len(tokens):
            sum_so_far.update(tokens[start:end].tobytes())
            found[end], start = sum_so_far.digest(), end
    return found


def _repeat_group_ids(groups: Sequence[RolloutGroup], each: Tensor) -> Tensor:
    return group_ids(groups).repeat_interleave(each)


def _completion_index(groups: Sequence[RolloutGroup], each: Tensor) -> Tensor:
    index = torch.arange(int(each.sum())) - (each.cumsum(0) - each).repeat_interleave(each)
    return _repeat_group_ids(groups, each) * int(each.max()) + index


_BASELINES: Mapping[str, Callable[[Sequence[RolloutGroup], Tensor], Tensor]] = {
    "all": _repeat_group_ids,
    "index": _completion_index,
    "state": lambda groups, _: turn_states(groups),
}


def group_ids(groups: Sequence[RolloutGroup]) -> Tensor:
    """Returns the group of each trajectory, [K]."""
    return torch.repeat_interleave(torch.arange(len(groups)), torch.tensor([len(g.rewards) for g in groups]))


def sampled_counts(groups: Sequence[RolloutGroup]) -> Tensor:
    """Returns the number of sampled tokens of each trajectory, [K]."""
    return torch.tensor([one.num_sampled for g in groups for one in g.trajectories])


def truncated(groups: Sequence[RolloutGroup]) -> Tensor:
    """Marks trajectories that did not end by themselves, [K] bool."""
    return torch.tensor([one.stop != "done" for g in groups for one in g.trajectories])


def assign_credit(
    samples: Samples,
    groups: Sequence[RolloutGroup],
    rewards: ShapedRewards,
    section: AlgorithmSection,
    *,
    success_reward: float,
    next_values: Tensor | None = None,
    logit_norms: Tensor | None = None,
) -> tuple[Samples, AlgorithmState]:
    """Adds advantages [N] (and returns, and NLL marks) to ``samples`` of ``groups``; also returns the next state.

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
        samples = _credit_turns(samples, rewarded_turns(groups, values, section), whole, section)
    else:
        advantages = _completion_advantages(groups, replace(rewards, values=values), section)
        if section.whiten and section.whiten_of == "completions":
            advantages = whiten(advantages, torch.ones_like(advantages, dtype=torch.bool))
        state = _with_baseline(state, values, section)
        goes_on = truncated(groups) & (section.unfinished_reward is None)  # it sets the reward of an end
        credit = _Credit(advantages, penalty, goes_on, next_values, logit_norms, group_ids(groups))
        samples = _CREDITS[section.credit](samples, credit, section)
    if section.whiten and section.whiten_of == "tokens":
        samples = replace(samples, advantages=whiten(samples.advantages, samples.mask))
    if section.drop_truncated:
        cut = _to_sequences(truncated(groups), samples)
        samples = replace(samples, mask=drop_truncated(samples.mask, cut, samples.cu_seqlens))
    if section.nll_coefficient:
        right = torch.tensor([r >= success_reward for g in groups for r in g.rewards])
        if section.unfinished_reward is not None:
            right &= ~truncated(groups)
        marks = _to_sequences(right, samples)[sequence_ids(samples.cu_seqlens)] & samples.mask
        samples = replace(samples, nll_weights=section.nll_coefficient * marks.float())
    return samples, state


def _to_sequences(values: Tensor, samples: Samples) -> Tensor:
    """Maps [K] -> [S]."""
    return values if samples.trajectory_of is None else values[samples.trajectory_of]


@dataclass(frozen=True, slots=True)
class _Credit:
    completion_credit: Tensor  # [K] rewards minus their baseline
    token_credit: Tensor  # [N] the reward of each token by itself
    bootstraps: Tensor  # [K] bool, whether to bootstrap from ``next_values``
    next_values: Tensor | None  # [S]
    logit_norms: Tensor | None  # [N]
    group_of: Tensor  # [K]

    def per_token(self, samples: Samples, section: AlgorithmSection) -> Tensor:
        if samples.trajectory_of is not None:
            raise DataError(
                f"algorithm.credit={section.credit} goes from token to token, but here trajectories have several rows: "
                "the context of a later turn does not extend the row before it. Set credit=completion or turn"
            )
        return last_token_rewards(self.completion_credit, samples.mask, samples.cu_seqlens) + self.token_credit


def _credit_completions(samples: Samples, credit: _Credit, section: AlgorithmSection) -> Samples:
    everywhere = np.repeat(_to_sequences(credit.completion_credit, samples).numpy(), samples.cu_seqlens.diff().numpy())
    return replace(samples, advantages=torch.from_numpy(everywhere).mul_(samples.mask))


def _discounted(samples: Samples, credit: _Credit, section: AlgorithmSection) -> Samples:
    rewards = credit.per_token(samples, section)
    return replace(
        samples, advantages=discounted_returns(rewards, samples.mask, samples.cu_seqlens, gamma=section.gamma)
    )


def _less_optimal(samples: Samples, credit: _Credit, section: AlgorithmSection) -> Samples:
    """Subtracts the baseline of least gradient variance, over the group's tokens at the same place, from returns."""
    returns, norms = _discounted(samples, credit, section).advantages, credit.logit_norms
    assert norms is not None
    advantages = less_optimal_baseline(returns, norms, samples.mask, samples.cu_seqlens, group_of=credit.group_of)
    return replace(samples, advantages=advantages)


def _generalized(samples: Samples, credit: _Credit, section: AlgorithmSection) -> Samples:
    """Computes GAE twice: with the policy's lambda for advantages, the critic's for returns (VAPO decouples them)."""
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
            truncated=credit.bootstraps,
            gamma=section.gamma,
            lam=lam,
        )

    factor = section.lam_length_factor
    lam = section.lam if factor is None else length_adaptive_lambda(samples.mask, samples.cu_seqlens, alpha=factor)
    critic_lam = section.lam if section.critic.lam is None else section.critic.lam
    of_policy = advantages(lam)
    of_critic = of_policy if lam is critic_lam else advantages(critic_lam)
    return replace(samples, advantages=of_policy, returns=of_critic + values)


def _credit_turns(samples: Samples, turns: RewardedTurns, whole: Tensor | None, section: AlgorithmSection) -> Samples:
    """Gives the tokens of a turn, which are masked in one turn after another, its advantage, added to the ``whole``
    completion's [K] under ``turn_weight``."""
    of_turns = row_advantages(turns.values, turns.baseline_of, turns.lengths, section)
    if section.turn_compared == "rewards":
        of_turns = turn_advantages(of_turns, turns.turns_per_trajectory, gamma=section.gamma_turn)
    if whole is not None:
        assert section.turn_weight is not None
        of_turns = whole[turns.trajectory_of] + section.turn_weight * of_turns
    advantages = torch.zeros_like(samples.advantages)
    advantages[samples.mask] = torch.repeat_interleave(of_turns[turns.row_order], turns.lengths[turns.row_order])
    return replace(samples, advantages=advantages)


_CREDITS: Mapping[str, Callable[[Samples, _Credit, AlgorithmSection], Samples]] = {
    "completion": _credit_completions,
    "discounted": _discounted,
    "optimal": _less_optimal,
    "gae": _generalized,
}


def _completion_advantages(groups: Sequence[RolloutGroup], rewards: ShapedRewards, section: AlgorithmSection) -> Tensor:
    ids, lengths = group_ids(groups), sampled_counts(groups)
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
