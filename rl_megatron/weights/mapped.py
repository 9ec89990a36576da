"""Files as arrays without reading them: memory maps that can be let go of, and the safetensors header. No torch.

A page of a map that was touched counts as this process's memory until `MappedFile.forget`; the page cache keeps it.
Format: huggingface/safetensors (8 bytes of header length, a JSON header, then the tensors' bytes).
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from rl_megatron.errors import CheckpointError
from rl_megatron.weights.dtypes import Bits, DType
from rl_megatron.weights.layout import Shape

_ALIGNMENT = 8


class MappedFile:
    """A file's bytes. Writing to a view of them would not reach the file."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, path.stat().st_size
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants what can be written to

    def bytes(self, start: int, stop: int) -> bytes:
        """A copy of a range."""
        return self._map[start:stop]

    def array(self, dtype: DType, shape: Shape, start: int) -> Bits:
        """A contiguous view of the map, which the disk is asked for at once."""
        count = prod(shape)
        if count == 0:
            return np.empty(shape, dtype.bits)
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_WILLNEED, page, start - page + count * dtype.itemsize)
        flat = np.frombuffer(self._map, np.uint8, count * dtype.itemsize, start)
        return flat.view(dtype.bits).reshape(shape)

    def forget(self) -> None:
        """Let go of the pages that were touched; views stay valid and read them again."""
        self._map.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a safetensors file."""

    dtype: DType
    shape: Shape
    start: int  # byte in the file
    stop: int

    def view(self, file: MappedFile) -> Bits:
        """The tensor, not read."""
        return file.array(self.dtype, self.shape, self.start)


def read_header(file: MappedFile) -> dict[str, Entry]:
    """The tensors of a safetensors file by name. Raises CheckpointError where it is torn or no such file."""
    try:
        length = int.from_bytes(file.bytes(0, 8), "little")
        header = json.loads(file.bytes(8, 8 + length))
        header.pop("__metadata__", None)
        out = {name: _entry(raw, 8 + length) for name, raw in header.items()}
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{file.path} is torn or no safetensors file ({error}); fetch it again") from error
    end = max((entry.stop for entry in out.values()), default=8 + length)
    if end != file.size:
        raise CheckpointError(f"{file.path} is torn: {file.size} bytes, its header tells of {end}; fetch it again")
    return out


def _entry(raw: Mapping[str, object], base: int) -> Entry:
    shape, offsets = raw["shape"], raw["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list):
        raise ValueError("a tensor without a shape or offsets")
    entry = Entry(
        dtype=DType[str(raw["dtype"])], shape=tuple(shape), start=base + int(offsets[0]), stop=base + int(offsets[1])
    )
    if entry.stop - entry.start != prod(entry.shape) * entry.dtype.itemsize:
        raise ValueError(f"offsets {offsets} do not fit shape {shape}")
    return entry


def header_bytes(tensors: Sequence[tuple[str, DType, Shape]]) -> bytes:
    """The head of a safetensors file whose tensors follow in this order, without gaps."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        size = prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtype.name, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
