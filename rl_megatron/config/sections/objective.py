"""Keys of the ``algorithm`` section: the loss of a token, and the limits that it has."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rl_megatron.section import NUMBER, NonNegativeFloat, OwnCode, PositiveFloat, Section


class ObjectiveKeys(Section):
    """Part of `AlgorithmSection`."""

    ratio_level: Literal["token", "sequence", "turn", "sequence_sum"] = "token"
    """The importance ratio is each token's, the sequence's or its turn's (length-normalised), or the product over the
    sequence."""
    objective: (
        Literal["clip", "cispo", "reinforce", "importance", "sapo", "vespo", "topr", "gmpo", "dppo_tv", "dppo_kl"]
        | OwnCode
    ) = "clip"
    """The loss of a token as a function of its ratio, with gmpo of all of its sequence, and advantage
    (docs/algorithms.md). ``package.module:name`` is a function of your own, which the limits below reach if it reads
    them."""
    clip_low: NonNegativeFloat = 0.2
    """objective=clip, gmpo: the ratio is clipped from below at 1 minus this; dppo_tv, dppo_kl: the greatest distance to
    the old policy at which a token of negative advantage goes on falling, a difference of probabilities or nats."""
    clip_high: NonNegativeFloat = 0.2
    """objective=clip, gmpo: the ratio is clipped from above at 1 plus this; dppo_tv, dppo_kl: the greatest distance at
    which a token of positive advantage goes on rising."""
    keep_low: NonNegativeFloat = 0.0
    """objective=clip: a token that the lower limit clips keeps this times the gradient that it has at the limit
    (beta_1 of CE-GPPO); 0: none."""
    keep_high: NonNegativeFloat = 0.0
    """objective=clip: the same of a token that the upper limit clips (beta_2)."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False), NUMBER] | None = None
    """objective=clip: the loss of a token of negative advantage is at most this times its |advantage|; null: no bound.
    """
    cap_low: NonNegativeFloat = 0.0
    """objective=cispo, topr: least weight, as a ratio."""
    cap_high: PositiveFloat = 5.0
    """objective=cispo, topr, dppo_tv, dppo_kl: greatest weight, as a ratio."""
    tau_positive: PositiveFloat = 1.0
    """objective=sapo: temperature of the gate for positive advantages."""
    tau_negative: PositiveFloat = 1.05
    """objective=sapo: temperature of the gate for other advantages."""
    shape_positive: PositiveFloat = 2.0
    """objective=vespo: k of the weight rho^k exp(lambda (1 - rho)) for positive advantages."""
    shape_negative: PositiveFloat = 3.0
    """objective=vespo: the same for other advantages."""
    rate_positive: PositiveFloat = 3.0
    """objective=vespo: lambda of the weight for positive advantages."""
    rate_negative: PositiveFloat = 2.0
    """objective=vespo: the same for other advantages."""
    demonstration_gamma: PositiveFloat | None = None
    """Has each group compare the demonstration of its prompt (``data.demonstration_field``) with what is sampled, and
    trains on it by p / (p + this), p the probability of a token, in place of the objective (LUFFY); null: there is
    none."""
