"""Writes and reads the pickles in torch's files without torch; reading never runs code.

Upstream: torch ``serialization.py`` (a tensor is ``_rebuild_tensor_v2`` of a storage that is named by a persistent id)
and ``distributed/checkpoint/metadata.py`` (the index of a checkpoint). Writing spells out the few opcodes that make
those objects; reading knows a dozen harmless names and refuses others.
"""

from __future__ import annotations

import collections
import io
import pickle
import pickletools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_megatron.errors import CheckpointError
from rl_megatron.weights.boxes import Shape
from rl_megatron.weights.bytes.dtypes import DType

_INERT = ("torch.distributed.checkpoint.", "megatron.core.")
_STORAGES: Mapping[str, DType] = {
    "FloatStorage": DType.F32,
    "BFloat16Storage": DType.BF16,
    "HalfStorage": DType.F16,
    "DoubleStorage": DType.F64,
}
_STORAGE_OF = {dtype: name for name, dtype in _STORAGES.items()}


@dataclass(frozen=True, slots=True)
class _Name:
    """A class or function, by where it is found."""

    module: str
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """The result of ``function(*arguments)``, with ``state`` set on it, where there is one."""

    function: _Name
    arguments: tuple[Any, ...] = ()
    state: Any = None


@dataclass(frozen=True, slots=True)
class _Stored:
    """The storage of a tensor's bytes; torch finds them by this id."""

    identity: tuple[Any, ...]


class _Writer:
    """Spells objects out: pickle itself would import what it writes the name of."""

    def __init__(self) -> None:
        self._parts = [pickle.PROTO, b"\x02"]
        self._known: dict[_Name, bytes] = {}

    def dumps(self, value: object) -> bytes:
        self._save(value)
        return b"".join([*self._parts, pickle.STOP])

    def _save(self, value: object) -> None:
        if isinstance(value, _Name):
            self._save_name(value)
        elif isinstance(value, _Stored):
            self._save(value.identity)
            self._parts.append(pickle.BINPERSID)
        elif isinstance(value, _Call):
            self._save_all(value.function, value.arguments)
            self._parts.append(pickle.REDUCE)
            if value.state is not None:
                self._save(value.state)
                self._parts.append(pickle.BUILD)
        elif isinstance(value, tuple):
            self._parts.append(pickle.MARK)
            self._save_all(*value)
            self._parts.append(pickle.TUPLE)
        elif isinstance(value, list):
            self._parts += [pickle.EMPTY_LIST, pickle.MARK]
            self._save_all(*value)
            self._parts.append(pickle.APPENDS)
        elif isinstance(value, dict):
            self._parts += [pickle.EMPTY_DICT, pickle.MARK]
            self._save_all(*(part for item in value.items() for part in item))
            self._parts.append(pickle.SETITEMS)
        else:
            self._parts.append(pickle.dumps(value, protocol=2)[2:-1])  # an atom, which remembers itself in slot 0

    def _save_all(self, *values: object) -> None:
        for value in values:
            self._save(value)

    def _save_name(self, value: _Name) -> None:
        if value in self._known:
            self._parts += [pickle.BINGET, self._known[value]]
            return
        slot = self._known[value] = bytes([len(self._known) + 1])
        self._parts += [pickle.GLOBAL, f"{value.module}\n{value.name}\n".encode(), pickle.BINPUT, slot]


_DCP, _ENTRIES = "torch.distributed.checkpoint.filesystem", "torch.distributed.checkpoint.metadata"
_NEW, _OBJECT = _Name("copyreg", "_reconstructor"), _Name("builtins", "object")
_SIZE, _REBUILD, _ORDERED = (
    _Name("torch", "Size"),
    _Name("torch._utils", "_rebuild_tensor_v2"),
    _Name("collections", "OrderedDict"),
)
_METADATA, _TENSOR, _CHUNK, _PROPERTIES, _INDEX = (
    _Name(_ENTRIES, name)
    for name in ("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex")
)
_STORAGE = _Name(_DCP, "_StorageInfo")
_CONTIGUOUS = _Call(_Name(_ENTRIES, "_MEM_FORMAT_ENCODING"), (0,))
_STRIDED = _Call(_Name("torch.serialization", "_get_layout"), ("torch.strided",))
_DTYPES = {dtype: _Name("torch", str(dtype)) for dtype in DType}


def _object(kind: _Name, state: object) -> _Call:
    return _Call(_NEW, (kind, _OBJECT, None), state)


def _size(shape: Shape) -> _Call:
    return _Call(_SIZE, (shape,))


