"""Reads .jsonl and .parquet files and checks every row; errors name each bad row by file and 1-based number."""

from __future__ import annotations

import base64
import difflib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rl_megatron.config.sections.data import FileKeys, HubData
from rl_megatron.errors import DataError

MAX_PROBLEMS_SHOWN = 20
_MAX_SHOWN = 500  # characters of a file's or a library's text in an error
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Record:
    """A row's requested fields as text, and all other fields as JSON values."""

    texts: tuple[str, ...]
    others: Mapping[str, Any]


def local_files(data: FileKeys, key: str) -> FileKeys:
    """The section with paths on this machine: files of the hub are downloaded into its cache, if they are not there.

    ``key``: of the section. Raises DataError where a file is neither in the cache nor to be had.
    """
    if not isinstance(data, HubData):
        return data
    from huggingface_hub import hf_hub_download  # a second to import: only for its data sets

    paths = {}
    for name, path in (("train", data.train), ("eval", data.eval)):
        try:
            found = hf_hub_download(data.repo, path.as_posix(), repo_type="dataset", revision=data.revision)
        except Exception as error:  # of many libraries
            raise DataError(
                f"{key}.{name}={_cut(str(path))}: not in the hub's cache here, and not to be had from {data.repo} at "
                f"{data.revision}: {_cut(str(error).strip())}; on a machine with a connection, rl-megatron train "
                "--check downloads it into HF_HOME"
            ) from error
        paths[name] = Path(found)
    return data.model_copy(update=paths)


def read_records(path: Path, fields: tuple[str, ...], *, key: str, limit: int | None = None) -> list[Record]:
    """Of every row, in file order: item i of the result is of line (or parquet row) i + 1.

    The first of ``fields`` must be text. Another may be any JSON value: it is returned as JSON text, and unchanged
    among the others. ``key`` is the config key that gave ``path``; ``limit``, if given, bounds the rows that are read.
    Raises DataError with all bad rows at once.
    """
    readers: dict[str, Callable[[Path, tuple[str, ...]], Iterator[Mapping[str, object] | str]]] = {
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
        rows = [row if isinstance(row, str) else _pick(row, fields) for row in islice(reader(path, fields), limit)]
    except OSError as error:  # for example a name of more than 255 characters
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


def _read_jsonl(path: Path, _: tuple[str, ...]) -> Iterator[Mapping[str, object] | str]:
    with path.open("rb") as file:
        for line in file:
            yield _parse_line(line.removesuffix(b"\n"))


def _parse_line(line: bytes) -> Mapping[str, object] | str:
    if not line.strip():
        return "blank line; remove it"
    try:
        value = json.loads(line.decode(), parse_constant=_finite, parse_float=_finite)
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start + 1} of the line"
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    if not isinstance(value, dict):
        return f"it must be a JSON object, not {type(value).__name__}"
    return value


def _finite(text: str) -> float | None:
    """None for NaN and infinity, which JSON lacks."""
    return value if math.isfinite(value := float(text)) else None


def _pick(row: Mapping[str, object], fields: tuple[str, ...]) -> Record | str:
    """The fields of a row, or what is wrong with it."""
    texts = []
    others = {name: value for name, value in row.items() if name not in fields}
    for name in fields:
        if name not in row:
            return _missing(name, row)
        value = row[name]
        if not isinstance(value, str):
            if value is None or name == fields[0]:
                return f"field {name!r} is {value!r:.40} ({type(value).__name__}); it must be text, so quote it"
            others[name] = value
            value = json.dumps(value, ensure_ascii=False)
        if not value.strip():
            return f"field {name!r} is empty"
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"field {name!r} holds a lone surrogate, which is not valid text"
        texts.append(value)
    return Record(tuple(texts), others)


def _read_parquet(path: Path, fields: tuple[str, ...]) -> Iterator[Mapping[str, object] | str]:
    import pyarrow as pa  # heavy, and only parquet needs it
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path)
        names = table.schema_arrow.names
        if len(set(names)) < len(names):
            name, count = Counter(names).most_common(1)[0]
            raise DataError(f"{path}: {count} columns are called {_cut(repr(name))}; keep one of them")
        if missing := [name for name in fields if name not in names]:
            raise DataError(f"{path}: {_missing(missing[0], names)}")
        for batch in table.iter_batches(_ROWS_AT_ONCE):
            columns = [_values(batch.column(i)) for i in range(len(names))]
            for values in zip(*columns, strict=True):
                yield _decoded(dict(zip(names, values, strict=True)))
    except (pa.ArrowException, OSError, MemoryError, ValueError, OverflowError) as error:  # dates beyond Python's
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: not a readable parquet file: {_cut(str(error))}") from error


def _values(column: Any) -> list[Any]:
    """The values of one column; text stays bytes, so that bad UTF-8 is found row by row."""
    import pyarrow as pa

    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    values: list[Any] = (column.cast(pa.large_binary()) if is_text else column).to_pylist()
    return values if is_text else [_as_json(value) for value in values]


def _decoded(row: dict[str, Any]) -> Mapping[str, object] | str:
    """The row with its texts decoded, or what is wrong with one."""
    for name, value in row.items():
        if isinstance(value, bytes):
            try:
                row[name] = value.decode()
            except UnicodeDecodeError as error:
                return f"field {name!r} is not UTF-8 at byte {error.start + 1}"
    return row


def _as_json(value: object) -> object:
    """Convert a value of a parquet column to JSON: bytes to base64, dates and decimals to text, NaN to null."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case bytes():
            return base64.b64encode(value).decode()
        case dict():
            return {str(key): _as_json(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_as_json(inner) for inner in value]
    return str(value)


def _missing(name: str, present: Iterable[str]) -> str:
    names = sorted(present)
    near = difflib.get_close_matches(name, names, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"no field {name!r}; it has {_cut(', '.join(names)) or 'none'}{hint}"


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
