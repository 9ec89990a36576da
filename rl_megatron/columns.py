"""Columns: numpy arrays with one number for each token of a completion, or prompt, and their form in a checkpoint.

They are read-only: custom rewards see the arrays that are trained on. Texts of completions have that form in
checkpoints too: Python's lock is held while JSON is made of these gigabytes.

A `Column` is an additional output of engines for each token, next to its id and log-prob, for the learner to read. A
feature declares it. All code between an engine's response and the learner's pass treats all columns alike.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from typing_extensions import override

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from pydantic import SerializationInfo, ValidationInfo

    from rl_megatron.models.shape import ModelShape

_DTYPES = {
    "tokens": "<i4",
    "logprobs": "<f4",
    "columns": "|u1",
    "texts": "|u1",
    "visits": "<i4",
    "rates": "<f8",
    "retired": "<i4",
}
_OLD = "routes"  # the only column of older checkpoints, in a file and a field of this name


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """An output of engines for each token, for the learner to read, in the order of a row's positions.

    ``of``: an engine returns one entry for each position of prompt and completion (each token but the last), or for
    each ``sampled`` token. Rows to train on have an entry for every position: positions whose target was not sampled
    have zeros, or no values.
    """

    name: str
    of: Literal["positions", "sampled"]
    padding: Literal["zeros", "distinct"] = "zeros"  # values of padding; distinct: 0, 1, … in the last dimension
    layers: Callable[[ModelShape], Sequence[int]] | None = None
    """The policy decoder's layers that the second dimension has entries for. Each rank gets the entries of its own
    layers. Only the policy reads the column, which must not be `Ragged`."""


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """A column with any number of values a position: the values of all positions in order, and their number at each
    position, int32. Both are numpy arrays in completions and rows, and tensors in samples."""

    values: Any  # [V, …]
    counts: Any  # [N] int32; their sum is V

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, of: slice) -> Ragged:
        """Returns the positions of a slice of step 1."""
        first, stop, _ = of.indices(len(self))
        begin = int(self.counts[:first].sum())
        end = begin + int(self.counts[first:stop].sum())
        return Ragged(self.values[begin:end], self.counts[first:stop])

    @property
    def nbytes(self) -> int:
        """Bytes of values and counts."""
        return int(self.values.nbytes + self.counts.nbytes)


ColumnData: TypeAlias = "NDArray[Any] | Ragged"
"""A column of one completion or row: [positions, …], or `Ragged`."""


def one_after_the_other(parts: Sequence[ColumnData]) -> ColumnData:
    """Concatenates the parts of one column."""
    import numpy as np

    if isinstance(parts[0], Ragged):
        return Ragged(*(np.concatenate([getattr(one, of) for one in parts]) for of in ("values", "counts")))
    whole: NDArray[Any] = np.concatenate(parts)  # type: ignore[arg-type]
    return whole


def blank(like: ColumnData, positions: int) -> ColumnData:
    """Returns a column of ``positions`` zeros, or of positions without values if ``like`` is `Ragged`."""
    import numpy as np

    if isinstance(like, Ragged):
        return Ragged(like.values[:0], np.zeros(positions, np.int32))
    return np.zeros((positions, *like.shape[1:]), like.dtype)


def written_column(column: ColumnData, put: Callable[[NDArray[np.uint8]], object]) -> dict[str, object]:
    """Returns the column's JSON; ``put`` returns the form of its bytes."""
    values = column.values if isinstance(column, Ragged) else column
    said = {"data": put(_bytes_of(values)), "shape": list(values.shape), "dtype": values.dtype.str}
    return said | {"counts": put(_bytes_of(column.counts))} if isinstance(column, Ragged) else said


