"""Counts the bytes that servers read. No torch, for a login node."""

from __future__ import annotations

from math import prod

from rl_megatron.config.run import RunConfig
from rl_megatron.feature import make_encoding
from rl_megatron.models.shape import ModelShape
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.formats.hf_folder import stored
from rl_megatron.weights.layouts.families import hf_layout
from rl_megatron.weights.layouts.layout import float32_in_files


def served_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Returns the number of bytes of the model as servers read it from a file, encoded if a feature encodes it."""
    hf = hf_layout(shape)
    entries = stored(hf.local_shapes(0), DType(config.learner.dtype), make_encoding(config), float32_in_files(hf))
    return sum(prod(size) * dtype.itemsize for dtype, size in entries.values())
