"""``algorithm.balance``: a clip that follows the share of positive tokens in the loss (BAPO, arXiv:2510.18927)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_megatron.feature import Curve, Feature
from rl_megatron.rules import Above, Below, Not, On, ReadIf, excluded
from rl_megatron.section import NonNegativeFloat, PositiveFraction, Section

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig


class BalanceSection(Section):
    """Widens the clip of each minibatch from ``clip_low`` and ``clip_high``."""

    share: PositiveFraction | None = None
    """objective=clip: lowest share of tokens of positive advantage in the sum over |rho A|, clipped and weighted by the
    old policy's probability. ``clip_high`` is raised in steps of 0.05 until it is reached. null: the limits stay."""
    high: NonNegativeFloat = 2.0
    """Limit to which ``clip_high`` may be raised."""
    low: NonNegativeFloat = 0.1
    """Limit to which ``clip_low`` falls if that is not enough: more tokens of negative advantage have no gradient."""


class BalancedClipKeys(Section):
    """The feature's section of keys of the algorithm."""

    balance: BalanceSection = BalanceSection()


def balance_section(config: RunConfig) -> BalanceSection:
    """Returns the feature's keys."""
    assert isinstance(config.algorithm, BalancedClipKeys)
    return config.algorithm.balance


def _passes(config: RunConfig) -> float:
    """Counts one pass over each later minibatch."""
    return 0.0 if balance_section(config).share is None else config.train.epochs - 1 / config.train.minibatches


FEATURE = Feature(
    name="balanced_clip",
    keys={"algorithm": BalancedClipKeys},
    passes=_passes,
    wants=lambda config: frozenset({"logprobs"} if balance_section(config).share is not None else ()),
    rules=(
        *excluded(On("algorithm.balance.share"),
            (On("algorithm.ratio_level", Not("token")), "it balances ratios of tokens", "set ratio_level=token"),
            (On("algorithm.preference.beta"), "pairs have no clip", "leave one of them out"),
            (On("algorithm.demonstration_gamma"), "it balances clipped ratios, and a demonstration has none",
             "set balance.share=null"),
            (On("algorithm.old_logprobs", "interpolated"), "these follow the policy", "set learner or rollout"),
            (On("algorithm.correction.acts", True, "algorithm.correction.mode"), "the share does not count the "
             "weights", "leave the correction out, and set old_logprobs=rollout"),
            (On("algorithm.balance.high", Below("algorithm.clip_high")), "clip_high starts above it", "raise it"),
            (On("algorithm.balance.low", Above("algorithm.clip_low")), "clip_low starts below it", "lower it")),
        ReadIf(keys=("algorithm.balance",), any_of=(On("algorithm.objective", "clip"),), why="nothing is clipped"),
        ReadIf(keys=("algorithm.balance.high", "algorithm.balance.low"), any_of=(On("algorithm.balance.share"),),
               why="the limits do not move"),
    ),
    step="rl_megatron.features.balanced_clip.step:make_hooks",
    metrics=(
        ("balance/clip_low", "", "distance of the clip's lower limit from ratio 1, mean over optimizer steps; only "
         "with algorithm.balance", Curve("Policy", "Clip of a minibatch: lower limit")),
        ("balance/clip_high", "", "distance of the clip's upper limit from ratio 1, mean over optimizer steps; only "
         "with algorithm.balance", Curve("Policy", "Clip of a minibatch: upper limit")),
        ("balance/positive_share", "", "share of positive advantages in the sum over |A| times the ratio, clipped and "
         "weighted by the old policy's probability; below algorithm.balance.share if no limit reaches it",
         Curve("Policy", "Share of tokens of positive advantage in what the clip leaves", limits=(0.0, 1.0))),
    ),
)  # fmt: skip
