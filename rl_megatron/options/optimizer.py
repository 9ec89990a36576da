"""``learner.optimizer``: AdamW, whose state data-parallel ranks shard (arXiv:1910.02054)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_megatron.options.option import Keywords, Option, Rank, Terms
from rl_megatron.section import Fraction, NonNegativeFloat, PositiveFloat, Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape

_MOMENTS = 8  # bytes of both


class OptimizerSection(Section):
    """AdamW, by megatron-core's OptimizerConfig."""

    beta1: Fraction = 0.9
    """Decay of the moving mean of gradients."""
    beta2: Fraction = 0.95
    """Decay of the moving mean of squared gradients."""
    eps: PositiveFloat = 1e-8
    """Constant added to the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    clip_grad: NonNegativeFloat = 1.0
    """Maximum global norm of the gradient; 0 does not clip."""
    distributed: bool = True
    """Whether data-parallel ranks shard the optimizer's state."""


class OptimizerKeys(Section):
    """The section of keys of `Optimizer`."""

    optimizer: OptimizerSection = OptimizerSection()


class Optimizer(Option):
    """AdamW over float32 copies of the parameters. The learner sets the learning rate before each step."""

    keys = OptimizerKeys

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """AdamW's settings."""
        section = learner.optimizer
        return Keywords(
            ddp={"use_distributed_optimizer": section.distributed},
            optimizer={
                "optimizer": "adam",
                "lr": 0.0,
                "adam_beta1": section.beta1,
                "adam_beta2": section.beta2,
                "adam_eps": section.eps,
                "weight_decay": section.weight_decay,
                "clip_grad": section.clip_grad,
                "use_distributed_optimizer": section.distributed,
            },
        )

    def memory(self, learner: LearnerSection, shape: ModelShape, rank: Rank, terms: Terms) -> Terms:
        """Bytes of both moments and, with bfloat16 parameters, of float32 copies; sharded if ``distributed``."""
        each, d, held = _MOMENTS + (4 if learner.dtype == "bfloat16" else 0), learner.dims, rank.trained
        if not learner.optimizer.distributed:
            return {**terms, "optimizer": float(held.both * each)}
        shared = held.dense / (d.dp * d.cp) + held.experts * d.etp * d.ep / (d.tp * d.cp * d.dp)
        return {**terms, "optimizer": each * shared}
