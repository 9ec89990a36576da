"""Columns: numpy arrays with one number for each token of a completion, or prompt, and their form in a checkpoint.

They are read-only: rewards of the user's own see the arrays that are trained on. Texts of completions have that form in
checkpoints too: Python's lock is held while JSON is made of them, which are gigabytes.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import override

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from pydantic import SerializationInfo, ValidationInfo

_DTYPES = {
    "tokens": "<i4",
    "logprobs": "<f4",
    "routes": "|u1",
    "texts": "|u1",
    "visits": "<i4",
    "rates": "<f8",
    "retired": "<i4",
}


class ColumnWriter:
    """The columns of a document whose JSON has only [first number, how many] of each: pydantic's ``context`` of it.

    Each kind is a file of numpy's format, without pickles: ``tokens.npy`` has the tokens of all completions one after
    the other (int32), ``logprobs.npy`` float32, ``routes.npy`` the bytes of their routes, and ``texts.npy`` UTF-8.
    """

    def __init__(self) -> None:
        self._parts: dict[str, list[NDArray[Any]]] = {}
        self._counts = Counter[str]()

    def add(self, kind: str, column: NDArray[Any]) -> tuple[int, int]:
        """Its place in the file. It must not change until `write`."""
        place = self._counts[kind], len(column)
        self._parts.setdefault(kind, []).append(column)
        self._counts[kind] += len(column)
        return place

    def write(self, folder: Path) -> list[str]:
        """Make ``folder``, if there is anything, with the files; their names. Raises OSError."""
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
    """What a `ColumnWriter` wrote; pydantic's ``context`` of the JSON that names its places."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        """Read the files. Raises ValueError that names one which is no column of its kind, and OSError."""
        self._folder, self._used = folder, Counter[str]()
        self._columns = {Path(name).stem: self._read(folder / name) for name in names}

    def _read(self, path: Path) -> NDArray[Any]:
        import numpy as np

        wanted = _DTYPES.get(path.stem)
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
        """The column at this place. Raises LookupError if it does not follow the one before, or is not there."""
        path = self._folder / f"{kind}.npy"
        if kind not in self._columns:
            raise LookupError(f"{path} is not among the checkpoint's files, and completions have their {kind} there")
        column, used = self._columns[kind], self._used[kind]
        if first != used or count < 0 or first + count > len(column):
            given = f"{path} has {len(column)} numbers, of which {used} are of other completions"
            raise LookupError(f"{given}, and the next has its {count} at {first}")
        self._used[kind] += count
        return column[first : first + count]

    def check(self) -> None:
        """Raise LookupError if a file has numbers that nothing named."""
        for kind, column in self._columns.items():
            if len(column) != self._used[kind]:
                path = self._folder / f"{kind}.npy"
                raise LookupError(f"{path} has {len(column)} numbers, of which {self._used[kind]} are completions'")


@dataclass(frozen=True, slots=True)
class _Column:
    """In JSON a column is its place in a file beside it, or, without one, base64 of its little-endian numbers."""

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
        """Raises ValueError, of which pydantic makes its own error, for what is neither."""
        if isinstance(info.context, ColumnReader) and isinstance(given, list):
            match given:
                case [int(first), int(count)]:
                    return info.context.get(self.kind, first, count)
        if not isinstance(given, str):
            raise ValueError(f"it must be base64 of {_DTYPES[self.kind]} numbers, not a {type(given).__name__}")
        import numpy as np

        return np.frombuffer(base64.b64decode(given, validate=True), _DTYPES[self.kind])


class _Bytes(_Column):
    """The same of bytes. Their base64 has two letters of its own, as pydantic writes bytes."""

    @override
    def encoded(self, column: Any, info: SerializationInfo) -> object:
        import numpy as np

        return super().encoded(np.frombuffer(column, np.uint8), info)

    @override
    def decoded(self, given: object, info: ValidationInfo) -> Any:
        if isinstance(given, str):
            given = given.translate({ord("-"): "+", ord("_"): "/"})
        return super().decoded(given, info).tobytes()


class _Text(_Column):
    """The same of a text's UTF-8, where half of a surrogate pair is let pass. Without a file, JSON has the text."""

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
    RouteBytes = bytes
    SampledText = str
    Visits = NDArray[np.int32]
    Rates = NDArray[np.float64]
    Retired = NDArray[np.int32]
else:  # a configuration imports this, and no numpy
    TokenIds = Annotated[Any, _Column("tokens")]
    LogProbs = Annotated[Any, _Column("logprobs")]
    RouteBytes = Annotated[Any, _Bytes("routes")]
    SampledText = Annotated[str, _Text("texts")]
    Visits = Annotated[Any, _Column("visits")]
    Rates = Annotated[Any, _Column("rates")]
    Retired = Annotated[Any, _Column("retired")]


def freeze(*columns: NDArray[Any]) -> None:
    """Make each of them read-only."""
    for column in columns:
        column.flags.writeable = False
