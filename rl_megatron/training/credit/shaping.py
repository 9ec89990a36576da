"""Shapes the rewards of a batch, finds the groups whose shaped rewards differ, and splits rewards between turns.

Letters: K trajectories (a completion is one), n turns of all of them.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from rl_megatron.algorithms.advantages import bests_differ, own_gives
from rl_megatron.algorithms.segments import dense, differ, discounted_sum, segment_sum
from rl_megatron.algorithms.shaping import overlong_penalty, score_finished, to_unit_range
from rl_megatron.columns import TokenIds
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.data.demonstrations import with_demonstrations
from rl_megatron.data.trajectories import tokens_behind_prompt
from rl_megatron.training.credit.parts import parts_differ
from rl_megatron.training.credit.state import AlgorithmState
from rl_megatron.types import RolloutGroup, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """Shaped rewards [K] float32 in the order of trajectories, and the algorithm's state of the last step."""

    values: Tensor
    state: AlgorithmState
    greedy: Tensor | None = None  # [groups], of greedy completions, if they were sampled
    tracked: Tensor | None = None  # [groups], what each prompt's earlier completions have shown, where it is tracked


def shape_rewards(
    groups: Sequence[RolloutGroup], section: AlgorithmSection, state: AlgorithmState, *, max_new_tokens: int
) -> Rewards:
    """Apply unfinished and overlong rewards, scale and range, in this order, where set.

    Greedy completions are shaped likewise, but do not enter the ranges.
    """
    judged = _judged(groups, section, max_new_tokens)
    greedy = [g.greedy for g in groups if g.greedy is not None]
    baseline = _judged(greedy, section, max_new_tokens) if greedy else None
    if section.normalise_rewards != "none":
        raw, ids = judged, _ids_of_range(groups, section)
        judged = to_unit_range(raw, ids, raw, ids)
        if baseline is not None:
            baseline = to_unit_range(baseline, _ids_of_range(greedy, section), raw, ids)
    return Rewards(values=judged, state=state, greedy=baseline)


def _judged(groups: Sequence[RolloutGroup], section: AlgorithmSection, max_new_tokens: int) -> Tensor:
    """Rewards [K] after the rules that look at one completion alone."""
    rewards = torch.tensor([r for g in groups for r in g.rewards])
    if section.unfinished_reward is not None:
        rewards = score_finished(rewards, ~truncated(groups), unfinished_reward=section.unfinished_reward)
    if section.overlong_buffer:
        lengths = torch.tensor([tokens_behind_prompt(one) for g in groups for one in g.trajectories])
        rewards = rewards + overlong_penalty(
            lengths, max_length=max_new_tokens, buffer=section.overlong_buffer, factor=section.overlong_factor
        )
    return rewards * section.reward_scale


def _ids_of_range(groups: Sequence[RolloutGroup], section: AlgorithmSection) -> Tensor:
    """[K] of each group, or one of the batch."""
    ids = group_ids(groups)
    return ids if section.normalise_rewards == "group" else torch.zeros_like(ids)


def groups_that_differ(groups: Sequence[RolloutGroup], section: AlgorithmSection, *, max_new_tokens: int) -> list[bool]:
    """Whether each group has two different shaped rewards, or bests of ``best_of`` of them, and so a gradient.

    With credit=turn, whether two of its turns that have one baseline differ, or with a ``turn_weight`` two of its
    trajectories. Ignores the range of the batch, which would make the choice depend on when it is made. Where
    advantages are a function of the user's own, whether that gives any, as `AlgorithmSection.own_decides` says. With
    advantage_of=parts, `parts_differ`. Demonstrations are compared, too.
    """
    if not groups:
        return []
    groups = with_demonstrations(groups)
    if section.advantage_of == "parts":
        return parts_differ(groups, group_ids(groups), nums_sampled(groups), section).tolist()
    judged = _judged(groups, section, max_new_tokens)
    ids = group_ids(groups)
    if section.credit == "turn":
        turns = turns_of(groups, judged, section)
        alike = dense(turns.baseline_of)
        some = _teaching(turns.compared, alike, turns.lengths, section)[alike]
        teach = segment_sum(some.int(), ids[turns.trajectory_of], len(groups)) > 0
        if section.turn_weight is not None:
            teach |= _teaching(judged, ids, nums_sampled(groups), section)
        return teach.tolist()
    if section.normalise_rewards == "group":
        judged = to_unit_range(judged, ids, judged, ids)
    return _teaching(judged, ids, nums_sampled(groups), section).tolist()


def groups_to_train_on(groups: Sequence[RolloutGroup], section: AlgorithmSection, *, max_new_tokens: int) -> list[bool]:
    """Which groups dynamic sampling keeps (DAPO): `groups_that_differ`, before the overlong penalty too."""
    found = groups_that_differ(groups, section, max_new_tokens=max_new_tokens)
    if not section.overlong_buffer:
        return found
    unpenalised = section.model_copy(update={"overlong_buffer": 0.0})
    before = groups_that_differ(groups, unpenalised, max_new_tokens=max_new_tokens)
    return [one and other for one, other in zip(found, before, strict=True)]


