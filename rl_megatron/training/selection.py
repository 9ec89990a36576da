"""Selects the completions and the tokens of a batch that an update trains on, and how many sequences are packed as a
unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_megatron.algorithms.corrections import second_moment_mask
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.config.sections.tokens import TokensSection
from rl_megatron.data.packing import tokens_of_part
from rl_megatron.observability.recorder import Row
from rl_megatron.training.credit.shaping import Rewards
from rl_megatron.training.measures import Measured
from rl_megatron.types import RolloutGroup, Samples

_TRAINED = ("top_entropy", "second_moment")  # the tokens that are chosen are those that are trained on

Chosen = tuple[Sequence[RolloutGroup], Rewards, Row]
"""Groups, the rewards of their completions, and metrics of the selection."""


@dataclass(frozen=True, slots=True)
class Selection:
    """``choose`` selects from groups and rewards; ``unit`` neighbouring sequences are packed together."""

    choose: Callable[[Sequence[RolloutGroup], Rewards], Chosen]
    unit: int


def selection_of(row: AlgorithmSection) -> Selection:
    """Preference pairs for a preference loss, else all completions."""
    return Selection(preference_pairs, 2) if row.pairs else Selection(every_completion, 1)


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


def top_entropy(entropy: Tensor, share: float) -> Tensor:
    """The tokens of the ``share`` of greatest entropy, rounded up, [n] bool; with those that equal the least of them
    (arXiv:2506.01939, eq. 6)."""
    num = math.ceil(share * len(entropy))
    return entropy >= entropy.topk(num).values[-1]


def covariances(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Each token's term of the covariance of log-prob and advantage, [n] float64 (arXiv:2505.22617, eq. 10)."""
    logprobs, advantages = logprobs.double(), advantages.double()
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def drawn_between(values: Tensor, share: float, low: float, high: float, generator: torch.Generator) -> Tensor:
    """``share`` of all tokens, drawn from those whose value is in low .. high, [n] bool: Clip-Cov."""
    (candidates,) = torch.where((values >= low) & (values <= high))
    order = torch.randperm(len(candidates), generator=generator)
    return _at(candidates[order[: _num(share, len(values))]], len(values))


def greatest(values: Tensor, share: float) -> Tensor:
    """Exactly ``share`` of the tokens, those of greatest value, the first of equal ones, [n] bool: KL-Cov."""
    order = values.argsort(descending=True, stable=True)
    return _at(order[: _num(share, len(values))], len(values))


def _num(share: float, count: int) -> int:
    """Rounded down, but one at least, as in the code of the paper of both."""
    return max(int(share * count), 1)


def _at(places: Tensor, count: int) -> Tensor:
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[places] = True
    return chosen


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """Chooses tokens of each minibatch by scores [N] of the policy at the start of the update, on the controller: the
    same tokens for every layout."""

    section: TokensSection
    logprobs: Tensor
    entropy: Tensor | None
    generator: torch.Generator
    shares: list[float] = field(default_factory=list)  # of the tokens, by minibatch

    def __call__(self, samples: Samples, part: NDArray[np.int64]) -> Samples:
        """For a minibatch of the sequences ``part``: without advantages where no loss shall be, or with weights of the
        KL to the old policy."""
        (places,) = torch.where(tokens_of_part(samples, part))
        if not len(places):
            return samples
        chosen = self._chosen(samples, places)
        self.shares.append(float(chosen.double().mean()))
        if self.section.choose == "kl_cov":
            weights = torch.zeros_like(samples.advantages)
            weights[places[chosen]] = self.section.kl_coefficient
            return replace(samples, old_kl_weights=weights)
        advantages = samples.advantages.clone()
        advantages[places[~chosen if self.section.choose in _TRAINED else chosen]] = 0.0
        return replace(samples, advantages=advantages)

    def _chosen(self, samples: Samples, places: Tensor) -> Tensor:
        section = self.section
        if section.choose == "second_moment":
            return second_moment_mask((self.logprobs - samples.rollout_logprobs)[places], threshold=section.limit)
        if section.choose == "top_entropy":
            assert self.entropy is not None
            return top_entropy(self.entropy[places], section.share)
        values = covariances(self.logprobs[places], samples.advantages[places])
        if section.choose == "kl_cov":
            return greatest(values, section.share)
        return drawn_between(values, section.share, section.low, section.high, self.generator)

    def row(self) -> Row:
        """The share of tokens that were chosen, the mean over minibatches."""
        return {"tokens/chosen_fraction": sum(self.shares) / max(len(self.shares), 1)}


def token_choice(section: TokensSection, found: Measured, seed: int) -> TokenChoice | None:
    """The choice of the section, with the scores that were ``found``; None for all tokens."""
    if section.choose == "all":
        return None
    assert found.current is not None
    return TokenChoice(section, found.current, found.entropy, torch.Generator().manual_seed(seed))
