"""Reads and writes megatron's ``torch_dist`` checkpoints without megatron, torch, a process group or a model.

Upstream: torch ``distributed/checkpoint`` (``filesystem.py``, ``metadata.py``): files ``*.distcp`` hold one zip, as
torch.save writes it, per chunk; ``.metadata`` is a pickle that says where each chunk of each tensor is.
``torch_pickle`` handles the pickles; ``megatron`` says which tensor holds which parameter.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from rl_megatron.errors import CheckpointError
from rl_megatron.files import write_atomically
from rl_megatron.weights.boxes import Shape
from rl_megatron.weights.bytes.dtypes import Bits, DType
from rl_megatron.weights.bytes.mapped import MappedFile
from rl_megatron.weights.formats import torch_pickle
from rl_megatron.weights.formats.hf_folder import is_plain

_INDEX = ".metadata"
_ALIGNMENT = 64  # bytes; tensors in the file are aligned as with torch.save, so that a map can be read in place
_ZIP_HEAD, _ZIP_FIELD, _ZIP64_FIELD = 30, 4, 20  # bytes of an entry's head, of an extra field's, of the one for size
_PADDING_ID = b"FB"  # the extra field in which torch.save pads
_SETTINGS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of a stacked tensor, and the zip in a file that holds it."""

    key: str
    offsets: Shape
    sizes: Shape
    dtype: DType
    file: str
    start: int
    length: int


def write_tensor(file: IO[bytes], dtype: DType, shape: Shape, blocks: Iterable[Bits]) -> int:
    """Appends a tensor as torch.save would, from contiguous ``blocks`` in order. Returns the bytes written.

    Entries have a fixed time, so that equal input gives an equal file.
    """
    start = file.tell()
    size = prod(shape) * dtype.itemsize
    with zipfile.ZipFile(cast("IO[bytes]", _From(file, start)), "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), torch_pickle.tensor(dtype, shape))
        archive.writestr(zipfile.ZipInfo("archive/byteorder"), b"little")
        data = zipfile.ZipInfo("archive/data/0")
        large = size >= 1 << 31
        head = file.tell() + _ZIP_HEAD + len(data.filename) + _ZIP_FIELD + (_ZIP64_FIELD if large else 0)
        padding = -head % _ALIGNMENT
        data.extra = _PADDING_ID + padding.to_bytes(2, "little") + bytes(padding)
        with archive.open(data, "w", force_zip64=large) as entry:
            for block in blocks:
                entry.write(block.reshape(-1).view(np.uint8).data)
        archive.writestr(zipfile.ZipInfo("archive/version"), b"3\n")
    return file.tell() - start


class _From:
    """A file seen from its present position, where a zip begins."""

    def __init__(self, file: IO[bytes], start: int) -> None:
        self._file, self._start = file, start

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell() - self._start

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset + (self._start if whence == 0 else 0), whence) - self._start

    def flush(self) -> None:
        self._file.flush()


def write_index(folder: Path, chunks: Sequence[Chunk], sizes: Mapping[str, Shape]) -> None:
    """Writes ``.metadata``, ``metadata.json`` and ``common.pt`` next to the ``chunks``' files; ``sizes`` are global."""
    held: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        held.setdefault(chunk.key, []).append(chunk)
    tensors, places = {}, []
    for key, own in held.items():
        tensors[key] = torch_pickle.tensor_entry(own[0].dtype, sizes[key], [(c.offsets, c.sizes) for c in own])
        places += [
            (torch_pickle.index(key, c.offsets, i), torch_pickle.storage(c.file, c.start, c.length))
            for i, c in enumerate(own)
        ]
    common = io.BytesIO()
    with zipfile.ZipFile(common, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), pickle.dumps({}, protocol=2))
        archive.writestr(zipfile.ZipInfo("archive/byteorder"), b"little")
        archive.writestr(zipfile.ZipInfo("archive/version"), b"3\n")
    write_atomically(folder / "common.pt", common.getvalue())
    write_atomically(folder / _INDEX, torch_pickle.metadata(tensors, places))
    write_atomically(folder / "metadata.json", json.dumps(_SETTINGS).encode())  # last, because readers look for it


