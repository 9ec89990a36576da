"""Numbers that change on the way: to another dtype, to float8 (``block_scales``) or int8 with scales, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from rl_megatron.weights.bits import to_bits, to_tensor
from rl_megatron.weights.block_scales import BLOCK, SCALES, is_quantised
from rl_megatron.weights.dtypes import Bits, DType
from rl_megatron.weights.layout import Shape
from rl_megatron.weights.streaming import Boxes, Job, Progress, Streamed

_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
_LARGEST_INT = 127.0  # of either sign: symmetric


def dequantise(weight: Tensor, scales: Tensor, start: Sequence[int], edges: tuple[int, int]) -> Tensor:
    """A box [r, c] of a float8 weight that begins at ``start`` -> float32; ``scales`` are all of the weight's."""
    rows, columns = (
        torch.arange(low, low + size) // edge for low, size, edge in zip(start, weight.shape, edges, strict=True)
    )
    factors = scales[int(rows[0]) : int(rows[-1]) + 1].float()[:, columns]
    return weight.float().mul_(factors[rows - rows[0]])


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """[r, c] -> float8 [r, c] and its scales; a block's largest number becomes 448."""
    rows, columns = values.shape
    scales = block_scales(values)
    tiles = _tiles(values) / scales[:, None, :, None]
    tiles.clamp_(-_LARGEST, _LARGEST)  # e4m3fn has no infinity: beyond is NaN
    return tiles.flatten(2, 3).flatten(0, 1)[:rows, :columns].to(_FP8).contiguous(), scales


def block_scales(values: Tensor) -> Tensor:
    """The factor of each block of [r, c], float32; 1 where all of it is 0."""
    return _factors(_tiles(values).abs().amax((1, 3)), _LARGEST)


def quantise_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """[r, c] -> int8 [r, c] and the factor of each row, [r, 1]; its largest number becomes 127."""
    values = values.float()
    scales = _factors(values.abs().amax(1, keepdim=True), _LARGEST_INT)
    numbers = (values / scales).round_().clamp_(-_LARGEST_INT, _LARGEST_INT)
    return numbers.to(torch.int8), scales


def _factors(largest: Tensor, becomes: float) -> Tensor:
    """1 where a factor would be 0."""
    factors = largest / becomes
    return torch.where(factors > 0, factors, 1.0)


def _tiles(values: Tensor) -> Tensor:
    """[r, c] -> float32 [r / 128, 128, c / 128, 128], the last ones filled up with 0."""
    rows, columns = values.shape
    if rows % BLOCK or columns % BLOCK:
        values = torch.nn.functional.pad(values, (0, -columns % BLOCK, 0, -rows % BLOCK))
    tiles: Tensor = values.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    return tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """A stored tensor that reads as another dtype."""

    source: Boxes
    given: DType
    wanted: DType

    def __getitem__(self, box: tuple[slice, ...]) -> Bits:
        return to_bits(to_tensor(self.source[box].copy(), self.given).to(getattr(torch, self.wanted)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A stored float8 weight that reads as the numbers it stands for, box by box."""

    weight: Bits
    scales: Bits
    scale_dtype: DType
    edges: tuple[int, int]
    wanted: DType

    def __getitem__(self, box: tuple[slice, ...]) -> Bits:
        rows, columns = box
        weight = to_tensor(self.weight[box].copy(), DType.F8_E4M3)
        scales = to_tensor(self.scales.copy(), self.scale_dtype)
        values = dequantise(weight, scales, (rows.start, columns.start), self.edges)
        return to_bits(values.to(getattr(torch, self.wanted)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quantised:
    """What of a float32 ``values`` is written: its numbers, or where ``scales`` its scales."""

    values: Job
    scales: bool

    @property
    def name(self) -> str:
        return self.values.name + (SCALES if self.scales else "")

    @property
    def shape(self) -> Shape:
        return tuple(-(-size // BLOCK) for size in self.values.shape) if self.scales else self.values.shape

    @property
    def dtype(self) -> DType:
        return DType.F32 if self.scales else DType.F8_E4M3

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def blocks(self, progress: Progress) -> Iterator[Bits]:
        """Rows in order; the scales come of a second reading, so that memory does not grow with the weight."""
        for values in self.values.blocks(lambda n: None, multiple=BLOCK):
            rows = to_tensor(values, DType.F32)
            block = to_bits(block_scales(rows) if self.scales else quantise(rows)[0])
            progress(block.nbytes)
            yield block


def cast(job: Job, dtype: DType) -> Job:
    """The tensor in another dtype."""

    def read(source: Callable[[], Boxes]) -> Cast:
        return Cast(source=source(), given=job.dtype, wanted=dtype)

    return replace(job, dtype=dtype, parts=tuple(replace(p, source=partial(read, p.source)) for p in job.parts))


def quantised(job: Job) -> list[Streamed]:
    """What to write for a tensor: float8 numbers and their scales for a linear layer's weight, else the tensor."""
    if not is_quantised(job.name, job.shape):
        return [job]
    values = job if job.dtype is DType.F32 else cast(job, DType.F32)
    return [_Quantised(values=values, scales=scales) for scales in (False, True)]
