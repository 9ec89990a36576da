"""``learner.dtype``: in which precision parameters, gradients and activations are."""

from __future__ import annotations

from typing import Literal

from rl_megatron.options.option import Option
from rl_megatron.section import Section


class DtypeKeys(Section):
    """Its key."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters and activations; the optimizer keeps float32."""


class Precision(Option):
    """Parameters and activations in ``learner.dtype``; gradients are added up, and experts chosen, in float32."""

    keys = DtypeKeys
