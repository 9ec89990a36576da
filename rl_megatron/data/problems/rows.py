"""Rows of files, and .jsonl files: requested fields as text, others as JSON values, or what is wrong with a row."""

from __future__ import annotations

import base64
import codecs
import difflib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rl_megatron.config.sections.data import FileKeys, HubData
from rl_megatron.errors import DataError, truncate
from rl_megatron.files import field_value

NESTED = (
    "it must be text, or a list of messages, which data.chat_template=true renders, or an environment of template=chat"
)
_NO_VALUE, _QUOTED = (
    "the row has no value, or a number that is not finite, so remove it",
    "it must be text, so quote it",
)
_MAX_SHOWN = 500  # characters of a file's or a library's text in an error
_MAX_PROBLEMS_SHOWN = 20


class Base64(str):
    """Base64 of a parquet file's bytes that are not UTF-8 text."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Record:
    """A row's requested fields as text, and all other fields as JSON values."""

    texts: tuple[str, ...]
    others: Mapping[str, Any]


def listed(problems: Sequence[str]) -> str:
    """Returns bad rows as lines. Only the first are shown."""
    more = len(problems) - _MAX_PROBLEMS_SHOWN
    return "\n".join([*problems[:_MAX_PROBLEMS_SHOWN], *([f"... and {more} more bad rows"] if more > 0 else [])])


