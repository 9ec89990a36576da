"""Parquet files by row groups: each row's text once as a stream, whole rows by number, and columns of a batch.

The rows to train on of such files: what they are compared by, and what is wrong with them.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_megatron.config.sections.data import FileKeys
from rl_megatron.data.problems.leaks import ProblemKey, ProblemTexts, digest_texts, hash_texts
from rl_megatron.data.problems.rendering import (
    Example,
    conversation,
    problem_template,
    read_problem,
    required_fields,
    unrendered,
)
from rl_megatron.data.problems.rows import (
    NESTED,
    Record,
    bytes_field,
    check_there,
    column_types,
    column_values,
    decoded_row,
    has_bytes,
    listed,
    make_record,
    null_field,
    parsed_lines,
    truncate_text,
    unread_field,
)
from rl_megatron.errors import DataError
from rl_megatron.files import field_value
from rl_megatron.types import Prompt


def find_column(batch: Any, name: str) -> Any:
    """Returns the column of a field; ``a.b``: field b of the struct in a, unless a column has that whole name."""
    import pyarrow.compute as pc

    first, *inner = [name] if name in batch.schema.names else name.split(".")
    column = batch.column(first)
    return pc.struct_field(column, inner) if inner else column


def unread_rows(batch: Any, names: Sequence[str], key: str) -> Iterator[tuple[int, str]]:
    """Yields the rows of a batch, by their numbers in it, with a null field or bad UTF-8, and what is wrong. ``key`` is
    the config key that has a teacher read the fields."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for name in names:
        column = find_column(batch, name)
        is_null = pc.is_null(column)
        if pa.types.is_floating(column.type):
            is_null = pc.invert(pc.fill_null(pc.is_finite(column), False))
        yield from ((row, null_field(name, key)) for row in np.flatnonzero(is_null).tolist())
        if "binary" in str(column.type):
            bad = [row for row, value in enumerate(column_values(column)) if has_bytes(value)]
            yield from ((row, f"{bytes_field(name)}, for {key}") for row in bad)
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            for row in range(len(column)):
                try:
                    column.slice(row, 1).validate(full=True)
                except pa.ArrowInvalid as error:
                    yield row, f"field {name!r} cannot be read: {truncate_text(str(error))}, for {key}"


def is_text(kind: Any) -> bool:
    """True if an Arrow type, or the types of a struct's fields (`column_types`), is of text or bytes."""
    import pyarrow as pa

    if isinstance(kind, dict):  # a struct's fields
        return False
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    of = pa.types
    is_bytes = (
        of.is_binary(kind) or of.is_large_binary(kind) or of.is_fixed_size_binary(kind) or of.is_binary_view(kind)
    )
    return bool(is_bytes or of.is_string(kind) or of.is_large_string(kind) or of.is_string_view(kind))


_BATCH_BYTES = 16 << 20  # bytes of decoded rows in a batch
_BUFFER_BYTES = 1 << 20  # bytes of a column's file in one read
_MOST_ROWS = 1 << 16
_RECORDS_AT_ONCE = 1024  # rows that are Python objects at a time
_MEASURED_GROUPS, _MEASURED_ROWS = 16, 64  # number of groups that are measured, and of rows of each


@dataclass(frozen=True, slots=True)
class _Group:
    """A row group: its file and number there, and its first row's numbers there (``first``) and of all files
    (``start``). ``encoded`` is the bytes of a row by the footer, which counts a text that many rows have once."""

    path: Path
    index: int
    first: int
    start: int
    size: int
    encoded: int


