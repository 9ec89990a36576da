"""``learner.cp``, ``dp``: ranks that hold the same weights and compute parts of sequences, or other sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.options.option import Keywords, Option
from rl_megatron.section import Positive, Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


class ReplicaKeys(Section):
    """The keys of `Replicas`."""

    cp: Positive = 1
    """Context-parallel degree."""
    dp: Positive | None = None
    """Data-parallel degree; null: the smallest for which ep*etp divides tp*cp*dp."""


class Replicas(Option):
    """Context and data parallelism. megatron-core derives the data-parallel degree from the world size."""

    keys = ReplicaKeys

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """Heads of delta nets that the ranks cannot share out."""
        if shape is None or shape.delta is None or learner.cp == 1:
            return
        ranks, heads = learner.tp * learner.cp, shape.delta.key_heads
        if heads % ranks:
            yield (
                f"learner.cp={learner.cp} with learner.tp={learner.tp}: ranks exchange positions for heads, and "
                f"{ranks} do not divide the {heads} key heads of the model's delta nets; lower one of them"
            )

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """The context-parallel degree."""
        return Keywords(model={"context_parallel_size": learner.cp})
