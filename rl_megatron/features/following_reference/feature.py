"""``algorithm.kl.follow_rate``: a reference model that takes a share of the policy's weights every few steps."""

from __future__ import annotations

from rl_megatron.feature import Feature

FEATURE = Feature(name="following_reference", step="rl_megatron.features.following_reference.step:make_hooks")
