"""The ``algorithm.critic`` section: the model or the layer that values states, and its training."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rl_megatron.options.optimizer import OptimizerSection
from rl_megatron.section import Fraction, NonNegative, PositiveFloat, Section


class CriticSection(Section):
    """The values of ``credit=gae``: a second model that is trained, or a layer of the policy."""

    backbone: Literal["own", "policy"] = "own"
    """own: a second model, trained by itself; policy: a value layer on the policy's hidden states, trained with it."""
    coefficient: PositiveFloat = 0.5
    """backbone=policy: weight of the value loss in the policy's loss."""
    path: Path | None = None
    """Initial weights: a Hugging Face folder, of a policy or, with its scores for values, of a reward model; or the
    critic/ folder of a checkpoint, without its optimizer's state; null: those of the policy."""
    learning_rate: PositiveFloat | None = None
    """Learning rate after the warm-up, on the policy's schedule from the first step on; null: train.learning_rate."""
    lam: Fraction | None = None
    """Lambda of the returns that the critic learns; null: algorithm.lam, the advantages' own."""
    clip: PositiveFloat | None = 0.2
    """The value loss clips values to within this of the old values; null does not clip."""
    only_steps: NonNegative = 0
    """Number of first steps that train only the critic (VAPO's value pretraining); warm-up and decay of the policy's
    learning rate begin after them."""
    optimizer: OptimizerSection = OptimizerSection()
    """The critic's optimizer."""
