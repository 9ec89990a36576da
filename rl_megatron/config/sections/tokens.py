"""The ``algorithm.tokens`` section: which tokens of a minibatch the policy trains on."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from rl_megatron.section import Finite, PositiveFloat, PositiveFraction, Section


class TokensSection(Section):
    """Chooses tokens of a minibatch, by the policy at the start of the step; denominators count all its tokens."""

    choose: Literal["all", "top_entropy", "clip_cov", "kl_cov", "second_moment"] = "all"
    """Train on all tokens, or only on those of most entropy; leave out some of great covariance of log-prob and
    advantage (Clip-Cov), or hold those of the greatest to the old policy by a KL (KL-Cov); leave out those
    furthest from the engine's policy until the second moment of the rest is small (M2PO)."""
    share: PositiveFraction = 0.2
    """Share of the minibatch's tokens that top_entropy trains on, clip_cov leaves out or kl_cov holds; one at least."""
    low: Finite = 1.0
    """choose=clip_cov: least covariance, in nats times advantage, of a token that may be left out."""
    high: Finite = 5.0
    """choose=clip_cov: greatest covariance of such a token."""
    limit: PositiveFloat = 0.04
    """choose=second_moment: greatest mean square of log pi - log pi_rollout of the tokens that are trained on."""
    kl_coefficient: PositiveFloat = 1.0
    """choose=kl_cov: weight of the KL of the old policy to the current one, by |log pi_old - log pi| (abs)."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"algorithm.tokens.low={self.low} is above algorithm.tokens.high={self.high}; swap them")
        return self
