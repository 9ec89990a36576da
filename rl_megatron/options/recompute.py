"""``learner.recompute_layers``: recomputes activations in the backward pass (arXiv:1604.06174)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_megatron.options.option import BYTES, Keywords, Option, Rank, Terms
from rl_megatron.section import Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


class RecomputeKeys(Section):
    """The key of `Recompute`."""

    recompute_layers: bool = False
    """Whether to recompute every layer's activations in the backward pass."""


class Recompute(Option):
    """Recomputes each whole layer from its input."""

    keys = RecomputeKeys

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """Full recomputation, in groups of one layer."""
        if not learner.recompute_layers:
            return Keywords()
        return Keywords(
            model={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        )

    def memory(self, learner: LearnerSection, shape: ModelShape, rank: Rank, terms: Terms) -> Terms:
        """Bytes of activations if each layer keeps only its input."""
        if not learner.recompute_layers:
            return terms
        return {**terms, "activations": sum(rank.inputs) * BYTES[learner.dtype]}
