"""The ``algorithm.kl`` section: the KL of the policy to its reference, or to its teachers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from rl_megatron.config.sections.teachers import TeacherSection
from rl_megatron.section import (
    EntryName,
    Fraction,
    NonNegativeFloat,
    Positive,
    PositiveFraction,
    Section,
)


class KLSection(Section):
    """KL of the policy to a reference; ``coefficient=0`` is off and loads no reference."""

    coefficient: NonNegativeFloat = 0.0
    """Weight of the KL."""
    placement: Literal["loss", "token_reward", "completion_reward"] = "loss"
    """Add the KL to the loss, or subtract it from each token's reward, or from the completion's."""
    estimator: Literal["k1", "k2", "k3", "abs", "top_k"] = "k3"
    """Estimator of the KL at a sampled token (docs/algorithms.md); top_k: no estimate but a divergence over the
    reference's most probable tokens and one bucket of all others (docs/distillation.md)."""
    top_k: Positive = 64
    """estimator=top_k: how many tokens the reference names at each position; all, where it has no more."""
    beta: Fraction = 0.5
    """estimator=top_k: 0 is KL(reference‖policy), 1 is KL(policy‖reference); between them, the generalised
    Jensen-Shannon divergence."""
    importance_weighted: bool = True
    """placement=loss: weight each token by pi / pi_rollout, so that the expected gradient of k1, k2 and k3 is that of
    the KL (docs/algorithms.md); false: all tokens weigh the same, as in DeepSeekMath's k3."""
    reference: Path | None = None
    """Hugging Face folder of the reference; null: the policy at the start of reinforcement learning."""
    follow_rate: PositiveFraction | None = None
    """The reference follows the policy: after each ``follow_every`` steps this share of its weights is the policy's, so
    that it is a moving average; 1 puts the policy in its place. null: it is frozen."""
    follow_every: Positive = 1
    """Steps from one to the next."""
    reset_moments: bool = False
    """follow_rate=1: whether the policy's optimizer begins again, moments and counts of steps at 0, each time the
    policy takes the reference's place (ProRL)."""
    teachers: Mapping[EntryName, TeacherSection] = Field(default_factory=dict)

    @property
    def has_teacher(self) -> bool:
        """Whether another model than the policy as training begins judges, from which alone nothing is learnt."""
        return bool(self.teachers) or self.reference is not None

    @field_validator("estimator", mode="before")
    @classmethod
    def _one_name(cls, given: object) -> object:
        if given == "mse":
            raise ValueError("algorithm.kl.estimator=mse has gone: it was k2 under a second name; set k2")
        return given
