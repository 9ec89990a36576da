"""``learner.router``: whether routers learn, and what balances the load of their experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.options.option import Keywords, Option
from rl_megatron.section import NonNegativeFloat, Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


class RouterSection(Section):
    """Routers of a mixture of experts. By default they learn from the loss alone, and selection biases do not move."""

    frozen: bool = False
    """Whether routers keep their weights; experts and all else still learn."""
    aux_loss: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing loss (arXiv:2101.03961) of each micro-batch."""
    seq_aux_loss: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing loss of each sequence (arXiv:2412.19437)."""
    global_aux_loss: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing loss whose load is that of all ranks and of the optimizer step's micro-batches
    so far (arXiv:2501.11873)."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of the mean squared logsumexp of a router's logits (arXiv:2202.08906)."""
    bias_update_rate: NonNegativeFloat = 0.0
    """Amount by which each optimizer step moves an expert's selection bias against its load (arXiv:2408.15664)."""

    @property
    def losses(self) -> dict[str, float]:
        """Coefficients above 0, by key."""
        kinds = ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss")
        return {kind: coefficient for kind in kinds if (coefficient := getattr(self, kind))}


class RouterKeys(Section):
    """The section of keys of `Routers`."""

    router: RouterSection = RouterSection()


class Routers(Option):
    """Frozen routers, and what balances load: losses and the update of biases, which are `learner.routers.balance`'s.

    megatron-core's own would be wrong here: it multiplies losses by a number of tokens that nothing divides out again,
    counts padding, takes a packed micro-batch as one sequence, and moves biases in steps that are skipped.
    """

    keys = RouterKeys

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """Keys that would have no effect."""
        router = learner.router
        said = [
            f"learner.router.{key}={str(value).lower()}"
            for key, value in router.model_dump(exclude_defaults=True).items()
        ]
        if router.frozen and len(said) > 1:
            yield f"{' '.join(said)}: a frozen router is not balanced; set learner.router.frozen=false, or no other"
        if shape is None:
            return
        if said and not shape.num_experts:
            yield f"{' '.join(said)}: model_type={shape.family!r} has no experts; leave learner.router out"
        elif router.bias_update_rate and not shape.router.selection_bias:
            yield (
                f"learner.router.bias_update_rate={router.bias_update_rate}: routers of "
                f"model_type={shape.family!r} have no selection bias, nor do engines; set it to 0, and balance by "
                "learner.router.global_aux_loss"
            )

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """Nothing of megatron-core's own: no loss, and an update rate of 0 for selection biases."""
        if not shape.num_experts:
            return Keywords()
        still = {"moe_router_bias_update_rate": 0.0} if shape.router.selection_bias else {}
        return Keywords(model={"moe_router_load_balancing_type": "none", **still})
