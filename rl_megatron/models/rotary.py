"""Rotary frequencies of plain and scaled embeddings, and tables of them.

Source: transformers ``modeling_rope_utils.py``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_megatron.models.shape import ModelShape, Rope


def inverse_frequencies(theta: float, dim: int, rope: Rope, device: torch.device) -> Tensor:
    """Returns radians per position, float32 [dim / 2], of a head's first ``dim`` dimensions, halves convention."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    plain = 1.0 / theta**exponent
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, theta, dim, rope)
    return plain


def _llama3(plain: Tensor, rope: Rope) -> Tensor:
    """Scales long wavelengths, keeps short ones, and interpolates between."""
    waves = 2 * math.pi / plain
    long, short = rope.original_positions / rope.low_frequency, rope.original_positions / rope.high_frequency
    stay = (rope.original_positions / waves - rope.low_frequency) / (rope.high_frequency - rope.low_frequency)
    blended = (1 - stay) * plain / rope.factor + stay * plain
    return torch.where(waves > long, plain / rope.factor, torch.where(waves < short, plain, blended))


def _yarn(plain: Tensor, theta: float, dim: int, rope: Rope) -> Tensor:
    """Scales as llama3's, with a linear ramp over the dimensions (arXiv:2309.00071, section 3.2)."""

    def correction_dim(rotations: float) -> float:
        """Returns the dimension that makes this many rotations over the original context."""
        return dim * math.log(rope.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    step = torch.arange(dim // 2, dtype=torch.float32, device=plain.device)
    ramp = ((step - low) / (high - low or 0.001)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def softmax_scale(head_dim: int, rope: Rope) -> float:
    """Returns the softmax scale. DeepSeek multiplies it by the squared magnitude factor of YaRN over all dimensions."""
    return rope.grown(rope.mscale_all_dim) ** 2 / math.sqrt(head_dim)


def as_halves(x: Tensor) -> Tensor:
    """Reorders pairs (0, 1), (2, 3), … into halves, as a rotation takes them: first members, then second.

    Queries and keys are reordered alike, so their products do not change.
    """
    out: Tensor = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return out


class RotaryTables:
    """Cosines and signed sines of ``length`` positions for ``heads`` heads of ``width`` numbers. The first
    `ModelShape.rotary_dim` of these turn, halves convention."""

    def __init__(
        self, shape: ModelShape, *, heads: int, width: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        turning, self._heads, self._width = shape.rotary_dim, heads, width
        angles = torch.outer(
            torch.arange(length, dtype=torch.float32, device=device),
            inverse_frequencies(shape.rope_theta, turning, shape.rope, device),
        )
        still = angles.new_zeros(length, width - turning)
        cos, sin = (table * shape.rope.attention_factor for table in (angles.cos(), angles.sin()))
        # One row of all heads per position: broadcasting over heads costs more than the product.
        self._cos = torch.cat((cos, cos, still + 1), -1).to(dtype).repeat(1, heads)
        self._sin = torch.cat((-sin, sin, still), -1).to(dtype).repeat(1, heads)
        half, columns = turning // 2, torch.arange(width, device=device)
        swapped = torch.cat((columns[half:turning], columns[:half], columns[turning:]))
        self._swapped = None if turning == width else swapped

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines of ``positions`` [N], each [N, heads * width]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x`` [N, heads, width] at the positions of ``cos`` and ``sin``, rotated."""
        # rotate_half: the halves swap places; the minus sign of the first half is in the table of sines.
        other = x.roll(self._width // 2, -1) if self._swapped is None else x.index_select(-1, self._swapped)
        flat = (x.reshape(len(x), -1) * cos).addcmul_(other.reshape(len(x), -1), sin)
        return flat.view(len(x), self._heads, self._width)
