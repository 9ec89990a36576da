"""``learner.layers``: whose layers the model is made of, TransformerEngine's with their fused kernels or torch's."""

from __future__ import annotations

from typing import Literal

from rl_megatron.options.option import Option
from rl_megatron.section import Section


class LayersKeys(Section):
    """Its key."""

    layers: Literal["auto", "torch", "transformer_engine"] = "auto"
    """auto takes TransformerEngine's where it is installed and device=cuda, else torch's, and with float32 and cp > 1,
    for which it has no attention."""


class Layers(Option):
    """Fusions that want CUDA kernels are on only with TransformerEngine's layers."""

    keys = LayersKeys