def make_record(row: Mapping[str, object], fields: tuple[str, ...], *, lists: bool = False) -> Record | str:
    """Returns the fields of a row, or what is wrong with it. The first must be text; with ``lists`` it may be one."""
    texts = []
    others = {name: value for name, value in row.items() if name not in fields}
    for name in fields:
        try:
            value = field_value(row, name)
        except KeyError:
            return missing_field(name, row)
        if has_bytes(value):
            return bytes_field(name)
        if not isinstance(value, str):
            if value is None or (name == fields[0] and not (lists and isinstance(value, list))):
                wanted = _NO_VALUE if value is None else NESTED if isinstance(value, list | dict) else _QUOTED
                return f"field {name!r} is {value!r:.40} ({type(value).__name__}); {wanted}"
            others[name] = value
            value = _positional(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
        if not value.strip():
            return f"field {name!r} is empty"
        texts.append(value)
    return Record(tuple(texts), others)


def _positional(number: float) -> str:
    """Writes it without a power of ten, in which many read another number: 0.00001, not 1e-05."""
    return format(Decimal(repr(number)), "f")


def column_values(column: Any) -> list[Any]:
    """Returns the values of one column; text stays bytes, so that bad UTF-8 is found row by row."""
    import pyarrow as pa

    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    values: list[Any] = column.cast(pa.large_binary()).to_pylist() if is_text else _json_of(column)
    return values


def _json_of(column: Any) -> list[Any]:
    """Returns `as_json` of each value without ``to_pylist``, which makes a pyarrow object for each part of each."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_struct(kind) and len(names := dict.fromkeys(field.name for field in kind)) == kind.num_fields > 0:
        rows = zip(*map(_json_of, column.flatten()), strict=True)
        return [
            dict(zip(names, row, strict=True)) if there else None
            for there, row in zip(column.is_valid().to_pylist(), rows, strict=True)
        ]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        values = iter(_json_of(column.flatten()))  # items of null lists are left out
        counts = pc.list_value_length(column).to_pylist()
        return [None if count is None else list(islice(values, count)) for count in counts]
    if pa.types.is_map(kind):
        bounds = column.offsets.to_pylist()
        parts = [part.slice(bounds[0], bounds[-1] - bounds[0]) for part in (column.keys, column.items)]
        pairs = list(map(list, zip(*map(_json_of, parts), strict=True)))
        return [
            pairs[start - bounds[0] : stop - bounds[0]] if there else None
            for start, stop, there in zip(bounds, bounds[1:], column.is_valid().to_pylist(), strict=False)
        ]
    if pa.types.is_dictionary(kind):
        return _json_of(column.dictionary_decode())
    found: list[Any] = _dates(column) if pa.types.is_temporal(kind) else widen_dtypes(column).to_pylist()
    is_json = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)
    return found if is_json else [as_json(value) for value in found]


def widen_dtypes(column: Any) -> Any:
    """Widens floats of 16 or 32 bits to 64: whole numbers as they are, others by their shortest decimal, 0.1 as 0.1.
    Leaves other columns as they are."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_float32(column.type):
        shortest = column.cast(pa.string()).cast(pa.float64())
    elif pa.types.is_float16(column.type):
        shortest = pa.array(column.to_numpy(zero_copy_only=False).astype(str).astype(float), from_pandas=True)
    else:
        return column
    exact = column.cast(pa.float32()).cast(pa.float64())
    return pc.if_else(pc.equal(exact, pc.floor(exact)), exact, shortest)


def _dates(column: Any) -> list[Any]:
    """Returns dates, times and durations; Arrow's text of those that Python has not: nanoseconds, the year 10000."""
    import pyarrow as pa

    try:
        found: list[Any] = column.to_pylist()
    except (ValueError, OverflowError):
        if len(column) > 1:
            return [value for row in range(len(column)) for value in _dates(column.slice(row, 1))]
        found = column.cast(pa.string()).to_pylist()
    return found


def decoded_row(row: dict[str, Any]) -> Mapping[str, object] | str:
    """Returns the row with its texts decoded, or what is wrong with one."""
    for name, value in row.items():
        if isinstance(value, bytes):
            try:
                row[name] = value.decode()
            except UnicodeDecodeError as error:
                return f"field {name!r} is not UTF-8 at byte {error.start + 1}"
    return row


def as_json(value: object) -> object:
    """Converts a value of a parquet column to JSON: dates and decimals to text, NaN to null, bytes to their UTF-8 text.
    Bytes that are not UTF-8, or have a NUL like UTF-16, become `Base64`."""
    match value:
        case str() | None | bool() | int():
            return value
        case float():
            return value if math.isfinite(value) else None
        case bytes():
            with suppress(UnicodeDecodeError):
                if b"\0" not in value:
                    return value.decode()
            return Base64(base64.b64encode(value).decode())
        case dict():
            return {str(key): as_json(inner) for key, inner in value.items()}
        case list() | tuple():
            return [as_json(inner) for inner in value]
    return str(value)


def column_types(fields: Iterable[Any]) -> dict[str, Any]:
    """Returns Arrow's type of each column of a schema; of a struct, those of its fields."""
    import pyarrow as pa

    return {one.name: column_types(one.type) if pa.types.is_struct(one.type) else one.type for one in fields}


def check_there(path: Path, schema: Iterable[Any], fields: Iterable[str]) -> None:
    """Raises DataError for the first of the ``fields`` that Arrow's schema of a file lacks."""
    kinds = column_types(schema)
    for name in fields:
        try:
            field_value(kinds, name)
        except KeyError as error:
            raise DataError(f"{path}: {missing_field(name, kinds)}") from error


def missing_field(name: str, row: Mapping[str, Any]) -> str:
    """Says which field a row lacks, those that it and its objects have, and the one of a similar name."""
    names = sorted(set(_leaves(row)))
    near = difflib.get_close_matches(name, names, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"no field {name!r}; it has {truncate_text(', '.join(names)) or 'none'}{hint}"


def drop_null_keys(value: object) -> object:
    """Returns the value without null keys: Arrow's structs have the keys of all rows."""
    if isinstance(value, dict):
        return {key: drop_null_keys(inner) for key, inner in value.items() if inner is not None}
    return [drop_null_keys(inner) for inner in value] if isinstance(value, list) else value


def has_bytes(value: object) -> bool:
    """True if the value, or one in its lists and objects, is `Base64`."""
    if isinstance(value, dict | list):
        return any(map(has_bytes, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Base64)


def bytes_field(name: str) -> str:
    """Says that a field has `Base64`."""
    return f"field {name!r} has bytes that are not UTF-8 text; write the column as text"


def unread_field(name: str, row: Mapping[str, Any], key: str) -> str:
    """Says as `missing_field` that a field is missing that the config ``key`` has a teacher read with the problem."""
    return (
        f"{missing_field(name, row)}, for {key}; {{prompt}} and {{answer}} are the problem and its answer, whatever "
        "their fields are called"
    )


def null_field(name: str, key: str) -> str:
    """Says that a field that the config ``key`` has a teacher read has no value."""
    return f"field {name!r} is null, or a number that is not finite, for {key}; give it a value, or remove the row"


def equal_fields(better: str, worse: str) -> str:
    """Says that the two fields of a pair are equal."""
    return f"fields {better!r} and {worse!r} are equal, so nothing says which is better; remove the row"


def beyond_embedding(token: int, vocab_size: int) -> str:
    """Says that the embedding lacks a token of a text, and what to do."""
    return (
        f"has the token {token}, but the model's embedding has {vocab_size} rows; give the model its own tokenizer, or "
        "resize its embedding to the tokenizer (resize_token_embeddings)"
    )


def quote_value_start(value: object) -> str:
    """Returns the start of a bad value, for errors."""
    return f"{value!r:.80}"


def _leaves(row: Mapping[str, Any]) -> Iterator[str]:
    for name, value in row.items():
        inner = _leaves(value) if isinstance(value, Mapping) and value else ()
        yield from (f"{name}.{one}" for one in inner) if inner else (name,)


def truncate_text(text: str) -> str:
    """Returns its first 500 characters."""
    return truncate(text, _MAX_SHOWN)


_MOST_LEVELS = 128  # lists and objects in a row; checkpoints are read with at most 200, and some are around it
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def local_files(data: FileKeys, key: str, names: Iterable[str]) -> FileKeys:
    """Returns the section with paths on this machine for these ``names``, train or eval. Files of the hub are
    downloaded into its cache, if they are not there.

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
        except Exception as error:  # many libraries raise it
            raise DataError(
                f"{key}.{name}={truncate_text(str(path))}: not in the hub's cache here, and not to be had from "
                f"{data.repo} at {data.revision}: {truncate_text(str(error).strip())}; on a machine with a connection, "
                "rl-megatron train --check downloads it into HF_HOME"
            ) from error
        paths[name] = Path(found)
    return data.model_copy(update=paths)


def find_data_files(path: Path, key: str) -> list[Path]:
    """Returns the file, or a folder's parquet files by name. Raises DataError where it has none, and for a list."""
    if any(mark in str(path) for mark in ",*") and not os.path.exists(path):
        raise DataError(
            f"{key}={truncate_text(str(path))}: no such file; give one file, or a folder of .parquet files "
            "(several files "
            "are sources of data=mixture)"
        )
    if path.suffix == ".jsonl" or not os.path.isdir(path):  # false, not an error, for what no file can be called
        return [path]
    found = sorted(path.glob("*.parquet"))
    if not found:
        raise DataError(
            f"{key}={truncate_text(str(path))}: the folder has no .parquet file; give such a folder, or a file"
        )
    return found


def parsed_lines(path: Path) -> Iterator[Mapping[str, object] | str]:
    """Yields the object of each line, or what is wrong with the line. Raises OSError."""
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
    """Returns a field with half of a surrogate pair in its name or value: no checkpoint could hold a prompt with it."""
    for name, value in row.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return name
    return None


def _finite(text: str) -> float | None:
    """Returns None for NaN and infinity, which JSON lacks."""
    return value if math.isfinite(value := float(text)) else None
