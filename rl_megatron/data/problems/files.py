"""Reads .jsonl and .parquet files and checks every row; errors name each bad row by file and 1-based number."""

from __future__ import annotations

import codecs
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rl_megatron.config.sections.data import FileKeys, HubData
from rl_megatron.data.problems.records import (
    Record,
    check_there,
    decoded_row,
    listed,
    record_of,
    shortened,
    values_of,
)
from rl_megatron.errors import DataError

_ROWS_AT_ONCE = 4096
_MOST_LEVELS = 128  # of lists and objects in a row; checkpoints are read with at most 200, of which some are around it
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def local_files(data: FileKeys, key: str, names: Iterable[str]) -> FileKeys:
    """The section with paths on this machine for these ``names``, train or eval: files of the hub are downloaded into
    its cache, if they are not there.

    ``key``: of the section. Raises DataError where a file is neither in the cache nor to be had.
    """
    if not isinstance(data, HubData):
        return data
    from huggingface_hub import hf_hub_download  # a second to import: only for its data sets

    paths = {}
    for name in names:
        path: Path = getattr(data, name)
        try:
            found = hf_hub_download(data.repo, path.as_posix(), repo_type="dataset", revision=data.revision)
        except Exception as error:  # of many libraries
            raise DataError(
                f"{key}.{name}={shortened(str(path))}: not in the hub's cache here, and not to be had from "
                f"{data.repo} at {data.revision}: {shortened(str(error).strip())}; on a machine with a connection, "
                "rl-megatron train --check downloads it into HF_HOME"
            ) from error
        paths[name] = Path(found)
    return data.model_copy(update=paths)


def files_in(path: Path, key: str) -> list[Path]:
    """The file, or the parquet files of a folder by name. Raises DataError where a folder has none, and for a list."""
    if any(mark in str(path) for mark in ",*") and not os.path.exists(path):
        raise DataError(
            f"{key}={shortened(str(path))}: no such file; give one file, or a folder of .parquet files (several files "
            "are sources of data=mixture)"
        )
    if path.suffix == ".jsonl" or not os.path.isdir(path):  # false, not an error, for what no file can be called
        return [path]
    found = sorted(path.glob("*.parquet"))
    if not found:
        raise DataError(f"{key}={shortened(str(path))}: the folder has no .parquet file; give such a folder, or a file")
    return found


def read_records(
    path: Path, fields: tuple[str, ...], *, key: str, limit: int | None = None, lists: bool = False
) -> list[Record]:
    """Of every row, in file order: item i of the result is of line (or parquet row) i + 1.

    The first of ``fields`` must be text, or with ``lists`` a list. Another may be any JSON value. What is no text is
    returned as JSON text, and unchanged among the others. ``key`` is the config key that gave ``path``; ``limit``, if
    given, bounds the rows that are read. Raises DataError with all bad rows at once.
    """
    readers: dict[str, Callable[[Path, tuple[str, ...]], Iterator[Mapping[str, object] | str]]] = {
        ".jsonl": _read_jsonl,
        ".parquet": _read_parquet,
    }
    reader = readers.get(path.suffix)
    if reader is None:
        shown = shortened(repr(path.suffix))
        raise DataError(f"{key}={shortened(str(path))}: unknown extension {shown}; allowed: {', '.join(readers)}")
    try:
        if not path.is_file():
            raise DataError(f"{key}={shortened(str(path))}: no such file")
        read = islice(reader(path, fields), limit)
        rows = [row if isinstance(row, str) else record_of(row, fields, lists=lists) for row in read]
    except OSError as error:  # for example a name of more than 255 characters
        raise DataError(f"{key}={shortened(str(path))}: cannot be read: {error.strerror or error}") from error
    if not rows:
        raise DataError(f"{key}={path}: the file is empty; give at least one row")
    problems = [f"{path}:{number}: {row}" for number, row in enumerate(rows, 1) if isinstance(row, str)]
    if problems:
        raise DataError(listed(problems))
    return [row for row in rows if not isinstance(row, str)]


def _read_jsonl(path: Path, _: tuple[str, ...]) -> Iterator[Mapping[str, object] | str]:
    with path.open("rb") as file:
        if file.read(3) != codecs.BOM_UTF8:
            file.seek(0)
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
    if _SURROGATE.search(line) and (name := _broken_text(value)) is not None:
        return f"field {name!r} holds a lone surrogate, which is not valid text"
    if line.count(b"[") + line.count(b"{") > _MOST_LEVELS and _is_too_deep(value):
        return f"nested too deep: it has more than {_MOST_LEVELS} lists and objects in each other"
    return value


def _is_too_deep(row: Mapping[str, object]) -> bool:
    level: list[Any] = [row]
    for _ in range(_MOST_LEVELS):
        inner = chain.from_iterable(one.values() if isinstance(one, dict) else one for one in level)
        level = [one for one in inner if isinstance(one, dict | list)]
    return bool(level)


def _broken_text(row: Mapping[str, object]) -> str | None:
    """The field whose name or value has half of a surrogate pair: no checkpoint could hold a prompt with it."""
    for name, value in row.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return name
    return None


def _finite(text: str) -> float | None:
    """None for NaN and infinity, which JSON lacks."""
    return value if math.isfinite(value := float(text)) else None


def _read_parquet(path: Path, fields: tuple[str, ...]) -> Iterator[Mapping[str, object] | str]:
    import pyarrow as pa  # heavy, and only parquet needs it
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path)
        names = table.schema_arrow.names
        if len(set(names)) < len(names):
            name, count = Counter(names).most_common(1)[0]
            raise DataError(f"{path}: {count} columns are called {shortened(repr(name))}; keep one of them")
        check_there(path, table.schema_arrow, fields)
        for batch in table.iter_batches(_ROWS_AT_ONCE):
            columns = [values_of(batch.column(i)) for i in range(len(names))]
            for values in zip(*columns, strict=True):
                yield decoded_row(dict(zip(names, values, strict=True)))
    except (pa.ArrowException, OSError, MemoryError, ValueError, OverflowError) as error:  # dates beyond Python's
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: not a readable parquet file: {shortened(str(error))}") from error
