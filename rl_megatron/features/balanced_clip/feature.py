"""``algorithm.balance``: a clip that follows the share of positive tokens in the loss (BAPO, arXiv:2510.18927)."""

from __future__ import annotations

from rl_megatron.feature import Feature
from rl_megatron.rules import Above, Below, Not, On, excluded

FEATURE = Feature(
    name="balanced_clip",
    rules=(
        *excluded(On("algorithm.balance.share"),
            (On("algorithm.ratio_level", Not("token")), "it is of ratios of tokens", "set ratio_level=token"),
            (On("algorithm.old_logprobs", "interpolated"), "these follow the policy", "set learner or rollout"),
            (On("algorithm.correction.acts", True, "algorithm.correction.mode"), "the share is of the loss without its "
             "weights", "leave the correction out, and set old_logprobs=rollout"),
            (On("algorithm.balance.high", Below("algorithm.clip_high")), "clip_high rises to it", "raise it"),
            (On("algorithm.balance.low", Above("algorithm.clip_low")), "clip_low falls to it", "lower it")),
    ),
    step="rl_megatron.features.balanced_clip.step:make_hooks",
)  # fmt: skip