def tensor(dtype: DType, shape: Shape) -> bytes:
    """The pickle of a contiguous tensor in storage "0". Raises CheckpointError for a dtype without a storage class."""
    if dtype not in _STORAGE_OF:
        raise CheckpointError(f"a torch_dist checkpoint cannot hold {dtype}; allowed: {', '.join(_STORAGE_OF)}")
    strides, count = [], 1
    for size in reversed(shape):
        strides.append(count)
        count *= size
    storage = _Stored(("storage", _Name("torch", _STORAGE_OF[dtype]), "0", "cpu", count))
    return _Writer().dumps(_Call(_REBUILD, (storage, 0, shape, tuple(reversed(strides)), False, _Call(_ORDERED))))


def tensor_entry(dtype: DType, size: Shape, chunks: Sequence[tuple[Shape, Shape]]) -> object:
    """A tensor's entry in an index; ``chunks`` are (offsets, sizes)."""
    boxes = [_object(_CHUNK, {"offsets": _size(offsets), "sizes": _size(sizes)}) for offsets, sizes in chunks]
    properties = _object(_PROPERTIES, (_DTYPES[dtype], _STRIDED, False, _CONTIGUOUS, False))
    return _object(_TENSOR, {"properties": properties, "size": _size(size), "chunks": boxes})


def index(key: str, offsets: Shape, number: int) -> object:
    """The index's key of a tensor's ``number``-th chunk."""
    return _object(_INDEX, {"fqn": key, "offset": _size(offsets), "index": number})


def storage(file: str, start: int, length: int) -> object:
    """The place of a chunk: its file, start and length."""
    return _object(_STORAGE, {"relative_path": file, "offset": start, "length": length})


def metadata(tensors: Mapping[str, object], places: Sequence[tuple[object, object]]) -> bytes:
    """The index of a checkpoint: `tensor_entry` of each tensor, and of each chunk its `index` and its `storage`."""
    absent = dict.fromkeys(("planner_data", "storage_meta", "version"))
    state = {"state_dict_metadata": dict(tensors), "storage_data": dict(places), **absent}
    return _Writer().dumps(_object(_METADATA, state))


class _Record:
    """An object of an index, with its attributes or the state that its class restores."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


def _reconstruct(kind: type[_Record], *_: object) -> _Record:
    return kind()


def _member(kind: object, name: object) -> _Record:
    """The member of an enumeration, which Python 3.11.0 to 3.11.3 pickle as ``getattr(class, name)``."""
    if kind is not _Record or not isinstance(name, str):
        raise pickle.UnpicklingError(f"getattr of {kind!r}, which is no enumeration")
    return kind()


class _Careful(pickle.Unpickler):
    """Resolves only the names that these pickles need."""

    allowed: Mapping[tuple[str, str], Any] = {
        ("copyreg", "_reconstructor"): _reconstruct,
        ("builtins", "object"): None,
        ("builtins", "getattr"): _member,
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("torch", "Size"): tuple,
        ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),  # the folder where the checkpoint was saved
        ("pathlib._local", "PosixPath"): lambda *parts: "/".join(parts),  # Python 3.13's name of it
        ("torch.serialization", "_get_layout"): str,
        ("torch._utils", "_rebuild_tensor_v2"): lambda storage, offset, shape, stride, *_: (
            storage,
            offset,
            tuple(shape),
            tuple(stride),
        ),
        **{("torch", name): dtype for name, dtype in _STORAGES.items()},
        **{("torch", str(dtype)): dtype for dtype in DType},
    }

    def __init__(self, data: bytes, source: str) -> None:
        super().__init__(io.BytesIO(data))
        self._source = source

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.allowed:
            return self.allowed[module, name]
        if module.startswith(_INERT):
            return _Record
        raise CheckpointError(f"{self._source} names {module}.{name}, which no checkpoint needs; it is refused")

    def persistent_load(self, identity: Any) -> Any:
        return identity[1]  # the dtype


_SLOTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})  # opcodes with a slot of the memo
_FOREIGN = frozenset({"BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER", "EXT1", "EXT2", "EXT4", "INST", "OBJ"})


def read(data: bytes, source: str) -> Any:
    """The object of a pickle: a tensor is (dtype, offset, shape, stride), an index has attributes as torch's.

    Raises CheckpointError if it names anything else or is torn.
    """
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in _SLOTS and int(argument or 0) > len(data):  # pickle would allocate so many
                raise pickle.UnpicklingError(f"slot {argument} in {len(data)} bytes")
            if opcode.name in _FOREIGN:
                raise pickle.UnpicklingError(f"{opcode.name}, which torch does not write")
        return _Careful(data, source).load()
    except CheckpointError:
        raise
    except Exception as error:  # torn bytes make pickle raise anything
        said = str(error).splitlines()[:1] or [""]
        raise CheckpointError(
            f"{source} is torn ({type(error).__name__}: {said[0][:200]}); fetch or write it again"
        ) from error