def read_column(encoded: Mapping[str, Any], get: Callable[[object], NDArray[np.uint8]]) -> ColumnData:
    """Inverts `written_column`. Raises ValueError for JSON that is not a column."""
    try:
        data, shape = get(encoded["data"]), tuple(encoded["shape"])
        written = encoded.get("dtype") or ("|u1" if len(data) <= math.prod(shape) else "<i2")  # older ones do not tell
        values = data.view(written).reshape(shape)
        counts = None if encoded.get("counts") is None else get(encoded["counts"]).view("<i4")
    except (KeyError, TypeError) as error:
        raise ValueError(f"no column: {error!r}") from error
    if values.dtype.kind not in "biuf":
        raise ValueError(f"no column: {values.dtype} is no type of numbers")
    if counts is None:
        return values
    if (counts < 0).any() or counts.sum() != len(values):
        raise ValueError(f"no column: its counts are of {counts.sum()} values, and it has {len(values)}")
    return Ragged(values, counts)


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    import numpy as np

    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)


class ColumnWriter:
    """The columns of a document with only [first index, count] of each in its JSON: pydantic's ``context`` of it.

    Each kind is a file of numpy's format, without pickles. ``tokens.npy`` has the tokens of all completions one after
    the other (int32), ``logprobs.npy`` float32, ``columns.npy`` the bytes of their `Column`s, and ``texts.npy`` UTF-8.
    """

    def __init__(self) -> None:
        self._parts: dict[str, list[NDArray[Any]]] = {}
        self._counts = Counter[str]()

    def add(self, kind: str, column: NDArray[Any]) -> tuple[int, int]:
        """Returns the column's place in the file. The column must not change until `write`."""
        place = self._counts[kind], len(column)
        self._parts.setdefault(kind, []).append(column)
        self._counts[kind] += len(column)
        return place

    def write(self, folder: Path) -> list[str]:
        """Creates ``folder`` with the files, if there are columns. Returns the files' names. Raises OSError."""
        import numpy as np

        for kind, parts in self._parts.items():
            folder.mkdir(exist_ok=True)
            header = {"descr": _DTYPES[kind], "fortran_order": False, "shape": (self._counts[kind],)}
            with (folder / f"{kind}.npy").open("wb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                for part in parts:
                    file.write(np.ascontiguousarray(part, _DTYPES[kind]).data)
        return [f"{kind}.npy" for kind in self._parts]


class ColumnReader:
    """The columns from a `ColumnWriter`; pydantic's ``context`` of the JSON that names their places."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        """Reads the files. Raises ValueError that names a file that is not a column of its kind, and OSError."""
        self._used = Counter[str]()
        self._files = {kind: folder / f"{kind}.npy" for kind in _DTYPES}
        self._columns = {_kind(name): self._read(folder / name) for name in names}

    def _read(self, path: Path) -> NDArray[Any]:
        import numpy as np

        kind = _kind(path)
        self._files[kind], wanted = path, _DTYPES.get(kind)
        if wanted is None or path.suffix != ".npy":
            raise ValueError(f"{path} is no column: these are {', '.join(f'{kind}.npy' for kind in _DTYPES)}")
        try:
            with path.open("rb") as file:
                column: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
        except ValueError as error:
            raise ValueError(f"{path} is no column of {np.dtype(wanted)}: {error}") from error
        if column.ndim != 1 or column.dtype != wanted:
            found = f"{column.dtype} of shape {column.shape}"
            raise ValueError(f"{path} is no column of {np.dtype(wanted)}: it has {found}")
        column.flags.writeable = False
        return column

    def get(self, kind: str, first: int, count: int) -> NDArray[Any]:
        """Returns the column at this place. Raises LookupError if it does not follow the one before, or is missing."""
        path = self._files[kind]
        if kind not in self._columns:
            raise LookupError(f"{path} is not among the checkpoint's files, and completions have their {kind} there")
        column, used = self._columns[kind], self._used[kind]
        if first != used or count < 0 or first + count > len(column):
            given = f"{path} has {len(column)} numbers, of which {used} are of other completions"
            raise LookupError(f"{given}, and the next has its {count} at {first}")
        self._used[kind] += count
        return column[first : first + count]

    def check(self) -> None:
        """Raises LookupError if a file has numbers that no completion names."""
        for kind, column in self._columns.items():
            if len(column) != self._used[kind]:
                path = self._files[kind]
                raise LookupError(f"{path} has {len(column)} numbers, of which {self._used[kind]} are completions'")


def _kind(name: str | Path) -> str:
    stem = Path(name).stem
    return "columns" if stem == _OLD else stem


@dataclass(frozen=True, slots=True)
class _Numbers:
    """A column in JSON: its place in a file next to it, or, without one, base64 of its little-endian numbers."""

    kind: str

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> Any:
        from pydantic_core import core_schema

        return core_schema.with_info_plain_validator_function(
            self.decoded,
            serialization=core_schema.plain_serializer_function_ser_schema(
                self.encoded, info_arg=True, when_used="json"
            ),
        )

    def encoded(self, column: Any, info: SerializationInfo) -> object:
        if isinstance(info.context, ColumnWriter):
            return info.context.add(self.kind, column)
        return base64.b64encode(column.astype(_DTYPES[self.kind], copy=False).tobytes()).decode()

    def decoded(self, given: object, info: ValidationInfo) -> Any:
        """Returns the column. Raises ValueError, which pydantic turns into its own error, for any other form."""
        if isinstance(info.context, ColumnReader) and isinstance(given, list):
            match given:
                case [int(first), int(count)]:
                    return info.context.get(self.kind, first, count)
        if not isinstance(given, str):
            raise ValueError(f"it must be base64 of {_DTYPES[self.kind]} numbers, not a {type(given).__name__}")
        import numpy as np

        return np.frombuffer(base64.b64decode(given, validate=True), _DTYPES[self.kind])


class _ByName(_Numbers):
    """The same for the bytes of each of several columns, by name, with their shapes and dtypes."""

    @override
    def encoded(self, columns: Any, info: SerializationInfo) -> object:
        put = super().encoded
        return {name: written_column(column, lambda array: put(array, info)) for name, column in columns.items()}

    @override
    def decoded(self, given: object, info: ValidationInfo) -> Any:
        get = super().decoded

        def decode_bytes(text: object) -> Any:  # older checkpoints have URL-safe base64
            return get(text.translate({ord("-"): "+", ord("_"): "/"}) if isinstance(text, str) else text, info)

        if not isinstance(given, dict):
            raise ValueError(f"columns must be given by name, not as a {type(given).__name__}")
        return {name: read_column(column, decode_bytes) for name, column in given.items()}


class HasColumns:
    """A type with the field ``columns``; JSON of an older checkpoint has one of them as a separate field."""

    __slots__ = ()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        def convert_old(given: Any) -> Any:
            if not isinstance(given, dict) or _OLD not in given:
                return given
            column = given[_OLD]
            return {**given, "columns": {} if column is None else {_OLD: column}}

        return core_schema.no_info_before_validator_function(convert_old, handler(source))


class _Text(_Numbers):
    """The same for a text's UTF-8, which may contain half of a surrogate pair. Without a file, JSON has the text."""

    @override
    def encoded(self, column: Any, info: SerializationInfo) -> object:
        if not isinstance(info.context, ColumnWriter):
            return column
        import numpy as np

        return super().encoded(np.frombuffer(column.encode("utf-8", "surrogatepass"), np.uint8), info)

    @override
    def decoded(self, given: object, info: ValidationInfo) -> Any:
        return given if isinstance(given, str) else str(super().decoded(given, info).data, "utf-8", "surrogatepass")


if TYPE_CHECKING:
    TokenIds = NDArray[np.int32]
    LogProbs = NDArray[np.float32]
    ColumnsByName = Mapping[str, ColumnData]
    SampledText = str
    Visits = NDArray[np.int32]
    Rates = NDArray[np.float64]
    Retired = NDArray[np.int32]
else:  # a configuration imports this, and no numpy
    TokenIds = Annotated[Any, _Numbers("tokens")]
    LogProbs = Annotated[Any, _Numbers("logprobs")]
    ColumnsByName = Annotated[Any, _ByName("columns")]
    SampledText = Annotated[str, _Text("texts")]
    Visits = Annotated[Any, _Numbers("visits")]
    Rates = Annotated[Any, _Numbers("rates")]
    Retired = Annotated[Any, _Numbers("retired")]


def freeze(*columns: ColumnData) -> None:
    """Makes each of them read-only."""
    for column in columns:
        for array in (column.values, column.counts) if isinstance(column, Ragged) else (column,):
            array.flags.writeable = False
