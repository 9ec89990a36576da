"""The ``algorithm.balance`` section: limits of the clip that follow the share of positive tokens in the loss (BAPO)."""

from __future__ import annotations

from rl_megatron.section import NonNegativeFloat, PositiveFraction, Section


class BalanceSection(Section):
    """Widens the clip of each minibatch from ``clip_low`` and ``clip_high``."""

    share: PositiveFraction | None = None
    """objective=clip: least share of tokens of positive advantage in the sum over |rho A|, clipped and weighed by the
    old policy's probability, to which ``clip_high`` is raised in steps of 0.05; null: the limits stay."""
    high: NonNegativeFloat = 2.0
    """How far ``clip_high`` may be raised."""
    low: NonNegativeFloat = 0.1
    """What ``clip_low`` is where that is not enough, so that more tokens of negative advantage have no gradient."""
