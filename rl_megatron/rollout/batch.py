"""Prompts drawn for a run, what a source answers for each, and the batch of a step, which is made of such answers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rl_megatron.json_text import ForeignText
from rl_megatron.types import Completion, Prompt, RolloutGroup, Scored

Reason = Literal[
    "equal_rewards",
    "zero_advantages",
    "reward_error",
    "poison",
    "environment_error",
    "long_prompt",
    "nothing_sampled",
]
"""Why a prompt that was drawn is not trained on."""
UNTAUGHT: Collection[Reason] = ("equal_rewards", "zero_advantages")
"""Of a group that would give no gradient: its rewards, or the advantages that the user's own function gives it."""

POISON_SHARE = 0.01
"""More poison than this share of prompts, and than one, is an engine's fault or that of the data, and ends the run."""


def reason_of(parts: Iterable[tuple[Reason | None, ForeignText]]) -> tuple[Reason, ForeignText]:
    """Why a group is left out, with the problem, of those of its parts: poison if one of them is, since the prompt must
    not be asked again; else the first reason."""
    reasons = [(reason, problem) for reason, problem in parts if reason is not None]
    return min(reasons, key=lambda one: one[0] != "poison")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A prompt to sample a group of; its seeds are functions of ``batch``, ``time`` and the prompt's id."""

    ordinal: int  # how many prompts the run drew before it
    prompt: Prompt
    batch: int  # 1 + ordinal // rollout.prompts_per_step
    time: int = 1  # counts how often its ``batch`` drew the prompt, as it does where an epoch ends
    begun: tuple[Completion | None, ...] = ()  # what was sampled of each completion before a resume

    def name(self, kind: str = "") -> str:
        """The name in requests, of ``kind`` where it has several; with the prompt's id seeds depend on it."""
        again = f", time {self.time}" if self.time > 1 else ""
        return f"step {self.batch}{kind}{again}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One prompt's group, and what was scored of it."""

    group: RolloutGroup | None  # None: it is left out, for ``reason``
    reason: Reason | None = None
    problem: ForeignText = ""  # what the engine said of a prompt that is poison
    rewards: tuple[float, ...] = ()  # of its completions, also where it is left out; none if one of them failed
    scored: tuple[Scored, ...] = ()
    greedy: tuple[Scored, ...] = ()  # of the greedy completion, if there is one
    demonstrated: tuple[Scored, ...] = ()  # of the demonstration, if there is one
    left_out_tokens: int = 0  # that were sampled and are in no group: it, or some of its trajectories, is left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A prompt that was drawn and is not trained on yet."""

    drawn: Drawn
    birth: int  # the version served when it was drawn
    due: int  # the last step that may train on it
    answered: Answered | None = None  # once its group is scored

    @property
    def kept(self) -> bool:
        """Whether its group may be trained on."""
        return self.answered is not None and self.answered.group is not None

    @property
    def key(self) -> tuple[int, int]:
        """The order in which steps take groups."""
        return self.due, self.drawn.ordinal


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """The groups of one step, and counts of what was scored, failed or left out."""

    groups: tuple[RolloutGroup, ...] = ()
    num_completions: int = 0  # scored, including those of groups that are left out
    reward_sum: float = 0.0  # of these
    num_tokens: int = 0  # sampled, including those of groups and trajectories that are left out
    reward_errors: int = 0  # completions whose reward raised, timed out or was not finite
    late_rewards: int = 0  # those that timed out
    dropped_groups: int = 0  # groups left out for another reason than the next
    filtered_groups: int = 0  # groups left out because they would give no gradient
    part_sums: Mapping[str, float] = field(default_factory=dict)  # of each part of a weighted reward, unweighted
    part_counts: Mapping[str, int] = field(default_factory=dict)  # completions in these: those of finite parts alone
    places: tuple[Waiting, ...] = ()  # of all these, if they were drawn

    @classmethod
    def of(cls, answered: Sequence[Answered]) -> RolloutBatch:
        """The batch of these answers; its groups are in their order."""
        rewards = [reward for one in answered for reward in one.rewards]
        scored = [scored for one in answered for scored in (*one.scored, *one.greedy, *one.demonstrated)]
        parts = [s.parts for one in answered if one.rewards for s in one.scored if s.error is None and s.parts]
        names = dict.fromkeys(name for one in parts for name in one)  # sources have their own rewards
        filtered = sum(one.reason in UNTAUGHT for one in answered)
        return cls(
            groups=(groups := tuple(one.group for one in answered if one.group is not None)),
            num_completions=len(rewards),
            reward_sum=math.fsum(rewards),
            num_tokens=sum(map(sampled_tokens, groups)) + sum(one.left_out_tokens for one in answered),
            reward_errors=sum(one.error is not None for one in scored),
            late_rewards=sum(one.late for one in scored),
            dropped_groups=len(answered) - len(groups) - filtered,
            filtered_groups=filtered,
            part_sums={name: math.fsum(one[name] for one in parts if name in one) for name in names},
            part_counts={name: sum(name in one for one in parts) for name in names},
        )

    def part_means(self) -> dict[str, float]:
        """``reward/part/<name>`` of each part, over the completions of ``reward/sampled_mean`` whose reward has it."""
        return {f"reward/part/{name}": total / self.part_counts[name] for name, total in self.part_sums.items()}


def sampled_tokens(group: RolloutGroup) -> int:
    """How many were sampled, those of its greedy completion too."""
    sampled = sum(one.num_sampled for one in group.trajectories)
    return sampled + (0 if group.greedy is None else sampled_tokens(group.greedy))


class GroupSource(Protocol):
    """Samples and scores the completions that a job trains on."""

    async def groups(self, drawn: Sequence[Drawn]) -> Sequence[Answered]:
        """A group of each prompt, in their order, all requested together; it goes on from what was ``begun``."""
        ...

    async def interrupt(self) -> None:
        """Have `so_far` know every token that was sampled up to now. Sampling goes on."""
        ...

    def so_far(self, drawn: Drawn) -> tuple[Completion | None, ...]:
        """What is known of each completion of a group that is being sampled or scored; empty if nothing is."""
        ...
