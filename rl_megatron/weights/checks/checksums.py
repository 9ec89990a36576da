"""Additive 64-bit checksums: the checksums of the boxes that a tensor is cut into add up to the tensor's own.

So the shards and stacks of engine ranks can be compared with the learner's checksums, however tensors are cut. They
detect corruption, not forgery. Engines import this module: it needs numpy and torch alone.

A tensor is a matrix of words, dim 0 by all others; its checksum is the sum of each word times an odd number of its row
times an odd number of its column, modulo 2**64. One wrong word always changes it; several, or words that changed
places, change it except in about one case in 2**63. It reads memory as fast as XXH3, and cached bytes half as fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import gcd, prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORDS = {8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}
_INTS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_BLOCK = 1024  # words of a row whose factors fit a core's first-level cache
_PIECE = 2**25  # words of a GPU tensor that are widened at once
_MODULUS = 2**64


def checksum(box: Tensor, whole: tuple[int, ...], start: tuple[int, ...] = ()) -> int:
    """The checksum of a box that begins at ``start`` of a tensor of shape ``whole``; `add` sums those of all boxes.

    Only dims 0 and 1 may be cut. Raises ValueError if a row's share is not made of whole words.
    """
    return box_checksums([(box, whole, start)])[0]


def box_checksums(boxes: Iterable[tuple[Tensor, tuple[int, ...], tuple[int, ...]]]) -> list[int]:
    """The `checksum` of each box of one device, given with the shape of its tensor and its start there. A GPU is waited
    for once, after the last."""
    factors = _FactorsOnDevice()
    found = [_sum(*one, factors) for one in boxes]
    on_device = [one for one in found if isinstance(one, Tensor)]
    read = iter(torch.stack(on_device).tolist() if on_device else ())
    return [(next(read) if isinstance(one, Tensor) else one) % _MODULUS for one in found]


def _sum(box: Tensor, whole: tuple[int, ...], start: tuple[int, ...], factors: _FactorsOnDevice) -> int | Tensor:
    """As a number, or of a GPU's tensor, without waiting for it, [] int64."""
    if not box.numel():
        return 0
    if box.ndim < 2:  # a row
        box, whole, start = box.reshape(1, -1), (1, *(whole or (1,))), (0, *(start or (0,)))
    rows, columns = len(box), prod(box.shape[1:])
    at = (start[0], start[1] * prod(whole[2:])) if start else (0, 0)
    size = gcd(prod(whole[1:]) * box.dtype.itemsize, 8)
    width, first = columns * box.dtype.itemsize, at[1] * box.dtype.itemsize
    if width % size or first % size:
        raise ValueError(f"columns {at[1]} to {at[1] + columns} of {whole} are not whole words of {size} bytes")
    matrix = box.detach().reshape(rows, columns)
    if matrix.stride(1) != 1 or matrix.stride(0) * box.dtype.itemsize % size or matrix.data_ptr() % size:
        matrix = matrix.contiguous() if matrix.stride(1) != 1 else matrix.clone(memory_format=torch.contiguous_format)
    words = (first // size, (first + width) // size)
    if matrix.device.type != "cpu":
        return _on_device(matrix.view(_INTS[size]), at[0], words, factors)
    seen = np.from_dlpack(matrix.view(_INTS[size]))  # .numpy() would make the storage unresizable
    return _on_cpu(seen.view(_WORDS[size]), at[0], words)


def narrowed(box: Tensor, dtype: torch.dtype) -> Tensor:
    """What a checksum is of: the box in ``dtype``, that of its tensor's file, where it is held in a wider one.

    Engines hold routers and decays in float32 whatever the weights' dtype. What was read from a file is cast exactly.
    """
    return box.to(dtype) if dtype.itemsize < box.dtype.itemsize else box


def aligned(whole: tuple[int, ...], columns: tuple[int, int], itemsize: int) -> bool:
    """Whether ``columns`` (of dim 1) are whole words of a tensor of shape ``whole``."""
    row = prod(whole[2:]) * itemsize
    return all(place * row % gcd(whole[1] * row, 8) == 0 for place in columns)


def add(*checksums: int) -> int:
    """The checksum of several boxes together."""
    return sum(checksums) % _MODULUS


def _on_cpu(matrix: NDArray[np.unsignedinteger], row: int, words: tuple[int, int]) -> int:
    sums = np.zeros(len(matrix), np.uint64)
    for low, high in _blocks(words, _BLOCK):
        block, factors = matrix[:, low - words[0] : high - words[0]], _factors(high, 31)[low:high]
        sums += np.einsum("ij,j->i", block, factors, dtype=np.uint64, casting="safe")
    return int((sums * _factors(row + len(matrix), 29)[row : row + len(matrix)]).sum())


def _on_device(matrix: Tensor, row: int, words: tuple[int, int], factors: _FactorsOnDevice) -> Tensor:
    mask = (1 << 8 * matrix.dtype.itemsize) - 1
    rows = factors(matrix.device, 29, row, row + len(matrix))
    total = torch.zeros((), dtype=torch.int64, device=matrix.device)
    for low, high in _blocks(words, max(1, _PIECE // len(matrix))):
        block = matrix[:, low - words[0] : high - words[0]].to(torch.int64)
        block = block & mask if mask < _MODULUS - 1 else block
        total += (block * factors(matrix.device, 31, low, high)).sum(1).mul_(rows).sum()
    return total


def _blocks(words: tuple[int, int], size: int) -> Iterator[tuple[int, int]]:
    for low in range(words[0], words[1], size):
        yield low, min(low + size, words[1])


_MADE: dict[int, NDArray[np.uint64]] = {}


def _factors(count: int, shift: int) -> NDArray[np.uint64]:
    """At least ``count`` odd numbers, the same at every call (by splitmix64's mixer)."""
    made = _MADE.get(shift)
    if made is None or len(made) < count:
        numbers = np.arange(1, max(2 * count, _BLOCK) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(0xBF58476D1CE4E5B9)
        made = _MADE[shift] = (numbers ^ (numbers >> np.uint64(27))) | np.uint64(1)
    return made


class _FactorsOnDevice:
    """`_factors` on GPUs, for one call: a copy of each from the host would wait for the GPU."""

    def __init__(self) -> None:
        self._made: dict[tuple[torch.device, int], Tensor] = {}

    def __call__(self, device: torch.device, shift: int, low: int, high: int) -> Tensor:
        """[high - low] int64."""
        made = self._made.get((device, shift))
        if made is None or len(made) < high:
            numbers = _factors(high, shift)[: 2 * high].view(np.int64).copy()
            made = self._made[device, shift] = torch.from_numpy(numbers).to(device)
        return made[low:high]
