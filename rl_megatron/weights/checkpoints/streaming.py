"""Assembles tensors from pieces of other files' tensors, in bounded memory.

Input is memory-mapped. Whole rows are written straight from the map; other pieces are assembled in blocks of a MiB. No
torch: bytes are copied unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Protocol

import numpy as np

from rl_megatron.errors import WeightError
from rl_megatron.weights.boxes import Box, Shape
from rl_megatron.weights.bytes.dtypes import Bits, DType
from rl_megatron.weights.bytes.mapped import MappedFile

BLOCK_BYTES = 1 << 20  # written at once, while it is still in the cache
FORGET_BYTES = 128 << 20  # a thread drops the pages of its input after so many bytes

OnBytes = Callable[[int], None]
"""Called with the bytes of output since its last call."""

OnProgress = Callable[[int, int], None]
"""Called with the bytes of output, or of what is verified, since its last call, and with those of all of it."""


class Sliceable(Protocol):
    """A stored tensor, or one that is computed when it is read."""

    def __getitem__(self, box: tuple[slice, ...], /) -> Bits:
        """A box of the tensor; every slice has a start and a stop."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """``src_box`` of a source tensor is written to ``box`` of the new tensor; both have the same size."""

    box: Box
    source: Callable[[], Sliceable]
    src_box: Box


class Streamed(Protocol):
    """A tensor that is written row by row."""

    @property
    def name(self) -> str:
        """The tensor's name in the checkpoint."""
        ...

    @property
    def shape(self) -> Shape:
        """The shape of the whole tensor."""
        ...

    @property
    def dtype(self) -> DType:
        """The dtype of the blocks."""
        ...

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        ...

    def blocks(self, on_bytes: OnBytes) -> Iterator[Bits]:
        """The tensor's rows, about `BLOCK_BYTES` at a time, in order; contiguous."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One tensor to write. Its fragments, of its dtype, cover it except for padding, which is 0."""

    name: str
    shape: Shape
    dtype: DType
    fragments: tuple[Fragment, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def blocks(self, on_bytes: OnBytes, *, multiple: int | None = None) -> Iterator[Bits]:
        """The tensor's rows, about `BLOCK_BYTES` at a time, in order; contiguous.

        With ``multiple``, blocks have one size, a multiple of so many rows, except the last.
        """
        row = max(prod(self.shape[1:]) * self.dtype.itemsize, 1)
        unit = multiple or 1
        step = max(BLOCK_BYTES // row // unit, 1) * unit
        fragments = sorted(self.fragments, key=lambda fragment: fragment.box)
        straight = multiple is None and self._is_stack(fragments)
        for block in self._runs(fragments, step) if straight else self._assembled(fragments, step):
            on_bytes(block.nbytes)
            yield block

    def _is_stack(self, fragments: Sequence[Fragment]) -> bool:
        """Whether the fragments are consecutive whole rows, without padding."""
        whole = tuple((0, size) for size in self.shape[1:])
        starts, stops = ([fragment.box[0][i] for fragment in fragments] for i in (0, 1))
        behind = [0, *stops] == [*starts, self.shape[0]]
        return behind and all(fragment.box[1:] == whole for fragment in fragments)

    def _runs(self, fragments: Sequence[Fragment], step: int) -> Iterator[Bits]:
        for fragment in fragments:
            source, ((first, last), *rest) = fragment.source(), fragment.src_box
            for low in range(first, last, step):
                yield np.ascontiguousarray(self._taken(source, ((low, min(low + step, last)), *rest)))

    def _assembled(self, fragments: Sequence[Fragment], step: int) -> Iterator[Bits]:
        sources = [(fragment, fragment.source()) for fragment in fragments]
        for low in range(0, self.shape[0], step):
            high = min(low + step, self.shape[0])
            block = np.zeros((high - low, *self.shape[1:]), self.dtype.bits)
            for fragment, source in sources:
                start, stop = max(low, fragment.box[0][0]), min(high, fragment.box[0][1])
                if start < stop:
                    shift = fragment.src_box[0][0] - fragment.box[0][0]
                    taken = self._taken(source, ((start + shift, stop + shift), *fragment.src_box[1:]))
                    block[_slices(((start - low, stop - low), *fragment.box[1:]))] = taken
            yield block

    def _taken(self, source: Sliceable, box: Box) -> Bits:
        """A box of a source. Raises WeightError if its elements are of another size, which numpy would cut or widen."""
        taken = source[_slices(box)]
        if taken.itemsize != self.dtype.itemsize:
            raise WeightError(
                f"{self.name} is {self.dtype}, but a part of it has {taken.itemsize} bytes an element; all must have "
                f"{self.dtype.itemsize}. Save its parts in one dtype"
            )
        return taken


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in box)


def numbers(tensor: Streamed, on_bytes: OnBytes) -> Iterator[Bits]:
    """The blocks of a tensor. Raises WeightError at the first block with NaN or infinite values."""
    for block in tensor.blocks(on_bytes):
        if not tensor.dtype.all_numbers(block):
            raise WeightError(
                f"{tensor.name} holds NaN or infinite values; `rl-megatron convert --verify` counts them. "
                "Fetch the checkpoint again, or use an earlier one"
            )
        yield block


class Files:
    """Mapped input files. A thread drops their pages when it has finished an output file."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files = {path: MappedFile(path) for path in paths}

    def __getitem__(self, path: Path) -> MappedFile:
        return self._files[path]

    def __or__(self, other: Files) -> Files:
        joined = Files(())
        joined._files = self._files | other._files
        return joined

    def changed(self) -> list[str]:
        """A line for each file that has another size or time than when it was mapped."""
        return [line for file in self._files.values() if (line := file.changed())]

    def forget(self) -> None:
        """Drop the pages of all files."""
        for file in self._files.values():
            file.forget()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """One output file; ``write`` gets the file and its tensors, and returns notes on them."""

    name: str
    tensors: tuple[Streamed, ...]
    write: Callable[[IO[bytes], Sequence[Streamed], OnBytes], list[dict[str, object]]]


def in_files(tensors: Sequence[Streamed], limit: int) -> list[list[Streamed]]:
    """Divide tensors, in order, over files of at most ``limit`` bytes or one tensor."""
    groups: list[list[Streamed]] = []
    free = 0
    for tensor in tensors:
        if not groups or tensor.num_bytes > free:
            groups.append([])
            free = limit
        groups[-1].append(tensor)
        free -= tensor.num_bytes
    return groups
