"""Megatron's ``torch_dist`` checkpoints, read and written without megatron, a process group or a model.

Upstream: torch ``distributed/checkpoint`` (``filesystem.py``, ``metadata.py``): files ``*.distcp`` hold one zip, as
torch.save writes it, per chunk; ``.metadata`` is a pickle that says which chunk of which tensor lies where. Megatron
stacks layers and experts: ``decoder.layers.3.x`` is chunk (3, ...) of ``decoder.layers.x``. Both pickles are read by
an unpickler that knows a dozen harmless names and refuses all others.
"""

from __future__ import annotations

import collections
import io
import json
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint.filesystem as filesystem
import torch.distributed.checkpoint.metadata as metadata
from torch import Tensor

from rl_megatron.durable import write_atomically
from rl_megatron.errors import CheckpointError
from rl_megatron.weights.layout import Shape
from rl_megatron.weights.mapped import MappedFile

_INDEX = ".metadata"
_ALIGNMENT = 64  # of tensors in the file, as torch.save's, so that a map of it can be read in place
_ZIP_HEAD, _ZIP_FIELD, _ZIP64_FIELD = 30, 4, 20  # bytes of an entry's head, of an extra field's, of the one for size
_INERT = ("torch.distributed.checkpoint.", "megatron.core.")
_PADDING_ID = b"FB"  # the extra field in which torch.save pads
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
_EXPERT = re.compile(r"^mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
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
    dtype: torch.dtype
    file: str
    start: int
    length: int


def place_of(param: str) -> tuple[str, Shape]:
    """The stacked tensor's name and the leading indices of a parameter under global names (weights/tables)."""
    layer = _LAYER.match(param)
    if layer is None:
        return param, ()
    expert = _EXPERT.match(layer[2])
    if expert is None:
        return f"decoder.layers.{layer[2]}", (int(layer[1]),)
    return f"decoder.layers.mlp.experts.experts.{expert[1]}.weight", (int(layer[1]), int(expert[2]))


class _Storage:
    """Stands for the storage of a tensor that is written by hand."""

    def __init__(self, dtype: torch.dtype, count: int) -> None:
        self.identity = ("storage", _STORAGES[dtype], "0", "cpu", count)


class _Contiguous:
    """Pickles as the tensor that the bytes behind it make."""

    def __init__(self, dtype: torch.dtype, shape: Shape) -> None:
        self._dtype, self._shape = dtype, shape

    def __reduce__(self) -> tuple[Any, ...]:
        count = torch.Size(self._shape).numel()
        stride = torch.empty(self._shape, device="meta").stride()
        storage = _Storage(self._dtype, count)
        rebuild = torch._utils._rebuild_tensor_v2
        return rebuild, (storage, 0, self._shape, stride, False, collections.OrderedDict())


class _TensorPickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.identity if isinstance(value, _Storage) else None


_STORAGES: Mapping[torch.dtype, type] = {
    torch.float32: torch.FloatStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float16: torch.HalfStorage,
    torch.float64: torch.DoubleStorage,
}


def write_tensor(file: IO[bytes], dtype: torch.dtype, shape: Shape, blocks: Iterable[Tensor]) -> int:
    """Append a tensor as torch.save would, its bytes from ``blocks`` (contiguous, in order); the bytes written."""
    start = file.tell()
    pickled = io.BytesIO()
    _TensorPickler(pickled, protocol=2).dump(_Contiguous(dtype, shape))
    size = torch.Size(shape).numel() * dtype.itemsize
    with zipfile.ZipFile(cast("IO[bytes]", _From(file, start)), "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_fixed("archive/data.pkl"), pickled.getvalue())
        archive.writestr(_fixed("archive/byteorder"), b"little")
        data = _fixed("archive/data/0")
        large = size >= 1 << 31
        head = file.tell() + _ZIP_HEAD + len(data.filename) + _ZIP_FIELD + (_ZIP64_FIELD if large else 0)
        padding = -head % _ALIGNMENT
        data.extra = _PADDING_ID + padding.to_bytes(2, "little") + bytes(padding)
        with archive.open(data, "w", force_zip64=large) as entry:
            for block in blocks:
                entry.write(block.view(-1).view(torch.uint8).numpy().data)
        archive.writestr(_fixed("archive/version"), b"3\n")
    return file.tell() - start


def _fixed(name: str) -> zipfile.ZipInfo:
    """An entry without the time of day: the same input makes the same file."""
    return zipfile.ZipInfo(name)


class _From:
    """A file as a zip sees it that begins in its middle."""

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
    """``.metadata``, ``metadata.json`` and ``common.pt`` beside the files of ``chunks``; ``sizes`` are global."""
    tensors: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for chunk in chunks:
        if chunk.key not in tensors:
            properties = metadata.TensorProperties(dtype=chunk.dtype)
            tensors[chunk.key] = metadata.TensorStorageMetadata(
                properties=properties, size=torch.Size(sizes[chunk.key]), chunks=[]
            )
        listed = tensors[chunk.key].chunks
        index = metadata.MetadataIndex(chunk.key, torch.Size(chunk.offsets), len(listed))
        listed.append(metadata.ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
        places[index] = filesystem._StorageInfo(chunk.file, chunk.start, chunk.length)
    whole = metadata.Metadata(state_dict_metadata=tensors, storage_data=places)
    common = io.BytesIO()
    torch.save({}, common)
    write_atomically(folder / "common.pt", common.getvalue())
    write_atomically(folder / _INDEX, pickle.dumps(whole))
    write_atomically(folder / "metadata.json", json.dumps(_SETTINGS).encode())  # last: what a reader looks for


class _Inert:
    """Stands for what an index holds beside the places of chunks: plans of who wrote what. Nothing of it runs."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...


class _Careful(pickle.Unpickler):
    """Knows only what these pickles are made of."""

    allowed: Mapping[tuple[str, str], Any] = {
        **{
            (metadata.__name__, name): getattr(metadata, name)
            for name in (
                "Metadata",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "TensorProperties",
                "MetadataIndex",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        },
        (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): lambda storage, offset, shape, stride, *_: (
            storage,
            offset,
            shape,
            stride,
        ),
        **{("torch", kind.__name__): dtype for dtype, kind in _STORAGES.items()},
    }

    def __init__(self, data: bytes, source: str) -> None:
        super().__init__(io.BytesIO(data))
        self._source = source

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.allowed:
            return self.allowed[module, name]
        dtype = getattr(torch, name, None)
        if module == "torch" and isinstance(dtype, torch.dtype):
            return dtype
        if module.startswith(_INERT):
            return _Inert
        raise CheckpointError(f"{self._source} names {module}.{name}, which no such checkpoint needs; it is not read")

    def persistent_load(self, identity: Any) -> Any:
        return identity[1]  # the dtype


def read_index(folder: Path) -> tuple[dict[str, Shape], list[Chunk]]:
    """Global size of every tensor and where its chunks lie. Raises CheckpointError where it is missing or torn."""
    path = folder / _INDEX
    if not path.is_file():
        raise CheckpointError(f"{folder}: no {_INDEX} there; give the folder of a megatron torch_dist checkpoint")
    try:
        whole = _Careful(path.read_bytes(), str(path)).load()
        tensors = {
            key: value
            for key, value in whole.state_dict_metadata.items()
            if isinstance(value, metadata.TensorStorageMetadata)
        }
        chunks = [
            _chunk(index, info, tensors[index.fqn])
            for index, info in whole.storage_data.items()
            if index.fqn in tensors
        ]
    except (pickle.UnpicklingError, EOFError, AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is torn ({error}); fetch or write the checkpoint again") from error
    return {key: tuple(value.size) for key, value in tensors.items()}, chunks


def _chunk(index: Any, info: Any, tensor: Any) -> Chunk:
    offsets = tuple(index.offset)
    (found,) = (c for c in tensor.chunks if tuple(c.offsets) == offsets)
    return Chunk(
        key=index.fqn,
        offsets=offsets,
        sizes=tuple(found.sizes),
        dtype=tensor.properties.dtype,
        file=info.relative_path,
        start=info.offset,
        length=info.length,
    )


def open_chunk(file: MappedFile, chunk: Chunk) -> zipfile.ZipFile:
    """The zip of a chunk. Raises CheckpointError where it is torn."""
    where = _where(file, chunk)
    if chunk.start + chunk.length > file.size:
        raise CheckpointError(f"{where}: the file has {file.size} bytes; it is torn")
    try:
        return zipfile.ZipFile(_Window(file, chunk.start, chunk.length))
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{where}: torn, or not written by torch.save ({error})") from error


def read_tensor(file: MappedFile, chunk: Chunk) -> Tensor:
    """A view of a chunk's data in its file. Raises CheckpointError where the zip is torn or not of this chunk."""
    where, archive = _where(file, chunk), open_chunk(file, chunk)
    try:
        pickled = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        dtype, offset, shape, stride = _Careful(archive.read(pickled), where).load()
        entry = archive.getinfo(f"{pickled[: -len('data.pkl')]}data/0")
    except (zipfile.BadZipFile, StopIteration, KeyError, pickle.UnpicklingError, ValueError, TypeError) as error:
        raise CheckpointError(f"{where}: torn, or not written by torch.save ({error})") from error
    if tuple(shape) != chunk.sizes or dtype != chunk.dtype:
        raise CheckpointError(f"{where}: holds {dtype} {tuple(shape)}, the index tells of {chunk.dtype} {chunk.sizes}")
    head = chunk.start + entry.header_offset
    names = int.from_bytes(file.bytes(head + 26, head + 28), "little")
    extra = int.from_bytes(file.bytes(head + 28, head + 30), "little")
    flat = file.tensor(dtype, (entry.file_size // dtype.itemsize,), head + 30 + names + extra)
    return flat.as_strided(tuple(shape), tuple(stride), int(offset))


def _where(file: MappedFile, chunk: Chunk) -> str:
    return f"{file.path}, bytes {chunk.start} to {chunk.start + chunk.length} ({chunk.key} {chunk.offsets})"


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
