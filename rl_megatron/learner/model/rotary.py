"""Rotary frequencies of plain and scaled embeddings. Source: transformers ``modeling_rope_utils.py``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_megatron.models.shape import Rope


def inverse_frequencies(theta: float, dim: int, rope: Rope, device: torch.device) -> Tensor:
    """Radians per position, float32 [dim / 2], of a head's first ``dim`` dimensions, halves convention."""
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
    """As llama3's, with a linear ramp over the dimensions (arXiv:2309.00071, section 3.2)."""

    def turning(rotations: float) -> float:
        """The dimension that makes so many rotations over the original context."""
        return dim * math.log(rope.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turning(rope.beta_fast), turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    step = torch.arange(dim // 2, dtype=torch.float32, device=plain.device)
    ramp = ((step - low) / (high - low or 0.001)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)
