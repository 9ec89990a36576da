"""Append-only JSON lines files that survive kill -9.

A line is valid once its newline is on disk. A last line without one was torn by a kill: readers skip it and
`truncate_after` removes it, so that a resumed run never appends to half a row.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from pydantic_core import from_json

from rl_megatron.errors import DataError
from rl_megatron.files import add_path_to_errors, parse, write_atomically

JsonValue = str | int | float | None
JsonRow = Mapping[str, JsonValue]
STEPS = ("rl", "sft", "dpo", "reward_model")
"""The phases of rows of a job's steps."""
_BLOCK, _END = 1 << 16, 1 << 18  # bytes of a read from the end, and of the end of a log
_GREATEST = sys.float_info.max
_NUMBERS = (int, float)  # each call would make a union of types


def number(row: JsonRow, name: str) -> float | None:
    """Returns the value, or None if it is missing, or is not a finite float."""
    return finite(row.get(name))


def finite(value: JsonValue) -> float | None:
    """Returns the value, or None if it is not a finite float."""
    return value if isinstance(value, _NUMBERS) and -_GREATEST <= value <= _GREATEST else None


class JsonlFile:
    """Appends rows to ``path`` in an existing folder; a row has an integer ``step``. One writer process per file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None

    def append(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Appends rows; they are on disk (fsync) at return. Without rows it does nothing, and creates no file.

        Raises ValueError for NaN and infinity, which JSON lacks, and OSError that names the file.
        """
        # Escaped to ASCII, so that a lone surrogate in a completion cannot fail the run.
        data = b"".join(json.dumps(dict(row), allow_nan=False).encode("ascii") + b"\n" for row in rows)
        if not data:
            return
        with add_path_to_errors(self.path):
            if self._file is None:
                self._file = self.path.open("ab")
            self._file.write(data)
            self._file.flush()
            os.fsync(self._file.fileno())

    def truncate_after(
        self,
        last: int,
        field: str = "step",
        *,
        late: Callable[[JsonRow], bool] = lambda row: False,
        also: Callable[[JsonRow], bool] = lambda row: False,
    ) -> int:
        """Removes rows with ``field`` above ``last`` or missing, and a torn last line. Returns the number of rows.

        The rows ascend in ``field``, except ``late`` ones. Rows at ``last`` are removed too if ``also`` is true for
        them. Atomic. Reads from the end, no further than one row below ``last`` that is not late;
        ``last=-1`` removes every row. Raises DataError for an invalid line that it reaches, other than a torn last one.
        """
        self.close()
        if not self.path.exists():
            return 0
        removed, cut = 0, 0
        kept, moved = list[bytes](), list[bytes]()  # last first; moved lines follow a removed one
        for number, (place, line) in enumerate(_lines_from_the_end(self.path)):
            cut = cut if number else place + len(line) + 1
            row = _parse_anywhere(self.path, line)
            value = int(row.get(field, last + 1) or 0)
            if value > last or (value == last and also(row)):
                removed, cut = removed + 1, place
                moved += kept
                kept = []
            elif value == last or late(row):
                kept.append(line)
            else:
                break
        if moved:
            with self.path.open("rb") as file:
                write_atomically(self.path, file.read(cut) + b"".join(line + b"\n" for line in reversed(moved)))
        else:
            with add_path_to_errors(self.path), self.path.open("r+b") as file:
                file.truncate(cut)
                os.fsync(file.fileno())
        return removed

    def cut_torn(self) -> None:
        """Removes a torn last line alone, whatever the lines before it hold."""
        self.close()
        if self.path.exists():
            with add_path_to_errors(self.path), self.path.open("r+b") as file:
                file.truncate(next((place + len(line) + 1 for place, line in _lines_from_the_end(self.path)), 0))
                os.fsync(file.fileno())

    def end(self) -> str:
        """Returns the file's size and a digest of its last bytes; empty if it does not exist. A file that was only
        appended to and then cut back to an earlier ``end`` is unchanged."""
        if not self.path.exists():
            return ""
        with add_path_to_errors(self.path), self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _BLOCK))
            return f"{size} {hashlib.sha256(file.read()).hexdigest()}"

    def close(self) -> None:
        """Releases the file handle; a later append opens it again."""
        file, self._file = self._file, None
        if file is not None:
            with add_path_to_errors(self.path):
                file.close()


def read_jsonl(path: Path) -> list[dict[str, JsonValue]]:
    """Returns all rows except a torn last one, in file order. Raises DataError that names the file and the line."""
    return [_parse(path, number, line) for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1)]


def whole_rows(path: Path, damaged: Callable[[str], None] | None) -> list[JsonRow]:
    """Returns the rows of `read_jsonl` without damaged lines. ``damaged`` gets the error's text of each such line. If
    it is None, raises DataError as `read_jsonl` does."""
    rows = list[JsonRow]()
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            rows.append(_parse(path, number, line))
        except DataError as error:
            if damaged is None:
                raise
            damaged(str(error))
    return rows


def rows_from(path: Path, share: float = 0.0) -> Iterator[dict[str, JsonValue]]:
    """Yields the rows of `read_jsonl` from the row on in which this share of the file's bytes ends, or the next one.

    Raises DataError that names the file and the line, for a broken line that it reaches.
    """
    with path.open("rb") as file:
        place = int(file.seek(0, os.SEEK_END) * share)
        file.seek(max(0, place - _BLOCK))
        before = file.read(min(place, _BLOCK))
        if len(before) < place and b"\n" not in before:
            file.readline()
        else:
            file.seek(place - len(before) + before.rfind(b"\n") + 1)
        for line in file:
            if line.endswith(b"\n"):
                yield _parse_anywhere(path, line[:-1])


def from_the_end(path: Path) -> Iterator[dict[str, JsonValue]]:
    """Yields the rows of `read_jsonl`, the last one first; reads no more of the file than is needed.

    Raises DataError that names the file and the line, for a broken line that it reaches.
    """
    for _, line in _lines_from_the_end(path):
        yield _parse_anywhere(path, line)


def text_at_end(path: Path) -> str:
    """Returns the last 256 KiB of a log, which may hold weeks; replaces bytes that are not UTF-8. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _END))
        return file.read().decode(errors="replace")


def _lines_from_the_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the whole lines, the last one first, each with the place in the file at which it begins."""
    with path.open("rb") as file:
        at, first, torn = file.seek(0, os.SEEK_END), b"", True
        while at:
            size = min(max(_BLOCK, len(first)), at)  # a line of many blocks is not copied once a block
            end = at + len(first)
            at -= size
            file.seek(at)
            first, *lines = (file.read(size) + first).split(b"\n")
            for line in reversed(lines):
                end -= len(line)
                if not torn:
                    yield end, line
                torn = False
                end -= 1
    if not torn:
        yield 0, first


def _parse_anywhere(path: Path, line: bytes) -> dict[str, JsonValue]:
    try:
        return _parse(path, 0, line)
    except DataError:
        read_jsonl(path)  # its error has the line's number
        raise


def _json_of(line: bytes) -> Any:
    """Parses like `parse`, in a quarter of the time: a table has 100,000 lines. Raises ValueError."""
    try:
        return from_json(line)
    except ValueError:  # also of half of a surrogate pair, which a sample may have
        return parse(line)


def _parse(path: Path, number: int, line: bytes) -> dict[str, JsonValue]:
    try:
        row = _json_of(line)
    except ValueError as error:
        raise DataError(f"{path}:{number}: not JSON ({error}); remove the line or restore the file") from error
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise DataError(f"{path}:{number}: a row must be an object with an integer 'step'; got {line[:80]!r}")
    return row
