"""``learner.recompute_layers``: activations are made again in the backward pass (arXiv:1604.06174)."""

from __future__ import annotations

from rl_megatron.options.option import Option
from rl_megatron.section import Section


class RecomputeKeys(Section):
    """Its key."""

    recompute_layers: bool = False
    """Whether to recompute activations of every layer in the backward pass."""


class Recompute(Option):
    """Layer by layer, each whole."""

    keys = RecomputeKeys
