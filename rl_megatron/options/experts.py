"""``learner.ep``, ``etp``: experts on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.options.option import Keywords, Option
from rl_megatron.section import Positive, Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


class ExpertKeys(Section):
    """The keys of `ExpertParallel`."""

    ep: Positive = 1
    """Expert-parallel degree."""
    etp: Positive | None = None
    """Tensor-parallel degree of an expert; null: tp if ep=1, else 1."""


class ExpertParallel(Option):
    """Spreads experts over the ranks of a pipeline stage (ep), and shards each expert (etp)."""

    keys = ExpertKeys

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """Degrees that megatron-core 0.16.1 refuses late."""
        d = learner.dims
        inner = d.tp * d.cp * d.dp
        if inner % (d.ep * d.etp):
            yield (
                f"learner: ep*etp = {d.ep}*{d.etp} = {d.ep * d.etp} does not divide "
                f"tp*cp*dp = {d.tp}*{d.cp}*{d.dp} = {inner}; "
                f"leave learner.dp out, or set it so that {d.ep * d.etp} divides the product"
            )
        if shape is not None and (shape.expert_bias or shape.stacked_experts) and d.etp > 1:
            kind = "experts with biases" if shape.expert_bias else "experts of one tensor a layer"
            yield (f"learner.etp={d.etp}: {kind} cannot be sharded, only spread by learner.ep; set learner.etp=1")

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """The expert-parallel degree and the experts' tensor-parallel degree."""
        d = learner.dims
        return Keywords(model={"expert_model_parallel_size": d.ep, "expert_tensor_parallel_size": d.etp})
