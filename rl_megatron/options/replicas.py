"""``learner.cp``, ``dp``: ranks that hold the same weights, and parts of a sequence or sequences of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_megatron.options.option import Keywords, Option
from rl_megatron.section import Positive, Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


class ReplicaKeys(Section):
    """Its keys."""

    cp: Positive = 1
    """Context-parallel degree."""
    dp: Positive | None = None
    """Data-parallel degree; null: the smallest that ep*etp fits."""


class Replicas(Option):
    """Context and data parallelism. megatron-core takes the latter from the size of the world."""

    keys = ReplicaKeys

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """The context-parallel degree."""
        return Keywords(model={"context_parallel_size": learner.cp})
