"""Files as tensors without reading them: memory maps that can be let go of, and the safetensors header.

A page of a map that was touched counts as this process's memory until `MappedFile.forget`; the page cache keeps it.
Format: huggingface/safetensors (8 bytes of header length, a JSON header, then the tensors' bytes).
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rl_megatron.errors import CheckpointError
from rl_megatron.weights.layout import Shape

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
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

    def tensor(self, dtype: torch.dtype, shape: Shape, start: int) -> Tensor:
        """A contiguous view of the map."""
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        flat: Tensor = torch.frombuffer(self._map, dtype=torch.uint8, count=count * dtype.itemsize, offset=start)
        return flat.view(dtype).view(shape) if start % dtype.itemsize == 0 else flat.clone().view(dtype).view(shape)

    def forget(self) -> None:
        """Let go of the pages that were touched; views stay valid and read them again."""
        self._map.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a safetensors file."""

    dtype: torch.dtype
    shape: Shape
    start: int  # byte in the file
    stop: int

    def view(self, file: MappedFile) -> Tensor:
        """The tensor, not read."""
        return file.tensor(self.dtype, self.shape, self.start)


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
        dtype=DTYPES[str(raw["dtype"])], shape=tuple(shape), start=base + int(offsets[0]), stop=base + int(offsets[1])
    )
    if entry.stop - entry.start != torch.Size(entry.shape).numel() * entry.dtype.itemsize:
        raise ValueError(f"offsets {offsets} do not fit shape {shape}")
    return entry


def header_bytes(tensors: Sequence[tuple[str, torch.dtype, Shape]]) -> bytes:
    """The head of a safetensors file whose tensors follow in this order, without gaps."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        size = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
