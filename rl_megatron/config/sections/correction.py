"""The ``algorithm.correction`` section: weights of tokens for the gap between engine and learner."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from rl_megatron.section import NonNegativeFloat, PositiveFloat, Section


class CorrectionSection(Section):
    """Weights each loss by pi_old / pi_rollout to correct the gap between engine and learner; ``mode=none`` is off."""

    mode: Literal["none", "truncate", "mask", "band", "reject"] = "none"
    """Clamp the weight (TIS), zero it outside the band (IcePop), keep only what is inside, at weight 1, or drop what
    has a divergence above ``high`` (reject)."""
    level: Literal["token", "sequence", "product", "worst"] = "token"
    """One weight per token, or one per sequence: length-normalised (sequence), or the product over its tokens. Of
    mode=reject a sequence's divergence is the mean over its tokens (sequence), their sum (product) or the greatest of
    them (worst)."""
    low: NonNegativeFloat = 0.0
    """Least weight, as a ratio."""
    high: PositiveFloat = 2.0
    """Greatest weight, as a ratio; mode=reject: greatest divergence, in nats."""
    veto: NonNegativeFloat = 0.0
    """Drop sequences in which a token has a ratio pi_old / pi_rollout below this; 0 is off."""
    off_policy_delta: PositiveFloat | None = None
    """Drop sequences of negative advantage whose mean(log pi_rollout - log pi), in nats, is above this; null is off."""

    @property
    def acts(self) -> bool:
        """Whether any weight can differ from 1."""
        return self.mode != "none" or self.veto > 0 or self.off_policy_delta is not None

    @model_validator(mode="after")
    def _is_in_order(self) -> Self:
        if self.level == "worst" and self.mode not in {"none", "reject"}:
            raise ValueError(
                f"algorithm.correction.level=worst with mode={self.mode}: a weight is of a token or a whole sequence, "
                "and only a divergence of its worst token; set level=token, sequence or product, or mode=reject"
            )
        if self.low > self.high:
            raise ValueError(
                f"algorithm.correction.low={self.low} is above algorithm.correction.high={self.high}; swap them"
            )
        return self
