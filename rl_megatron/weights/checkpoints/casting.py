"""Casts, quantizes or dequantizes a checkpoint's tensors while they are streamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from torch import Tensor

from rl_megatron.weights.boxes import Box, Shape
from rl_megatron.weights.bytes.bits import cast_checked, to_bits, to_tensor
from rl_megatron.weights.bytes.dtypes import Bits, DType
from rl_megatron.weights.checkpoints.streaming import Copy, OnBytes, Sliceable, StreamedTensor
from rl_megatron.weights.formats.quantize import block_scales, quantize, read_quantized
from rl_megatron.weights.formats.schemes import BLOCK, SCALES, Quantized, is_quantized


@dataclass(frozen=True, slots=True, kw_only=True)
class CastTensor:
    """The stored tensor ``name``, read as another dtype."""

    name: str
    source: Sliceable
    given: DType
    wanted: DType

    def __getitem__(self, box: tuple[slice, ...]) -> Bits:
        return cast_checked(self.name, to_tensor(self.source[box].copy(), self.given), self.wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dequantized:
    """A quantized weight, dequantized box by box as it is read. ``parts`` are its tensors, with their dtypes."""

    weight: Quantized
    parts: Mapping[str, tuple[Bits, DType]]
    wanted: DType

    def __getitem__(self, box: tuple[slice, ...]) -> Bits:
        values = read_quantized(self.weight, tuple((cut.start, cut.stop) for cut in box), self._part)
        return cast_checked(self.weight.numbers, values, self.wanted)

    def _part(self, name: str, box: Box) -> Tensor:
        bits, dtype = self.parts[name]
        return to_tensor(np.array(bits[tuple(slice(*edge) for edge in box)]), dtype)  # a copy; of a scalar, too


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quantized:
    """The quantized numbers of float32 ``values``, or with ``scales`` their scales."""

    values: Copy
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

    def blocks(self, on_bytes: OnBytes) -> Iterator[Bits]:
        """Rows in order. The scales read the values a second time, so that memory does not grow with the weight."""
        for values in self.values.blocks(lambda n: None, multiple=BLOCK):
            rows = to_tensor(values, DType.F32)
            block = to_bits(block_scales(rows) if self.scales else quantize(rows)[0])
            on_bytes(block.nbytes)
            yield block


def cast(tensor: Copy, dtype: DType) -> Copy:
    """The tensor in another dtype."""
    return tensor.mapped(
        lambda source: CastTensor(name=tensor.name, source=source, given=tensor.dtype, wanted=dtype), dtype
    )


def quantized(tensor: Copy) -> list[StreamedTensor]:
    """The tensors to write: float8 numbers and their scales for a linear layer's weight, else the tensor itself."""
    if not is_quantized(tensor.name, tensor.shape):
        return [tensor]
    values = tensor if tensor.dtype is DType.F32 else cast(tensor, DType.F32)
    return [_Quantized(values=values, scales=scales) for scales in (False, True)]
