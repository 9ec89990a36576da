"""``algorithm.balance``: a clip that follows the share of positive tokens in the loss (BAPO, arXiv:2510.18927)."""

from __future__ import annotations

from rl_megatron.feature import Feature

FEATURE = Feature(name="balanced_clip", step="rl_megatron.features.balanced_clip.step:make_hooks")
