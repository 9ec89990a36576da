"""Run a whole optimizer step of a learner on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_megatron.training.measures import Made
from rl_megatron.types import Loss, Samples, SkippedStep

if TYPE_CHECKING:
    from rl_megatron.learner.trained import MegatronLearner


def train_step(
    learner: MegatronLearner,
    micro_batches: Sequence[Samples],
    loss: Loss,
    learning_rate: float,
    *,
    num_tokens: int,
    num_sequences: int,
) -> Made | SkippedStep | None:
    """Of one backward pass; None off the last stage. Every rank calls it."""
    said = learner.backward(micro_batches, loss, num_tokens=num_tokens, num_sequences=num_sequences)
    result = learner.step(learning_rate)
    if isinstance(result, SkippedStep):
        return result
    return None if said is None else Made(said, result)
