"""``learner.gradient_dtype``: the precision in which gradients are accumulated and reduced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from rl_megatron.options.option import BYTES, Keywords, Option, Rank, Terms
from rl_megatron.section import Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


class GradientKeys(Section):
    """The key of `Gradients`."""

    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are added up over micro-batches and ranks. bfloat16 halves their bytes, in memory and
    over the network; its rounding grows with the number of micro-batches."""


class Gradients(Option):
    """Keeps gradients in ``learner.gradient_dtype``. The optimizer steps with float32 copies of its share, except
    TransformerEngine's Adam where it keeps moments in fewer bits: that reads any dtype."""

    keys = GradientKeys

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """bfloat16 for parameters in float32, whose gradients megatron-core then keeps in float32."""
        if learner.gradient_dtype == "bfloat16" and learner.dtype == "float32":
            yield (
                "learner.gradient_dtype=bfloat16 with learner.dtype=float32 would have no effect: gradients are as "
                "precise as parameters, or more; set learner.dtype=bfloat16, or leave it out"
            )

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """Whether gradients are in float32; else they are in the dtype of parameters."""
        return Keywords(ddp={"grad_reduce_in_fp32": learner.gradient_dtype == "float32"})

    def memory(self, learner: LearnerSection, shape: ModelShape, rank: Rank, terms: Terms) -> Terms:
        """Bytes of the gradients of a rank's parameters, and of the optimizer's copies of those that it steps."""
        copied = learner.gradient_dtype != "float32" and learner.optimizer.moments_dtype == "float32"
        copies = rank.stepped(learner) * BYTES["float32"] if copied else 0.0
        gradients = float(rank.trained.both * BYTES[learner.gradient_dtype])
        return {**terms, "gradients": gradients, "step": terms["step"] + copies}
