"""``learner.fusion``: TransformerEngine's kernels in place of several operations of megatron-core's routers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.errors import ConfigError
from rl_megatron.options.implementation import uses_transformer_engine
from rl_megatron.options.option import Keywords, Option
from rl_megatron.section import Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


class FusionSection(Section):
    """Kernels of TransformerEngine for what happens between layers of experts, on GPUs. Not measured."""

    router: bool = False
    """Whether one kernel computes scores, the best experts and their weights (TransformerEngine 2.7 or later). Routes
    can be neither replayed nor read then."""


class FusionKeys(Section):
    """The section of keys of `Fusion`."""

    fusion: FusionSection = FusionSection()


class Fusion(Option):
    """Megatron-core's ``moe_router_fusion`` and ``moe_permute_fusion``, for any layers."""

    keys = FusionKeys

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """CPUs, and models without experts."""
        if not learner.fusion.router:
            return
        if learner.device == "cpu":
            yield "learner.fusion.router=true with learner.device=cpu: its kernels need GPUs; leave it out"
        if shape is not None and not shape.num_experts:
            yield f"learner.fusion.router=true: model_type={shape.family!r} has no experts; leave it out"

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """What is fused: with TransformerEngine's layers also how tokens are sorted by expert and back.

        Raises ConfigError for a fused router if TransformerEngine is not installed.
        """
        if not shape.num_experts:
            return Keywords()
        if learner.fusion.router and importlib.util.find_spec("transformer_engine") is None:
            raise ConfigError(
                "learner.fusion.router=true: TransformerEngine is not installed here; install it, or leave it out"
            )
        router = {"moe_router_fusion": True} if learner.fusion.router else {}
        return Keywords(model={"moe_permute_fusion": uses_transformer_engine(learner, shape), **router})
