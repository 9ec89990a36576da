"""The ``algorithm.correction`` section: weights of tokens for the gap between engine and learner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from rl_megatron.section import EntryName, NonNegativeFloat, PositiveFloat, Section


class CorrectionWeight(Section):
    """One more weight, under a name of yours; a token's loss is multiplied by all of them."""

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
    estimator: Literal["k2", "k3"] = "k3"
    """mode=reject: the divergence of a token, an estimate of KL(pi_rollout‖pi_old)."""
    normalise: bool = False
    """Whether to divide the weights by their mean over the rollout batch: over the tokens that it weighs, or with a
    weight per sequence over their sequences (self-normalised importance sampling)."""
    of: Literal["all", "positive", "negative"] = "all"
    """Weigh every token, or only those of positive or negative advantage; the others have weight 1."""


class CorrectionSection(CorrectionWeight):
    """Weights each loss by pi_old / pi_rollout to correct the gap between engine and learner; ``mode=none`` is off."""

    times: Mapping[EntryName, CorrectionWeight] = Field(default_factory=dict)
    veto: NonNegativeFloat = 0.0
    """Drop sequences in which a token has a ratio pi_old / pi_rollout below this; 0 is off."""
    off_policy_delta: PositiveFloat | None = None
    """Drop sequences of negative advantage whose mean(log pi_rollout - log pi), in nats, is above this; null is off."""

    @property
    def acts(self) -> bool:
        """Whether any weight can differ from 1."""
        return bool(self.weights) or self.veto > 0 or self.off_policy_delta is not None

    @property
    def by_key(self) -> Mapping[str, CorrectionWeight]:
        """This section's own weight and those of ``times``, also where they are off."""
        return {"algorithm.correction": self, **{f"algorithm.correction.times.{n}": w for n, w in self.times.items()}}

    @property
    def weights(self) -> tuple[CorrectionWeight, ...]:
        """The weights that are multiplied: those that are not off."""
        return tuple(one for one in self.by_key.values() if one.mode != "none")

    @property
    def normalises(self) -> str | None:
        """The key of the first weight that is divided by its mean; None if there is none."""
        keys = (f"{key}.normalise" for key, one in self.by_key.items() if one.mode != "none" and one.normalise)
        return next(keys, None)

    @model_validator(mode="after")
    def _each_acts_and_is_in_order(self) -> Self:
        for name, one in self.times.items():
            given = f"algorithm.correction.times.{name}"
            if one.mode == "none":
                raise ValueError(f"{given}.mode=none: it does nothing; leave {name} out")
            if one.mode == "reject" and one.low:
                raise ValueError(f"{given}.low={one.low:g} does nothing: mode=reject has no lower limit; leave it out")
            if one.mode != "reject" and one.estimator != "k3":
                raise ValueError(
                    f"{given}.estimator={one.estimator} does nothing: mode={one.mode} does not read it, mode=reject "
                    "does; leave it out"
                )
        for key, one in self.by_key.items():
            if one.level == "worst" and one.mode not in {"none", "reject"}:
                raise ValueError(
                    f"{key}.level=worst with mode={one.mode}: a weight is of a token or a whole sequence, and only a "
                    "divergence of its worst token; set level=token, sequence or product, or mode=reject"
                )
            if one.low > one.high:
                raise ValueError(f"{key}.low={one.low} is above {key}.high={one.high}; swap them")
        return self
