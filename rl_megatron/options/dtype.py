"""``learner.dtype``: the precision of parameters and activations."""

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
    """Keeps parameters and activations in ``learner.dtype``; chooses experts in float32."""

    keys = DtypeKeys

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """The dtypes of the model, of its stages' messages, of the router and of the optimizer."""
        dtype, half = Dtype(learner.dtype), learner.dtype == "bfloat16"
        router = {"moe_router_dtype": "fp32"} if shape.num_experts else {}
        return Keywords(
            model={"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": half, **router},
            optimizer={"params_dtype": dtype, "bf16": half},
        )

    def memory(self, learner: LearnerSection, shape: ModelShape, rank: Rank, terms: Terms) -> Terms:
        """Bytes of parameters."""
        return {**terms, "parameters": float(rank.parameters.both * BYTES[learner.dtype])}
