"""Quantizes to float8 or int8 with a scale for each block of a weight, box by box, and dequantizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rl_megatron.weights.boxes import Box, whole_box
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.formats.schemes import BLOCK, Quantized

_E2M1 = torch.tensor([sign * x for sign in (1, -1) for x in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])
_FP8 = torch.float8_e4m3fn
LARGEST_FP8, LARGEST_INT8 = torch.finfo(_FP8).max, 127.0  # the largest numbers, of either sign
_LEAST_POWER = 2.0**-126  # smaller floats have no exponent of their own


def dequantize(weight: Tensor, scales: Tensor, start: Sequence[int], edges: tuple[int, int]) -> Tensor:
    """Multiplies numbers [r, c], a box that begins at ``start`` of a weight, by the weight's ``scales``; float32."""
    return weight.float().mul_(_element_scales(scales, start, weight.shape, edges))


def divide(values: Tensor, scales: Tensor, start: Sequence[int], edges: tuple[int, int]) -> Tensor:
    """Divides values [r, c], such a box, by the weight's ``scales``; float32."""
    return values.float() / _element_scales(scales, start, values.shape, edges)


def _element_scales(scales: Tensor, start: Sequence[int], size: Sequence[int], edges: tuple[int, int]) -> Tensor:
    """The scale of each element of a box, float32 [r, c], or [r, 1] where one block has all columns."""
    (top, left), (rows, columns), (high, wide) = start, size, edges
    bands = scales[top // high : (top + rows - 1) // high + 1, left // wide : (left + columns - 1) // wide + 1].float()
    if bands.shape[1] > 1:
        bands = bands[:, torch.arange(left % wide, left % wide + columns, device=scales.device) // wide]
    return bands[torch.arange(top % high, top % high + rows, device=scales.device) // high]


def read_quantized(weight: Quantized, box: Box, part: Callable[[str, Box], Tensor]) -> Tensor:
    """A box of a quantized weight, float32; ``part`` reads a box of a tensor by its name."""
    if weight.scheme.stored is DType.U8:
        return _read_mxfp4(weight, box, part)
    (low, high), (left, right) = box
    columns, bits = (left, right), weight.scheme.bits
    if weight.scheme.stored is DType.I32:
        per = 32 // bits
        words = part(weight.numbers, ((low, high), (left // per, -(-right // per))))
        first = left // per * per
        numbers = _unpacked(words, bits)[:, left - first : right - first]
    else:
        numbers = part(weight.numbers, (box[0], columns)).float()
    edge, given = weight.edges[0], weight.scales_shape
    if weight.edges == weight.shape:
        scales, start = part(weight.scales, whole_box(given)).reshape(1, 1), low
    else:
        rows = (low // edge, (high - 1) // edge + 1)
        scales, start = part(weight.scales, (rows, *whole_box(given[1:]))), low - rows[0] * edge
        scales = scales.reshape(len(scales), -1)
    return dequantize(numbers, scales, (start, left), weight.edges)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """The integers in int32 words [r, w], lowest bits first, as float32 [r, 32 / bits * w]."""
    data = words.contiguous().view(torch.uint8)
    if bits == 4:
        data = torch.stack((data & 15, data >> 4), -1).flatten(-2)
    return data.float().sub_(1 << (bits - 1))


def _read_mxfp4(weight: Quantized, box: Box, part: Callable[[str, Box], Tensor]) -> Tensor:
    experts, (left, right), rows = box
    size = weight.edges[1]
    groups = (left // size, -(-right // size))
    data = part(weight.numbers, (experts, rows, groups, (0, size // 2)))
    numbers = _E2M1[torch.stack((data & 15, data >> 4), -1).flatten(-2).int()]  # [e, row, group, column in it]
    scales = part(weight.scales, (experts, rows, groups)).view(torch.float8_e8m0fnu).float()
    values = numbers.mul_(scales[..., None]).flatten(-2)[..., left - groups[0] * size : right - groups[0] * size]
    return values.transpose(1, 2)


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes [r, c] to float8 [r, c] and its scales; a block's largest number becomes 448."""
    scales = block_scales(values)
    return to_float8(divide(values, scales, (0, 0), (BLOCK, BLOCK))), scales


def block_scales(values: Tensor) -> Tensor:
    """The factor of each block of [r, c], float32; 1 for a block of zeros."""
    return scales_to(LARGEST_FP8, block_maxima(values, (0, 0), (BLOCK, BLOCK)))


def block_maxima(values: Tensor, start: Sequence[int], edges: tuple[int, int]) -> Tensor:
    """The largest absolute value in each block that a box [r, c] touches, float32; the box begins at ``start``.

    NaN is larger than any number.
    """
    tiles, padding = [], []
    for low, size, edge in zip(start, values.shape, edges, strict=True):
        inside = low // edge == (low + size - 1) // edge
        tiles.append(size if inside else edge)
        padding.append((0, 0) if inside else (low % edge, -(low + size) % edge))
    if any(map(any, padding)):
        values = torch.nn.functional.pad(values, (*padding[1], *padding[0]))
    blocks: Tensor = values.abs().unflatten(1, (-1, tiles[1])).unflatten(0, (-1, tiles[0]))
    return blocks.amax((1, 3)).float()


def scales_to(largest: float, maxima: Tensor) -> Tensor:
    """Factors by which blocks' ``maxima`` become ``largest``; 1 for a block of zeros."""
    factors = maxima / largest
    return torch.where(factors > 0, factors, 1.0)


def powers_of_two(scales: Tensor) -> Tensor:
    """The next power of two above each positive scale, float32, or the scale if it is one.

    So engines that round scales up to powers of two find nothing to round.
    """
    bits = scales.clamp(min=_LEAST_POWER).view(torch.int32)
    return (bits + 0x7FFFFF).bitwise_and_(0x7F800000).view(torch.float32)


def to_float8(values: Tensor) -> Tensor:
    """Rounds float32 values in place and to e4m3, which has no infinity: beyond 448 is NaN."""
    return values.clamp_(-LARGEST_FP8, LARGEST_FP8).to(_FP8)


def to_int8(values: Tensor) -> Tensor:
    """Rounds float32 values in place and to -127 … 127."""
    return values.round_().clamp_(-LARGEST_INT8, LARGEST_INT8).to(torch.int8)