def read_index(folder: Path) -> tuple[dict[str, Shape], list[Chunk]]:
    """The global size of every tensor, and its chunks. Raises CheckpointError if the index is missing or torn."""
    path = folder / _INDEX
    if not path.is_file():
        raise CheckpointError(f"{folder}: it has no {_INDEX}; give the folder of a megatron torch_dist checkpoint")
    try:
        whole = torch_pickle.read(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        tensors = {key: value for key, value in whole.state_dict_metadata.items() if hasattr(value, "chunks")}
        sizes = {key: _shape(value.size) for key, value in tensors.items()}
        boxes = {key: _boxes(key, value.chunks) for key, value in tensors.items()}
        chunks = [
            _chunk(index, info, tensors[index.fqn], boxes[index.fqn])
            for index, info in whole.storage_data.items()
            if index.fqn in tensors
        ]
        for chunk in chunks:
            _check(chunk, sizes[chunk.key])
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is torn ({str(error)[:200]}); fetch or write the checkpoint again") from error
    return sizes, chunks


def _boxes(key: str, chunks: Sequence[Any]) -> dict[Shape, Any]:
    """The size of each chunk of a tensor, by its offsets. Raises ValueError if two have the same."""
    sizes = {chunk.offsets: chunk.sizes for chunk in chunks}
    if len(sizes) < len(chunks):
        raise ValueError(f"{len(chunks)} chunks of {key} at {len(sizes)} places")
    return sizes


def _chunk(index: Any, info: Any, tensor: Any, sizes: Mapping[Shape, Any]) -> Chunk:
    return Chunk(
        key=index.fqn,
        offsets=_shape(index.offset),
        sizes=_shape(sizes[index.offset]),
        dtype=DType(tensor.properties.state[0]),
        file=info.relative_path,
        start=info.offset,
        length=info.length,
    )


def _shape(value: Any) -> Shape:
    if not isinstance(value, tuple) or not all(type(size) is int and size >= 0 for size in value):
        raise ValueError(f"{str(value)[:40]} is not a shape")
    return value


def _check(chunk: Chunk, size: Shape) -> None:
    """Raises ValueError if a chunk exceeds its tensor or its bytes, or its file is outside of the folder."""
    if not (len(chunk.offsets) == len(chunk.sizes) == len(size)) or any(
        o + s > whole for o, s, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
    ):
        raise ValueError(f"a chunk {chunk.offsets} {chunk.sizes} of {chunk.key} outside of {size}")
    (start, length) = _shape((chunk.start, chunk.length))
    if prod(chunk.sizes) * chunk.dtype.itemsize > length or start + length >= 1 << 62:
        raise ValueError(f"a chunk {chunk.sizes} of {chunk.key} in {length} bytes")
    if not isinstance(chunk.file, str) or not is_plain(chunk.file):
        raise ValueError(f"a file {str(chunk.file)[:80]!r}, which is not in the folder")


def open_chunk(file: MappedFile, chunk: Chunk) -> zipfile.ZipFile:
    """The zip of a chunk. Raises CheckpointError if it is torn."""
    where = _where(file, chunk)
    if chunk.start + chunk.length > file.size:
        raise CheckpointError(f"{where}: the file has {file.size} bytes; it is torn")
    try:
        return zipfile.ZipFile(_Window(file, chunk.start, chunk.length))
    except _ZIP_ERRORS as error:
        raise CheckpointError(f"{where}: torn, or not written by torch.save ({error})") from error


def read_tensor(file: MappedFile, chunk: Chunk) -> Bits:
    """A view of a chunk's data in its file. Raises CheckpointError if the zip is torn or holds another chunk."""
    where, archive = _where(file, chunk), open_chunk(file, chunk)
    try:
        if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in archive.infolist()):
            raise ValueError("compressed or encrypted")
        pickled = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        dtype, offset, shape, stride = torch_pickle.read(archive.read(pickled), where)
        entry = archive.getinfo(f"{pickled[: -len('data.pkl')]}data/0")
        shape, stride, (offset, _) = _shape(shape), _shape(stride), _shape((offset, 0))
    except (*_ZIP_ERRORS, StopIteration, KeyError, TypeError) as error:
        raise CheckpointError(f"{where}: torn, or not written by torch.save ({str(error)[:200]})") from error
    if shape != chunk.sizes or dtype != chunk.dtype:
        raise CheckpointError(f"{where}: it holds {dtype} {shape}, but the index says {chunk.dtype} {chunk.sizes}")
    head = chunk.start + entry.header_offset
    names = int.from_bytes(file.bytes(head + 26, head + 28), "little")
    extra = int.from_bytes(file.bytes(head + 28, head + 30), "little")
    begin = head + 30 + names + extra
    if begin + entry.file_size > chunk.start + chunk.length:
        raise CheckpointError(f"{where}: {entry.file_size} bytes of data exceed its end; it is torn")
    flat = file.array(dtype, (entry.file_size // dtype.itemsize,), begin)[offset:]
    steps = tuple(step * dtype.itemsize for step in stride)
    reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=False))
    if len(stride) != len(shape) or (0 not in shape and reach >= len(flat)):
        raise CheckpointError(f"{where}: {shape} with strides {stride} exceeds {len(flat)} elements; it is torn")
    strided: Bits = np.lib.stride_tricks.as_strided(flat, shape, steps)
    return strided


def _where(file: MappedFile, chunk: Chunk) -> str:
    return f"{file.path}, bytes {chunk.start} to {chunk.start + chunk.length} ({chunk.key} {chunk.offsets})"


_ZIP_ERRORS = (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError, RuntimeError, struct.error)


class _Window(io.RawIOBase):
    """A range of a mapped file, as a file."""

    def __init__(self, file: MappedFile, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def read(self, count: int = -1) -> bytes:
        stop = self._length if count < 0 else min(self._at + count, self._length)
        data = self._file.bytes(self._start + self._at, self._start + stop)
        self._at = stop
        return data
