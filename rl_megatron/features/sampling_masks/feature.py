"""The learner's log-probs over the tokens that sampling kept."""

from __future__ import annotations

from rl_megatron.columns import Column
from rl_megatron.feature import Feature

FEATURE = Feature(
    name="sampling_masks",
    columns=(Column(name="kept", of="sampled"),),  # ragged: ids of the tokens from which each one was drawn, int32
    logits="rl_megatron.features.sampling_masks.learner:limit",
)
