"""``learner.tp``: tensor parallelism, which shards a layer's matrices over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_megatron.options.option import Keywords, Option
from rl_megatron.section import Positive, Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


class TensorKeys(Section):
    """The key of `TensorParallel`."""

    tp: Positive = 1
    """Tensor-parallel degree; above 1 it also turns on sequence parallelism."""


class TensorParallel(Option):
    """Tensor parallelism, always with sequence parallelism, which megatron-core needs to train experts."""

    keys = TensorKeys

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """The degree, and sequence parallelism if it is above 1."""
        return Keywords(model={"tensor_model_parallel_size": learner.tp, "sequence_parallel": learner.tp > 1})
