"""Turns off the load balancing of experts, so that the router learns from the loss alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_megatron.options.option import Keywords, Option

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


class Balance(Option):
    """Sets no auxiliary loss, and keeps the routers' selection biases as the checkpoint has them."""

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """An update rate of 0 for selection biases, which megatron-core would change at each step."""
        if not shape.num_experts:
            return Keywords()
        still = {"moe_router_bias_update_rate": 0.0} if shape.router.selection_bias else {}
        return Keywords(model={"moe_router_load_balancing_type": "none", **still})
