"""Maps files as arrays, drops their pages, and reads and writes the safetensors header. No torch.

A touched page of a map counts as this process's memory until `MappedFile.forget`; the page cache keeps it.
Format: huggingface/safetensors (8 bytes of header length, a JSON header, then the tensors' bytes).
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError

from rl_megatron.errors import CheckpointError
from rl_megatron.weights.boxes import Shape
from rl_megatron.weights.bytes.dtypes import Bits, DType

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value
_ALIGNMENT = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors' own readers
_MAX_DIMS = 8
_Size = Annotated[int, Field(ge=0, le=1 << 60)]


class MappedFile:
    """A mapped file without an open descriptor. Writes to a view do not reach the file.

    Raises CheckpointError for one that is empty or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._found = os.fstat(file.fileno())
                self.size = self._found.st_size
                if not self.size:
                    raise CheckpointError(f"{path} is empty, perhaps after a full disk; fetch or write it again")
                self._map = _mapped(file.fileno(), self.size)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error

    def bytes(self, start: int, stop: int) -> bytes:
        """A copy of a range."""
        return self._map[start:stop].tobytes()

    def array(self, dtype: DType, shape: Shape, start: int) -> Bits:
        """A contiguous view of the map; asks the kernel to read it ahead."""
        count = prod(shape)
        if count == 0:
            return np.empty(shape, dtype.bits)
        flat = self._map[start : start + count * dtype.itemsize]
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        _LIBC.madvise(self._map.ctypes.data + page, start - page + flat.nbytes, mmap.MADV_WILLNEED)
        return flat.view(dtype.bits).reshape(shape)

    def changed(self) -> str | None:
        """The file's size and time, then and now, if they differ. None if they do not, or if the file was removed,
        since the map keeps its bytes."""
        try:
            now = self.path.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"{self.path}: {error.strerror or error}"
        return change(self.path, self._found, now)

    def forget(self) -> None:
        """Drops touched pages; views stay valid and read them again."""
        _LIBC.madvise(self._map.ctypes.data, self.size, mmap.MADV_DONTNEED)


def _mapped(descriptor: int, size: int) -> NDArray[np.uint8]:
    """Maps as mmap.mmap with ACCESS_COPY, which before Python 3.13 keeps a descriptor: of a checkpoint in 1,000 files
    more than a process may usually have. Unmapped when it and its views are gone."""
    writable = mmap.PROT_READ | mmap.PROT_WRITE  # torch needs it
    address = _LIBC.mmap(None, size, writable, mmap.MAP_PRIVATE, descriptor, 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    made = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(made, _LIBC.munmap, address, size).atexit = False  # threads may read until the end
    return np.frombuffer(memoryview(made), np.uint8)


def change(path: Path, was: os.stat_result | None, now: os.stat_result | None) -> str | None:
    """The file's size and time, then and now, if they differ; ``None`` is of a file that is not there."""
    kept = was and now and (now.st_size, now.st_mtime_ns) == (was.st_size, was.st_mtime_ns)
    return None if kept else f"{path}: {_describe_entry(was)}, then {_describe_entry(now)}"


def _describe_entry(stat: os.stat_result | None) -> str:
    if stat is None:
        return "not there"
    time = datetime.fromtimestamp(stat.st_mtime, UTC).isoformat(sep=" ", timespec="milliseconds")
    return f"{stat.st_size} bytes of {time}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a safetensors file."""

    dtype: DType
    shape: Shape
    start: int  # byte in the file
    stop: int

    def view(self, file: MappedFile) -> Bits:
        """A view of the tensor, without reading it."""
        return file.array(self.dtype, self.shape, self.start)


@dataclass(frozen=True, slots=True)
class _HeaderEntry:
    """One tensor's entry in a header; offsets count from the header's end."""

    dtype: str
    shape: Annotated[list[_Size], Field(max_length=_MAX_DIMS)]
    data_offsets: tuple[_Size, _Size]


_HEADER: TypeAdapter[dict[str, _HeaderEntry | dict[str, str]]] = TypeAdapter(dict[str, _HeaderEntry | dict[str, str]])


def read_header(file: MappedFile) -> dict[str, Entry]:
    """The tensors of a safetensors file by name. Raises CheckpointError if it is torn or of another format."""
    length = int.from_bytes(file.bytes(0, 8), "little")
    try:
        if length > min(file.size, _MAX_HEADER_BYTES):
            raise ValueError(f"a header of {length} bytes in a file of {file.size}")
        header = _HEADER.validate_json(file.bytes(8, 8 + length), strict=True)
        header.pop("__metadata__", None)
        out = {name: _entry(raw, 8 + length) for name, raw in header.items()}
    except ValidationError as error:
        raise _torn(file.path, error.errors(include_url=False)[0]["msg"][:200]) from error
    except ValueError as error:
        raise _torn(file.path, str(error)[:200]) from error
    end = max((entry.stop for entry in out.values()), default=8 + length)
    if end != file.size:
        raise CheckpointError(f"{file.path} is torn: it has {file.size} bytes, not {end}; fetch it again")
    return out


def _entry(raw: _HeaderEntry | dict[str, str], base: int) -> Entry:
    if isinstance(raw, dict):
        raise ValueError("a tensor without a shape or offsets")
    if raw.dtype not in DType.__members__:
        raise ValueError(f"dtype {raw.dtype[:40]!r} is not supported; allowed: {', '.join(DType.__members__)}")
    start, stop = raw.data_offsets
    entry = Entry(dtype=DType[raw.dtype], shape=tuple(raw.shape), start=base + start, stop=base + stop)
    if entry.stop - entry.start != prod(entry.shape) * entry.dtype.itemsize:
        raise ValueError(f"offsets {raw.data_offsets} do not fit shape {raw.shape[:_MAX_DIMS]}")
    return entry


def _torn(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is torn or not a safetensors file ({why}); fetch it again")


def header_bytes(tensors: Sequence[tuple[str, DType, Shape]]) -> bytes:
    """The header of a safetensors file whose tensors follow in this order, without gaps."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        size = prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtype.name, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
