"""How the two answers of a pair are compared: keys of ``algorithm.preference``, and of ``dpo``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from rl_megatron.section import NUMBER, NonNegativeFloat, OwnCode, PositiveFloat, Section

PairLossName = Literal["dpo", "ipo", "hinge", "orpo"]
PAIR_LOSS_NAMES: tuple[str, ...] = get_args(PairLossName)
HAS_TARGET = ("dpo",)
"""Losses of the table that read ``target_margin``."""
OF_PROBABILITIES = ("orpo",)
"""Losses of the table that read answers' mean probabilities, and no ratios to a reference."""


class PreferenceSection(Section):
    """Training on pairs of the group's completions in place of the policy gradient; ``beta=null`` is off."""

    key: ClassVar[str] = "algorithm.preference"
    """The section's name in messages."""
    loss: PairLossName | OwnCode = "dpo"
    """The loss of a pair as a function of its answers' log pi/ref (docs/preferences.md); ``package.module:name`` is a
    function of your own (docs/own_algorithms.md)."""
    beta: PositiveFloat | None = None
    """Train on the best and the worst completion of each group, by a loss with this beta, in place of the policy
    gradient; null: the policy gradient."""
    per_token: bool = False
    """Whether an answer's log pi/ref is the mean over its tokens, not their sum (length-normalised DPO,
    arXiv:2411.15124, section 5.1); beta is larger then, 5 in that work."""
    reference_free: bool = False
    """Whether an answer's log pi stands in place of its log pi/ref (SimPO, ORPO), and no frozen model is loaded."""
    target_margin: NonNegativeFloat = 0.0
    """loss=dpo: subtracted from beta times the margin (SimPO's gamma)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5, allow_inf_nan=False), NUMBER] = 0.0
    """Probability that a pair's order is wrong: the loss is its mean over both orders (conservative DPO)."""
    nll: NonNegativeFloat = 0.0
    """Weight of -log pi of the better answer, the mean over its tokens, beside the loss of the pair."""

    @model_validator(mode="after")
    def _of_loss(self) -> Self:
        given, problems = f"{self.key}.loss={self.loss}", list[str]()
        if self.target_margin and self.loss not in HAS_TARGET:
            problems.append(
                f"{self.key}.target_margin={self.target_margin:g}: {given} does not read it; set it to 0, or "
                f"loss={' or '.join(HAS_TARGET)}"
            )
        if self.loss in OF_PROBABILITIES and not (self.per_token and self.reference_free):
            problems.append(
                f"{given} compares the odds of answers' mean probabilities; set {self.key}.per_token=true and "
                "reference_free=true"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self
