"""``learner.router``: losses and bias updates that balance the load of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_megatron.feature import Curve, Feature
from rl_megatron.rules import Above, Excludes, On, Rule
from rl_megatron.section import NonNegativeFloat, Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection


_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss")


class BalanceKeys(Section):
    """The feature's keys of routers."""

    aux_loss: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing loss (arXiv:2101.03961) of each micro-batch."""
    seq_aux_loss: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing loss of each sequence (arXiv:2412.19437)."""
    global_aux_loss: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing loss with the load of all ranks and of the optimizer step's micro-batches so
    far (arXiv:2501.11873)."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of the mean squared logsumexp of a router's logits (arXiv:2202.08906)."""
    bias_update_rate: NonNegativeFloat = 0.0
    """Amount by which each optimizer step moves an expert's selection bias against its load (arXiv:2408.15664)."""

    @property
    def losses(self) -> dict[str, float]:
        """Coefficients above 0, by key."""
        return {kind: coefficient for kind in _LOSSES if (coefficient := getattr(self, kind))}


def router_section(learner: LearnerSection) -> BalanceKeys:
    """Returns the feature's keys of the learner's section."""
    assert isinstance(learner.router, BalanceKeys)
    return learner.router


def _active(learner: LearnerSection) -> bool:
    keys = router_section(learner)
    return bool(keys.losses or keys.bias_update_rate)


_BALANCED = [On(f"learner.router.{key}", Above(0)) for key in BalanceKeys.model_fields]
# fmt: off
_RULES: Sequence[Rule] = (
    *(Excludes(one=one, other=On("learner.router.frozen", True), why="a frozen router cannot be balanced",
               fix="set learner.router.frozen=false, or leave it out") for one in _BALANCED),
    *(Excludes(one=one, other=On("shape.num_experts", 0, "shape.family"), where="shape", why="the model has no experts",
               fix="leave it out") for one in _BALANCED),
    Excludes(one=On("learner.router.bias_update_rate", Above(0)), other=On("shape.router.selection_bias", False,
             "shape.family"), where="shape", why="its routers have no selection bias",
             fix="set it to 0, and balance by learner.router.global_aux_loss"),
)
# fmt: on

FEATURE = Feature(
    name="router_balance",
    active=_active,
    keys={"learner.router": BalanceKeys},
    may_change=frozenset(f"learner.router.{key}" for key in BalanceKeys.model_fields),
    learner_rules=_RULES,
    learner="rl_megatron.features.router_balance.learner:Balance",
    metrics=(
        ("moe/aux_loss", "", "load-balancing loss of a micro-batch without its coefficient, mean over layers; 1 is "
         "balanced", Curve("Health", "Expert load: loss of a micro-batch")),
        ("moe/seq_aux_loss", "", "the same loss of a sequence; these four only with a coefficient in learner.router",
         Curve("Health", "Expert load: loss of a sequence")),
        ("moe/global_aux_loss", "", "the same loss with the load of all ranks and of the optimizer step's "
         "micro-batches so far", Curve("Health", "Expert load: loss of all ranks")),
        ("moe/z_loss", "", "squared logsumexp of the routers' logits, mean over tokens and layers",
         Curve("Health", "Routers' z-loss")),
    ),
    recorded={f"moe/{key}": (On(f"learner.router.{key}", Above(0)), "set a coefficient") for key in _LOSSES},
)  # fmt: skip
