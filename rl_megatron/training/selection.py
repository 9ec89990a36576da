"""Selects the completions of a batch that an update trains on, and how many sequences are packed as a unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.observability.recorder import Row
from rl_megatron.training.credit import Rewards
from rl_megatron.types import RolloutGroup

Chosen = tuple[Sequence[RolloutGroup], Rewards, Row]
"""Groups, the rewards of their completions, and metrics of the selection."""


@dataclass(frozen=True, slots=True)
class Selection:
    """``choose`` selects from groups and rewards; ``unit`` neighbouring sequences are packed together."""

    choose: Callable[[Sequence[RolloutGroup], Rewards], Chosen]
    unit: int


def selection_of(row: AlgorithmSection) -> Selection:
    """Preference pairs for a preference loss, else all completions."""
    return Selection(every_completion, 1) if row.preference_beta is None else Selection(preference_pairs, 2)


def every_completion(groups: Sequence[RolloutGroup], rewards: Rewards) -> Chosen:
    """Keeps all groups and rewards."""
    return groups, rewards, {}


def preference_pairs(groups: Sequence[RolloutGroup], rewards: Rewards) -> Chosen:
    """Keeps the best and the worst completion, in this order, of every group whose ``rewards`` differ, for DPO."""
    pairs, kept = [], []
    for group, values in zip(groups, rewards.values.split([len(g.rewards) for g in groups]), strict=True):
        of_group = values.tolist()
        best, worst = (of_group.index(choice(of_group)) for choice in (max, min))
        if of_group[best] > of_group[worst]:
            pairs.append(replace(group, trajectories=(group.trajectories[best], group.trajectories[worst])))
            kept += [of_group[best], of_group[worst]]
    return pairs, replace(rewards, values=torch.tensor(kept)), {"preference/pairs": len(pairs)}
