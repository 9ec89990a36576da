"""Rows of .jsonl and .parquet files, checked one by one: every bad row is named by file and 1-based number."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rl_megatron.errors import DataError

MAX_PROBLEMS_SHOWN = 20
_MAX_SHOWN = 500  # characters of what a file or a library says

Row = tuple[str, ...]  # the fields asked for


def read_rows(path: Path, fields: tuple[str, ...], *, key: str, limit: int | None = None) -> list[Row]:
    """These text fields of every row, in file order: row i of the result is line (or parquet row) i + 1.

    ``key`` is the config key that gave ``path``; only the first ``limit`` rows are read where it is given. Raises
    DataError with all bad rows at once.
    """
    readers: dict[str, Callable[[Path, tuple[str, ...], int | None], list[Row | str]]] = {
        ".jsonl": _read_jsonl,
        ".parquet": _read_parquet,
    }
    reader = readers.get(path.suffix)
    if reader is None:
        shown = _cut(repr(path.suffix))
        raise DataError(f"{key}={_cut(str(path))}: unknown extension {shown}; allowed: {', '.join(readers)}")
    try:
        if not path.is_file():
            raise DataError(f"{key}={_cut(str(path))}: no such file")
        rows = reader(path, fields, limit)
    except OSError as error:  # as of a name of more than 255 characters
        raise DataError(f"{key}={_cut(str(path))}: cannot be read: {error.strerror or error}") from error
    if not rows:
        raise DataError(f"{key}={path}: the file is empty; give at least one row")
    problems = [f"{path}:{number}: {row}" for number, row in enumerate(rows, 1) if isinstance(row, str)]
    if problems:
        more = len(problems) - MAX_PROBLEMS_SHOWN
        raise DataError(
            "\n".join([*problems[:MAX_PROBLEMS_SHOWN], *([f"... and {more} more bad rows"] if more > 0 else [])])
        )
    return [row for row in rows if not isinstance(row, str)]


def _read_jsonl(path: Path, fields: tuple[str, ...], limit: int | None) -> list[Row | str]:
    with path.open("rb") as file:
        return [_parse_line(line.removesuffix(b"\n"), fields) for line in islice(file, limit)]


def _parse_line(line: bytes, fields: tuple[str, ...]) -> Row | str:
    if not line.strip():
        return "blank line; remove it"
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start + 1} of the line"
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    if not isinstance(value, dict):
        return f"a JSON object is wanted, got {type(value).__name__}"
    return _pick(value, fields)


def _pick(row: Mapping[str, object], fields: tuple[str, ...]) -> Row | str:
    """The fields of a row, or what is wrong with it."""
    texts = []
    for name in fields:
        value = row.get(name)
        if name not in row:
            return _missing(name, row)
        if not isinstance(value, str):
            return f"field {name!r} is {value!r:.40} ({type(value).__name__}); text is wanted, so quote it"
        if not value.strip():
            return f"field {name!r} is empty"
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"field {name!r} holds half a surrogate pair, which is no text"
        texts.append(value)
    return tuple(texts)


def _read_parquet(path: Path, fields: tuple[str, ...], limit: int | None) -> list[Row | str]:
    import pyarrow as pa  # heavy, and only parquet needs it
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path)
        rows = list(zip(*(_parquet_column(table, name, path, limit) for name in fields), strict=True))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: not a readable parquet file: {_cut(str(error))}") from error
    return [_pick_bytes(row, fields) for row in rows]


def _parquet_column(table: Any, name: str, path: Path, limit: int | None) -> list[bytes | None]:
    """A text column as bytes, so that bad UTF-8 is found row by row."""
    import pyarrow as pa

    schema = table.schema_arrow
    if name not in schema.names:
        raise DataError(f"{path}: {_missing(name, schema.names)}")
    if schema.names.count(name) > 1:
        raise DataError(f"{path}: {schema.names.count(name)} columns are called {name!r}; leave one")
    kind = schema.field(name).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(f"{path}: column {name!r} holds {kind}; text is wanted")
    parts = table.iter_batches(limit, columns=[name]) if limit else [table.read(columns=[name])]
    part = next(iter(parts), None)
    column: list[bytes | None] = [] if part is None else part.column(0).cast(pa.large_binary()).to_pylist()
    return column


def _pick_bytes(row: tuple[bytes | None, ...], fields: tuple[str, ...]) -> Row | str:
    decoded: dict[str, object] = {}
    for name, value in zip(fields, row, strict=True):
        try:
            decoded[name] = None if value is None else value.decode()
        except UnicodeDecodeError as error:
            return f"field {name!r} is not UTF-8 at byte {error.start + 1}"
    return _pick(decoded, fields)


def _missing(name: str, present: Iterable[str]) -> str:
    names = sorted(present)
    near = difflib.get_close_matches(name, names, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"no field {name!r}; it has {_cut(', '.join(names)) or 'none'}{hint}"


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