class ParquetRows:
    """The rows of ``paths``, numbered from 0 through all of them. In memory are their footers alone.

    ``fields`` are the fields of texts. The first must be a column of text, or with ``lists`` of lists. ``others`` must
    be there, too. Raises DataError that names file, row group and row.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        fields: tuple[str, ...],
        key: str,
        others: tuple[str, ...] = (),
        *,
        lists: bool = False,
    ) -> None:
        self._fields, self._paths, self._lists = fields, paths, lists
        self._metadata: dict[Path, Any] = {}
        self._stamps = {}
        groups: list[_Group] = []
        self._size = 0
        for path in paths:
            with _name_errors(path):
                if not path.is_file():
                    raise DataError(f"{key}={truncate_text(str(path))}: no such file")
                self._stamps[path] = _stamp(path)
                self._metadata[path] = footer = self._open(path).metadata
                _check_columns(path, footer.schema.to_arrow_schema(), fields, others, lists=lists)
                first = 0
                for index in range(footer.num_row_groups):
                    group = footer.row_group(index)
                    encoded = group.total_byte_size // max(1, group.num_rows)
                    groups.append(_Group(path, index, first, self._size, group.num_rows, encoded))
                    first, self._size = first + group.num_rows, self._size + group.num_rows
        if not self._size:
            raise DataError(f"{key}={paths[0]}: the file is empty; give at least one row")
        self._groups, self._starts = groups, [group.start for group in groups]
        self._decoded: dict[int, tuple[int, int]] = {}  # group's start -> rows of it read whole, and their bytes
        self._known_rows, self._known_bytes = 0, 0.0  # all rows of these groups, and the bytes that they would have
        full = [group for group in groups if group.size]
        for group in full[:: -(-len(full) // _MEASURED_GROUPS)]:
            next(self._batches(group, None, _MEASURED_ROWS))

    def check_read(self, names: Sequence[str], rows: NDArray[np.int64], key: str) -> None:
        """Raises DataError for the first of the ``names`` that no column has. The config ``key`` has a teacher read
        these besides the texts. Also raises one that names these ascending rows where one is null or bad UTF-8."""
        for path, footer in self._metadata.items():
            schema = footer.schema.to_arrow_schema()
            others = column_types(one for one in schema if one.name not in self._fields or not is_text(one.type))
            for name in names:
                try:
                    field_value(others, name)
                except KeyError as error:
                    raise DataError(f"{path}: {unread_field(name, others, key)}") from error
        problems, numbers = list[str](), iter(rows.tolist())
        for batch in self.selected(rows, list(names)) if names else ():
            of_batch = list(islice(numbers, len(batch)))
            problems += [f"{self.place(of_batch[row])}: {why}" for row, why in unread_rows(batch, names, key)]
        if problems:
            raise DataError(listed(problems))

    def __len__(self) -> int:
        return self._size

    @property
    def row_bytes(self) -> int:
        """The mean size of a decoded row, of each group by what was read of it."""
        return max(1, int(self._known_bytes / max(1, self._known_rows)))

    def line(self, row: int) -> tuple[Path, int]:
        """Returns the row's file, and its number there from 1."""
        group = self._groups[bisect_right(self._starts, row) - 1]
        return group.path, group.first + row - group.start + 1

    def row(self, stem: str, line: int) -> int:
        """Returns the row of this number, from 1, in the file of this name."""
        group = next(group for group in self._groups if group.path.stem == stem)
        return group.start - group.first + line - 1

    def place(self, row: int) -> str:
        """Returns ``path:line`` of a row, for messages."""
        path, line = self.line(row)
        return f"{path}:{line}"

    def checksum(self) -> str:
        """Returns a checksum of all bytes of the files, and of their names."""
        digest = hashlib.blake2b(digest_size=16)
        for path in self._paths:
            digest.update(f"{path.stem}\0{path.stat().st_size}\0".encode())
            with _name_errors(path), path.open("rb") as file:
                while data := file.read(_BUFFER_BYTES):
                    digest.update(data)
        return digest.hexdigest()

    def are_texts(self, first: int | None = None) -> bool:
        """True if every field of texts, or each of the ``first`` ones, is a column of text in all files."""
        kinds = [column_types(footer.schema.to_arrow_schema()) for footer in self._metadata.values()]
        return all(is_text(field_value(one, name)) for one in kinds for name in self._fields[:first])

    def has_lists(self) -> bool:
        """True if the first text of a row, in a column of text, begins with a bracket, as messages in JSON do."""
        import pyarrow as pa
        import pyarrow.compute as pc

        name = self._fields[0]
        parts = (find_column(batch, name) for group in self._groups for _, batch in self._batches(group, [name]))
        return any(pc.any(pc.match_substring_regex(one.cast(pa.large_binary()), r"^\s*\[")).as_py() for one in parts)

    def hashes(self, texts: int = 1, form: str = "{prompt}") -> NDArray[np.int64]:
        """Returns 64 bits of each row's first ``texts`` fields, columns of text, as `leaks` has them. The first is in
        its ``form``; a difference of white space does not count.

        Raises DataError that names all bad rows: those with fields that are null, empty or not text.
        """
        hashes, problems = np.zeros(len(self), np.int64), list[str]()
        for group in self._groups:
            for start, batch in self._batches(group, list(self._fields)):
                if found := self._problems(group, start, batch):
                    problems += found
                else:
                    hashes[start : start + len(batch)] = hash_texts(self._spaced(batch, texts, form))
        if problems:
            raise DataError(listed(problems))
        return hashes

    def digests(self, rows: NDArray[np.int64], texts: int = 1, form: str = "{prompt}") -> NDArray[np.uint64]:
        """Returns 128 bits of these ascending rows' first ``texts`` fields, as `hashes` has them: [R, 2]."""
        batches = self.selected(rows, list(self._fields[:texts]))
        found = [digest_texts(self._spaced(batch, texts, form)) for batch in batches]
        return np.concatenate([np.zeros((0, 2), np.uint64), *found])

    def selected(self, rows: NDArray[np.int64], columns: list[str] | None) -> Iterator[Any]:
        """Yields record batches of these ascending rows; only row groups that have one are read."""
        import pyarrow as pa

        for group in self._groups:
            low, high = np.searchsorted(rows, [group.start, group.start + group.size])
            left = rows[low:high]
            for start, batch in self._batches(group, columns) if len(left) else ():
                count = int(np.searchsorted(left, start + len(batch)))
                if count:
                    yield batch.take(pa.array(left[:count] - start))
                left = left[count:]
                if not len(left):
                    break

    def record(self, row: int, batch: Any) -> Record:
        """Returns the row, which ``batch`` has alone. Raises DataError as `checked`."""
        (record,) = self._records_of(batch)
        return self.checked(row, record)

    def checked(self, row: int, record: Record | str) -> Record:
        """Returns the record. Raises DataError that names the row if it is what is wrong with it."""
        if isinstance(record, str):
            raise DataError(f"{self.place(row)}: {record}")
        return record

    def records(self, rows: NDArray[np.int64], columns: list[str] | None) -> Iterator[tuple[int, Record | str]]:
        """Yields these ascending rows, with these columns alone (None: all), or what is wrong with one."""
        numbers = iter(rows.tolist())
        for batch in self.selected(rows, columns):
            for record in self._records_in_parts(batch):
                yield next(numbers), record

    def _records_in_parts(self, batch: Any) -> Iterator[Record | str]:
        for start in range(0, len(batch), _RECORDS_AT_ONCE):
            yield from self._records_of(batch.slice(start, _RECORDS_AT_ONCE))

    def _records_of(self, batch: Any) -> Iterator[Record | str]:
        import pyarrow as pa

        names = batch.schema.names
        try:
            columns = [column_values(column) for column in batch.columns]
        except (pa.ArrowException, ValueError, OverflowError) as error:  # e.g. bad UTF-8 in a list
            if len(batch) == 1:
                yield f"the row cannot be read: {truncate_text(str(error))}"
                return
            for row in range(len(batch)):
                yield from self._records_of(batch.slice(row, 1))
            return
        for values in zip(*columns, strict=True):
            whole = decoded_row(dict(zip(names, values, strict=True)))
            yield whole if isinstance(whole, str) else make_record(whole, self._fields, lists=self._lists)

    def _spaced(self, batch: Any, texts: int, form: str) -> list[str]:
        """Joins each row's first ``texts`` fields like `leaks.normalize_whitespace`. The first is in its ``form``."""
        import pyarrow as pa
        import pyarrow.compute as pc

        first, *others = [pc.utf8_trim_whitespace(_plain(find_column(batch, name))) for name in self._fields[:texts]]
        around = [pa.scalar(part, pa.large_string()) for part in form.split("{prompt}")]
        parts = [around[0], *(one for part in around[1:] for one in (first, part))]
        first = pc.binary_join_element_wise(*parts, pa.scalar("", pa.large_string()))
        found = map(_spaced, (first, *others))
        joined: list[str] = pc.binary_join_element_wise(*found, pa.scalar("\0", pa.large_string())).to_pylist()
        return joined

    def _open(self, path: Path) -> Any:
        import pyarrow.parquet as pq  # heavy, and only parquet needs it

        return pq.ParquetFile(path, metadata=self._metadata.get(path), buffer_size=_BUFFER_BYTES)

    def _batches(self, group: _Group, columns: list[str] | None, limit: int = _MOST_ROWS) -> Iterator[tuple[int, Any]]:
        """Yields record batches of a row group, each with the number of its first row. A batch has ``limit`` rows, or
        as many as fit by the mean row of the group or of all groups, whichever is larger."""
        read, size = self._decoded.get(group.start, (0, 0))
        own = size // read if read else group.encoded
        count = max(1, min(limit, _BATCH_BYTES // max(self.row_bytes, own)))
        rows = f"row group {group.index + 1} (rows {group.first + 1} to {group.first + group.size})"
        with _name_errors(group.path, rows):
            if _stamp(group.path) != self._stamps[group.path]:
                raise DataError(f"{group.path}: the file has changed since the run began to read it; start it again")
            start = group.start
            with self._open(group.path) as file:
                for batch in file.iter_batches(count, row_groups=[group.index], columns=columns, use_threads=False):
                    if columns is None:
                        self._measure(group, batch)
                    yield start, batch
                    start += len(batch)
            if start != group.start + group.size:
                raise DataError(f"{group.path}: {rows} has {start - group.start} rows; the file is damaged")

    def _measure(self, group: _Group, batch: Any) -> None:
        """Counts the decoded bytes of a batch of whole rows."""
        read, size = self._decoded.get(group.start, (0, 0))
        if read:
            self._known_bytes -= group.size * size / read
        else:
            self._known_rows += group.size
        read, size = read + len(batch), size + batch.nbytes
        self._known_bytes += group.size * size / read
        self._decoded[group.start] = read, size

    def _problems(self, group: _Group, start: int, batch: Any) -> list[str]:
        """Returns what is wrong with rows of a batch. Its columns are checked as a whole first."""
        import pyarrow as pa
        import pyarrow.compute as pc

        bad = np.zeros(len(batch), np.bool_)
        try:
            batch.validate(full=True)
            for name in self._fields:
                column = find_column(batch, name)
                if not is_text(column.type):
                    nan = pa.types.is_floating(column.type)
                    empty = pc.invert(pc.is_finite(column)) if nan else pc.is_null(column)
                else:
                    text = _plain(column)
                    empty = pc.equal(pc.utf8_trim_whitespace(text), "")
                    if "binary" in str(column.type):
                        empty = pc.or_(empty, pc.match_substring(text, "\0"))
                bad |= pc.fill_null(empty, True).to_numpy(zero_copy_only=False)
        except pa.ArrowInvalid:  # bad UTF-8: each row is checked
            bad[:] = True
        rows = np.flatnonzero(bad)
        records = zip(rows.tolist(), self._records_in_parts(batch.take(pa.array(rows))), strict=True)
        where = f"(row group {group.index + 1})"
        return [f"{self.place(start + row)}: {wrong} {where}" for row, wrong in records if isinstance(wrong, str)]


def _check_columns(path: Path, schema: Any, fields: tuple[str, ...], others: tuple[str, ...], *, lists: bool) -> None:
    import pyarrow as pa

    if len(set(schema.names)) < len(schema.names):
        name, count = Counter(schema.names).most_common(1)[0]
        raise DataError(f"{path}: {count} columns are called {truncate_text(repr(name))}; keep one of them")
    check_there(path, schema, (*fields, *others))
    for name in fields[:1]:
        kind = field_value(column_types(schema), name)
        if not (
            is_text(kind) or (isinstance(kind, pa.DataType) and (pa.types.is_null(kind) or (lists and _is_list(kind))))
        ):
            nested = isinstance(kind, dict) or pa.types.is_nested(kind)
            wanted = NESTED if nested else "it must be text, so write it as string"
            shown = f"struct of {', '.join(kind)}" if isinstance(kind, dict) else str(kind)
            raise DataError(f"{path}: column {name!r} is of {truncate_text(shown)}; {wanted}")


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _plain(column: Any) -> Any:
    """Returns a column of text, not as a dictionary, as views or as bytes, for which not all of pyarrow's functions are
    there. Raises ArrowInvalid for bytes that are not UTF-8."""
    import pyarrow as pa

    return column.cast(pa.large_string())


def _spaced(column: Any) -> Any:
    """Returns the texts as `leaks.normalize_whitespace` does: pyarrow and Python have the same white space."""
    import pyarrow as pa
    import pyarrow.compute as pc

    words = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(column))
    return pc.binary_join(words, pa.scalar(" ", pa.large_string()))


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


@contextmanager
def _name_errors(path: Path, part: str = "") -> Iterator[None]:
    """Turns what pyarrow and the system raise into a DataError that names file and row group."""
    import pyarrow as pa

    try:
        yield
    except DataError:
        raise
    except (pa.ArrowException, OSError, MemoryError, ValueError, OverflowError) as error:
        what = f"{part}: cannot be read" if part else "not a readable parquet file"
        raise DataError(f"{truncate_text(str(path))}: {what}: {truncate_text(str(error))}") from error


class FileRows(ParquetRows):
    """Problems, pairs of answers, or conversations of parquet files, which are read as they are needed."""

    def __init__(self, paths: Sequence[Path], data: FileKeys, key: str, *, lists: bool) -> None:
        """``key``: the config key that gave the files; ``lists``: prompts may be ones. Raises as `ParquetRows`."""
        super().__init__(paths, required_fields(data), key, _others(data), lists=lists)
        self.data = data

    @property
    def columns(self) -> list[str]:
        """The columns that a row's texts are made from."""
        return [*required_fields(self.data), *_others(self.data)]

    def compared(self, *by: ProblemKey) -> list[ProblemTexts]:
        """Returns the texts that rows are compared by, for each key. All keys share what Python makes of the rows."""
        read = _ReadRows(self)
        return [_row_texts(read, one) for one in by]

    def are_plain(self, texts: int) -> bool:
        """True if Arrow can compare the first ``texts`` fields, and no other field is read of a problem."""
        return not (_others(self.data) or self.data.fields["rejected"]) and self.are_texts(texts)

    def problem(self, row: int, record: Record | str) -> Example:
        """Returns a row's problem, without the tokenizer's template. Raises DataError as `read_problem` and
        `checked`."""
        return read_problem(self.checked(row, record), *self.line(row), self.data)

    def conversations(self, rows: NDArray[np.int64]) -> Iterator[Prompt]:
        """Yields the conversations of these ascending rows, without other fields; none where rows are problems."""
        if self.data.fields["messages"] is None:
            return
        for row, record in self.records(rows, self.columns):
            yield from unrendered([conversation(self.checked(row, record), *self.line(row), self.data)])


def read_records(path: Path, data: FileKeys, *, key: str, limit: int | None = None, lists: bool) -> list[Record]:
    """Returns the first ``limit`` rows of a .jsonl or .parquet file: item i is of line, or row, i + 1.

    ``key`` is the config key that gave ``path``; ``lists``: prompts may be ones. Raises DataError with all bad rows.
    """
    shown = f"{key}={truncate_text(str(path))}"
    if path.suffix == ".parquet":
        files = FileRows([path], data, key, lists=lists)
        numbers = np.arange(len(files) if limit is None else min(limit, len(files)))
        found = [record for _, record in files.records(numbers, None)]
    elif path.suffix == ".jsonl":
        try:
            if not path.is_file():
                raise DataError(f"{shown}: no such file")
            lines = islice(parsed_lines(path), limit)
            found = [
                one if isinstance(one, str) else make_record(one, required_fields(data), lists=lists) for one in lines
            ]
        except OSError as error:  # e.g. a name of more than 255 characters
            raise DataError(f"{shown}: cannot be read: {error.strerror or error}") from error
        if not found:
            raise DataError(f"{key}={path}: the file is empty; give at least one row")
    else:
        raise DataError(f"{shown}: unknown extension {truncate_text(repr(path.suffix))}; allowed: .jsonl, .parquet")
    if problems := [f"{path}:{number}: {row}" for number, row in enumerate(found, 1) if isinstance(row, str)]:
        raise DataError(listed(problems))
    return [row for row in found if not isinstance(row, str)]


def _others(data: FileKeys) -> tuple[str, ...]:
    """Returns the fields besides those of texts that a row must have."""
    written = (data.fields["messages"], data.fields["rejected"], data.fields["tools"], data.fields["context"])
    names = (*written, data.fields["margin"], data.fields["system"], data.fields["demonstration"])
    return tuple(dict.fromkeys(name for name in names if name is not None and name not in required_fields(data)))


class _ReadRows:
    """Problems of rows that are made by Python: some 50,000 a second. ``by_arrow``: hashes of this many texts."""

    def __init__(self, files: FileRows) -> None:
        self.files, self.by_arrow = files, dict[int, NDArray[np.int64]]()

    @cached_property
    def has_chats(self) -> bool:
        """True if texts of rows may be messages in JSON."""
        return self.files.data.chat_template and self.files.has_lists()

    @cached_property
    def hashes(self) -> NDArray[np.int64]:
        """64 bits of one text of each row, and of two: [R, 2]. Raises DataError that names all bad rows."""
        hashes, problems = np.zeros((len(self.files), 2), np.int64), list[str]()
        for row, record in self.files.records(np.arange(len(self.files)), self.files.columns):
            try:
                one = self.files.problem(row, record)
                hashes[row] = hash(one.hashed(1)), hash(one.hashed(2))
            except DataError as error:
                problems.append(str(error))
        if problems:
            raise DataError(listed(problems))
        return hashes


def _row_texts(read: _ReadRows, by: ProblemKey) -> ProblemTexts:
    """Returns the texts that each row is compared by."""
    files, form, texts = read.files, problem_template(read.files.data), 1 + by.answers

    def hashes() -> NDArray[np.int64]:
        if not files.are_plain(by.hashed) or read.has_chats:
            return read.hashes[:, by.hashed - 1]
        if by.hashed not in read.by_arrow:
            read.by_arrow[by.hashed] = files.hashes(by.hashed, form)
        return read.by_arrow[by.hashed]

    def digests(rows: NDArray[np.int64]) -> NDArray[np.uint64]:
        if by.fields == () and files.are_plain(texts) and not read.has_chats:
            return files.digests(rows, texts, form)
        records = files.records(rows, None if by.fields is None else [*dict.fromkeys((*files.columns, *by.fields))])
        return digest_texts(files.problem(row, record).compared(by) for row, record in records)

    return ProblemTexts(size=len(files), place=files.place, hashes=hashes, digests=digests)