def _teaching(rewards: Tensor, ids: Tensor, lengths: Tensor, section: AlgorithmSection) -> Tensor:
    """Of the rewards that have one baseline, [K] bool."""
    if section.best_of > 1:
        return bests_differ(rewards, ids, section.best_of, leave_one_out=section.leave_one_out)
    if not section.own_decides:
        return differ(rewards, ids)
    own = own_gives(section.advantage_mean, rewards, ids, lengths)
    return own & differ(rewards, ids) if section.levels_equal else own


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardedTurns:
    """The turns of all trajectories, in the order in which they were sampled, and what of each is compared."""

    compared: Tensor  # [n] float32, rewards or returns
    lengths: Tensor  # [n] tokens
    in_rows: Tensor  # [n] their places here, in the order of rows
    trajectory_of: Tensor  # [n]
    baseline_of: Tensor  # [n] those with an equal number are compared
    each: Tensor  # [K] turns of each trajectory


def turns_of(groups: Sequence[RolloutGroup], judged: Tensor, section: AlgorithmSection) -> RewardedTurns:
    """The last turn of a trajectory has what earlier turns leave of its reward, and of what shaping made of that.

    Sums are in float64, so that equal rewards and returns stay equal in float32; ``judged`` [K] is taken where shaping
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
    rewards, last = torch.tensor(own, dtype=torch.float64) * section.reward_scale, each.cumsum(0) - 1
    trajectory_of = torch.repeat_interleave(torch.arange(len(each)), each)
    left = judged - segment_sum(rewards.index_fill(0, last, 0.0), trajectory_of, len(each))
    as_given = judged == torch.tensor([one.reward for one in trajectories]) * section.reward_scale
    rewards[last] = torch.where(as_given & (each > 1), rewards[last], left)
    if section.turn_compared == "returns":
        rewards = discounted_sum(rewards, each, torch.tensor([section.gamma_turn], dtype=torch.float64))
    return RewardedTurns(
        compared=rewards.float(),
        lengths=torch.tensor([len(turn.logprobs) for turn in turns]),
        in_rows=torch.from_numpy(np.lexsort((np.array(numbers), trajectory_of.numpy())).argsort()),
        trajectory_of=trajectory_of,
        baseline_of=_BASELINES[section.turn_baseline](groups, each),
        each=each,
    )


def states_of(groups: Sequence[RolloutGroup]) -> Tensor:
    """The number of the state that each turn began from, [n] int64: turns of a group with an equal one are compared by
    ``turn_baseline=state``, and turns of two groups have none in common."""
    numbers: dict[tuple[int, str | bytes], int] = {}
    states = ((place, state) for place, g in enumerate(groups) for one in g.trajectories for state in _states(one))
    return torch.tensor([numbers.setdefault(state, len(numbers)) for state in states])


def shared_states(groups: Sequence[RolloutGroup]) -> float:
    """The share of turns that began from the state of another turn of their group."""
    states = states_of(groups)
    return float((states.bincount()[states] > 1).double().mean())


_known: WeakKeyDictionary[Trajectory, list[str | bytes]] = WeakKeyDictionary()


def _states(one: Trajectory) -> list[str | bytes]:
    """As `_hashed`, once: a step asks which groups teach, how many states are shared, and for advantages."""
    if (found := _known.get(one)) is None:
        found = _known[one] = _hashed(one)
    return found


def _hashed(one: Trajectory) -> list[str | bytes]:
    """Of each turn, the name that its environment gave, or 128 bits of BLAKE2b of the tokens that were read since the
    last sampled one before it, or of its whole context where that goes on from no turn."""
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
    """Of the first tokens up to each of the ascending ``ends`` that there is."""
    found, start, sum_so_far = {}, 0, hashlib.blake2b(digest_size=16)
    for end in ends:
        if end <= len(tokens):
            sum_so_far.update(tokens[start:end].tobytes())
            found[end], start = sum_so_far.digest(), end
    return found


def _by_group(groups: Sequence[RolloutGroup], each: Tensor) -> Tensor:
    return group_ids(groups).repeat_interleave(each)


def _by_index(groups: Sequence[RolloutGroup], each: Tensor) -> Tensor:
    index = torch.arange(int(each.sum())) - (each.cumsum(0) - each).repeat_interleave(each)
    return _by_group(groups, each) * int(each.max()) + index


_BASELINES: Mapping[str, Callable[[Sequence[RolloutGroup], Tensor], Tensor]] = {
    "all": _by_group,
    "index": _by_index,
    "state": lambda groups, _: states_of(groups),
}


def group_ids(groups: Sequence[RolloutGroup]) -> Tensor:
    """The group of each trajectory, [K]."""
    return torch.repeat_interleave(torch.arange(len(groups)), torch.tensor([len(g.rewards) for g in groups]))


def nums_sampled(groups: Sequence[RolloutGroup]) -> Tensor:
    """Sampled tokens of each trajectory, [K]."""
    return torch.tensor([one.num_sampled for g in groups for one in g.trajectories])


def truncated(groups: Sequence[RolloutGroup]) -> Tensor:
    """Which trajectories did not end by themselves, [K] bool."""
    return torch.tensor([one.stop != "done" for g in groups for one in g.trajectories])
