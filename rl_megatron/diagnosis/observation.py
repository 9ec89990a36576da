"""What an engine sampled and said of it, beside what the learner says of the same tokens.

Letters: N positions of all sequences, n of them sampled, m of these with the learner's whole distribution,
V vocabulary, L layers with experts, k experts a token. Log-probs are nats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_megatron.algorithms.segments import sequence_ids
from rl_megatron.types import Samples

MOST = 1.0  # nats that a token counts for at most: a few tokens must not hide what the others say


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Sequences with the engine's log-probs as ``rollout_logprobs``, and the learner's of the same tokens.

    ``temperature`` is the learner's: ``learner`` are its log-probs there, ``logits`` are before it.
    """

    samples: Samples
    learner: Tensor  # [N] float32
    detailed: Tensor  # [N] bool, part of the samples' mask
    logits: Tensor  # [m, V] float32, in the order of the detailed positions
    temperature: float
    learner_routes: Tensor | None = None  # [N, L, k], as the samples' routes, which are the engine's
    replayed: Tensor | None = None  # [N] float32, as ``learner``, with the engine's routes

    @property
    def engine(self) -> Tensor:
        """[N] float32."""
        return self.samples.rollout_logprobs

    @property
    def gaps(self) -> Tensor:
        """Engine less learner, [n] double."""
        return (self.engine.double() - self.learner.double())[self.samples.mask]

    @property
    def owners(self) -> Tensor:
        """Which sequence each sampled token belongs to, [n]."""
        return sequence_ids(self.samples.cu_seqlens)[self.samples.mask]


def size(gaps: Tensor) -> float:
    """Mean of |gap| with each token at most 1 nat; what is not a number counts as 1; 0 of nothing."""
    if not len(gaps):
        return 0.0
    return float(torch.nan_to_num(gaps.abs().double(), nan=MOST).clamp(max=MOST).mean())


def shown(gaps: Tensor) -> str:
    """Gaps in words."""
    absolute = gaps.abs()
    mean, median, largest = float(absolute.mean()), float(absolute.median()), float(absolute.max())
    return f"mean |d| {mean:.2g}, median {median:.2g}, max {largest:.2g} nats"


def shifted(observation: Observation, by: int) -> float:
    """Size of the gaps where the engine's log-prob of token t is held against the learner's of token t - ``by``.

    Tokens without such a neighbour in their sequence are left out.
    """
    engine, learner = (x[observation.samples.mask] for x in (observation.engine, observation.learner))
    owners = observation.owners
    one, other = (slice(by, None), slice(None, -by)) if by > 0 else (slice(None, by), slice(-by, None))
    same = owners[one] == owners[other]
    return size((engine[one] - learner[other])[same])
