"""Casts, quantises to float8 (``block_scales``) or int8 with scales, and dequantises."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_megatron.weights.formats.block_scales import BLOCK

_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
_LARGEST_INT = 127.0  # of either sign: symmetric


def dequantise(weight: Tensor, scales: Tensor, start: Sequence[int], edges: tuple[int, int]) -> Tensor:
    """Dequantise to float32 a box [r, c] that begins at ``start`` of a float8 weight; ``scales`` are the weight's."""
    rows, columns = (
        torch.arange(low, low + size) // edge for low, size, edge in zip(start, weight.shape, edges, strict=True)
    )
    factors = scales[int(rows[0]) : int(rows[-1]) + 1].float()[:, columns]
    return weight.float().mul_(factors[rows - rows[0]])


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [r, c] to float8 [r, c] and its scales; a block's largest number becomes 448."""
    rows, columns = values.shape
    scales = block_scales(values)
    tiles = _tiles(values) / scales[:, None, :, None]
    tiles.clamp_(-_LARGEST, _LARGEST)  # e4m3fn has no infinity: beyond is NaN
    return tiles.flatten(2, 3).flatten(0, 1)[:rows, :columns].to(_FP8).contiguous(), scales


def block_scales(values: Tensor) -> Tensor:
    """The factor of each block of [r, c], float32; 1 for a block of zeros."""
    return _factors(_tiles(values).abs().amax((1, 3)), _LARGEST)


def quantise_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [r, c] to int8 [r, c] and the factor of each row, [r, 1]; a row's largest number becomes 127."""
    values = values.float()
    scales = _factors(values.abs().amax(1, keepdim=True), _LARGEST_INT)
    numbers = (values / scales).round_().clamp_(-_LARGEST_INT, _LARGEST_INT)
    return numbers.to(torch.int8), scales


def _factors(largest: Tensor, becomes: float) -> Tensor:
    """Factors that scale ``largest`` to ``becomes``; 1 instead of 0."""
    factors = largest / becomes
    return torch.where(factors > 0, factors, 1.0)


def _tiles(values: Tensor) -> Tensor:
    """[r, c] -> float32 [r / 128, 128, c / 128, 128], padded with 0."""
    rows, columns = values.shape
    if rows % BLOCK or columns % BLOCK:
        values = torch.nn.functional.pad(values, (0, -columns % BLOCK, 0, -rows % BLOCK))
    tiles: Tensor = values.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    return tiles
