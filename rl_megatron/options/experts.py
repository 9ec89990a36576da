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
    """Its keys."""

    ep: Positive = 1
    """Expert-parallel degree."""
    etp: Positive | None = None
    """Tensor-parallel degree inside an expert; null: tp if ep=1, else 1."""


class ExpertParallel(Option):
    """Experts are spread, and cut, over the ranks of one pipeline stage."""

    keys = ExpertKeys

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """Degrees that megatron-core 0.16.1 refuses late or gets silently wrong."""
        d = learner.dims
        inner = d.tp * d.cp * d.dp
        if inner % (d.ep * d.etp):
            yield (
                f"learner: ep*etp = {d.ep}*{d.etp} = {d.ep * d.etp} does not divide "
                f"tp*cp*dp = {d.tp}*{d.cp}*{d.dp} = {inner}; "
                f"leave learner.dp out or set it so that {d.ep * d.etp} divides the product"
            )
        if d.ep == 1 and d.etp != d.tp:
            yield (
                f"learner.etp={d.etp} with learner.tp={d.tp} and learner.ep=1 lets replicated experts drift apart "
                f"silently; set learner.etp={d.tp} (or leave it out), or learner.ep > 1"
            )
        if shape is not None and shape.expert_bias and d.etp > 1:
            yield f"its experts are spread by ep, not cut: learner.etp={d.etp} is refused; use etp=1, ep=tp"

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """Both degrees."""
        d = learner.dims
        return Keywords(model={"expert_model_parallel_size": d.ep, "expert_tensor_parallel_size": d.etp})
