"""Which of a batch's completions an update trains on, and how many of them stay together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.observability.recorder import Row
from rl_megatron.training.credit import Rewards
from rl_megatron.types import RolloutGroup

Chosen = tuple[Sequence[RolloutGroup], Rewards, Row]
"""Groups, rewards of their completions, and what a row of metrics says of it."""


@dataclass(frozen=True, slots=True)
class Selection:
    """``choose`` of groups and rewards; ``unit`` sequences that follow one another are packed together."""

    choose: Callable[[Sequence[RolloutGroup], Rewards], Chosen]
    unit: int


def selection_of(row: AlgorithmSection) -> Selection:
    """All completions; pairs, where the loss is of preferences."""
    return Selection(every_completion, 1) if row.preference_beta is None else Selection(preference_pairs, 2)


def every_completion(groups: Sequence[RolloutGroup], rewards: Rewards) -> Chosen:
    """Them as they are."""
    return groups, rewards, {}


def preference_pairs(groups: Sequence[RolloutGroup], rewards: Rewards) -> Chosen:
    """The best and the worst completion of every group whose ``rewards`` differ, in this order: what DPO trains on."""
    pairs, kept = [], []
    for group, values in zip(groups, rewards.values.split([len(g.rewards) for g in groups]), strict=True):
        of_group = values.tolist()
        best, worst = (of_group.index(choice(of_group)) for choice in (max, min))
        if of_group[best] > of_group[worst]:
            pairs.append(replace(group, trajectories=(group.trajectories[best], group.trajectories[worst])))
            kept += [of_group[best], of_group[worst]]
    return pairs, replace(rewards, values=torch.tensor(kept)), {"preference/pairs": len(pairs)}
