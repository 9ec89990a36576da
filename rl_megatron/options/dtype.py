"""``learner.dtype``: the precision of parameters, gradients and activations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rl_megatron.options.option import BYTES, Dtype, Keywords, Option, Rank, Terms
from rl_megatron.section import Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


class DtypeKeys(Section):
    """The key of `Precision`."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of parameters and activations; the optimizer keeps float32."""


class Precision(Option):
    """Keeps parameters and activations in ``learner.dtype``; accumulates gradients and chooses experts in float32."""

    keys = DtypeKeys

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """The dtypes of the model, of its stages' messages, of the router and of the optimizer."""
        dtype, half = Dtype(learner.dtype), learner.dtype == "bfloat16"
        router = {"moe_router_dtype": "fp32"} if shape.num_experts else {}
        return Keywords(
            model={"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": half, **router},
            ddp={"grad_reduce_in_fp32": True},
            optimizer={"params_dtype": dtype, "bf16": half},
        )

    def memory(self, learner: LearnerSection, shape: ModelShape, rank: Rank, terms: Terms) -> Terms:
        """Bytes of parameters, of float32 gradients, and of the activations of one micro-batch."""
        size, count = BYTES[learner.dtype], rank.parameters.both
        new = {"parameters": count * size, "gradients": count * 4, "activations": sum(rank.kept) * size}
        return {**terms, **{name: float(held) for name, held in new.items()}}
