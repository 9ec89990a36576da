"""What prompts are drawn from: a list in memory, or rows of files that are read and rendered when they are drawn."""

from __future__ import annotations

import hashlib
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rl_megatron.data.problems.file_rows import FileRows
from rl_megatron.data.problems.mixture import DigestOf, digest_of_prompts
from rl_megatron.data.problems.rendering import RowForm, TooLong, conversation, rendered, tokenized_one, unrendered
from rl_megatron.errors import DataError
from rl_megatron.types import Prompt

logger = logging.getLogger(__name__)

_WINDOW_BYTES = 64 << 20  # of rows that are read at once
_LARGE_WINDOW_BYTES = 256 << 20  # the same, where an epoch has many windows, each of which reads every row group
_MOST_WINDOWS = 16  # of an epoch, before they are as large
_MOST_ROWS = 1 << 17


@dataclass(frozen=True, slots=True)
class Upcoming:
    """The number of a draw, and a function that gives the rows of the draws from one number to another. Any thread may
    call it."""

    number: int
    rows: Callable[[int, int], NDArray[np.integer]]


class Pool(Sequence[Prompt]):
    """Prompts by row. ``dropped``: prompts that it lacks, which were too long as files were read."""

    dropped: int = 0

    @abstractmethod
    def at(self, row: int, upcoming: Upcoming) -> Prompt | None:
        """The prompt of the draw ``upcoming.number``, which this row is; None if it is too long."""

    def read_ahead(self, row: int, upcoming: Upcoming) -> bool:
        """Read what `at` needs for this row and some that follow, and render the row; whether it is short enough. May
        take minutes. Raises as `at`."""
        return True

    @property
    def reads(self) -> bool:
        """Whether `at` reads or renders, unless `read_ahead` did."""
        return False

    @abstractmethod
    def conversations(self) -> Iterator[Prompt]:
        """The conversations among them, each read once and not held."""

    @abstractmethod
    def row_of(self, name: str) -> int:
        """The row of the prompt with this id."""

    @abstractmethod
    def name_of(self, row: int) -> str:
        """The prompt's id."""

    @abstractmethod
    def sources(self, names: Sequence[str]) -> Mapping[str, NDArray[np.integer]]:
        """The rows of each of these sources."""

    @abstractmethod
    def digest(self, rows: NDArray[np.integer], of: DigestOf = "rows") -> str:
        """A checksum of all prompts of one source, as `digest_of_prompts`."""

    @overload
    def __getitem__(self, row: int) -> Prompt: ...

    @overload
    def __getitem__(self, row: slice) -> list[Prompt]: ...

    def __getitem__(self, row: int | slice) -> Prompt | list[Prompt]:
        """Raises DataError if it is too long."""
        if isinstance(row, slice):
            return [self[one] for one in range(*row.indices(len(self)))]
        at = range(len(self))[row]  # IndexError, and rows from the end
        rows = Upcoming(at, lambda start, stop: np.arange(start, min(stop, len(self)), dtype=np.uint32))
        prompt = self.at(at, rows)
        if prompt is None:
            raise DataError(f"prompt {self.name_of(at)!r} has too many tokens")
        return prompt


class Listed(Pool):
    """Prompts that are in memory."""

    def __init__(self, prompts: Sequence[Prompt], dropped: int = 0) -> None:
        self._prompts, self.dropped = prompts, dropped

    def __len__(self) -> int:
        return len(self._prompts)

    @override
    def at(self, row: int, upcoming: Upcoming) -> Prompt | None:
        return self._prompts[row]

    @override
    def conversations(self) -> Iterator[Prompt]:
        return (one for one in self._prompts if not one.token_ids)

    @override
    def row_of(self, name: str) -> int:
        hashes, rows = self._by_hash
        first, last = (int(np.searchsorted(hashes, np.int64(hash(name)), side)) for side in ("left", "right"))
        for row in rows[first:last].tolist():
            if self._prompts[row].id == name:
                return int(row)
        raise KeyError(name)

    @override
    def name_of(self, row: int) -> str:
        return self._prompts[row].id

    @override
    def sources(self, names: Sequence[str]) -> Mapping[str, NDArray[np.integer]]:
        rows: dict[str, list[int]] = {name: [] for name in names}
        for row, prompt in enumerate(self._prompts):
            rows[prompt.source].append(row)
        return {name: np.array(own, np.uint32) for name, own in rows.items()}

    @override
    def digest(self, rows: NDArray[np.integer], of: DigestOf = "rows") -> str:
        return digest_of_prompts([self._prompts[row] for row in rows.tolist()], of)

    @cached_property
    def _by_hash(self) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """The hashes of all ids, ascending, and their rows: 12 bytes a prompt, where a table of names takes 59."""
        hashes = np.fromiter((hash(prompt.id) for prompt in self._prompts), np.int64, len(self._prompts))
        rows = np.argsort(hashes, kind="stable").astype(np.uint32)
        return hashes[rows], rows


class RowsOfPrompts(Pool):
    """Rows of files, of which those that are drawn next are held: once a window of them is in use, a thread reads the
    following one. The order of draws does not depend on windows."""

    def __init__(self, files: FileRows, kept: NDArray[np.bool_] | None, form: RowForm, *, source: str) -> None:
        """``kept``: the rows of ``files`` that are in the pool; None: all."""
        self._rows, self._files, self._form, self._source = files.rows, files, form, source
        whole = np.arange(len(self._rows), dtype=np.uint32)
        self._kept = whole if kept is None or kept.all() else whole[kept]
        self._held = _Held(np.zeros(0, np.int64), (), 0)
        self._following: Future[_Held] | None = None
        self._reader = ThreadPoolExecutor(1, "parquet")
        self._too_long = 0
        self._made: dict[int, Prompt | TooLong] = {}  # rows that were read ahead, by their numbers

    def __len__(self) -> int:
        return len(self._kept)

    @property
    @override
    def reads(self) -> bool:
        return True

    @override
    def read_ahead(self, row: int, upcoming: Upcoming) -> bool:
        number = int(self._kept[row])
        if number not in self._made:
            if self._held.batch(number) is None:
                self._move(number, upcoming)
            record, (path, line) = self._rows.record(number, self._held.batch(number)), self._rows.line(number)
            data, form = self._files.data, self._form
            if data.messages_field is not None:
                self._made[number] = unrendered([conversation(record, path, line, data)])[0]
            else:
                problem = rendered(record, path, line, data, form.tokenizer)
                self._made[number] = tokenized_one(problem, form, chat=data.chat_template)
        return isinstance(self._made[number], Prompt)

    @override
    def at(self, row: int, upcoming: Upcoming) -> Prompt | None:
        self.read_ahead(row, upcoming)
        number = int(self._kept[row])
        prompt = self._made.pop(number)
        if isinstance(prompt, TooLong):
            self._is_long(self._rows.place(number), prompt)
            return None
        return self._named(prompt)

    @override
    def conversations(self) -> Iterator[Prompt]:
        return map(self._named, self._files.conversations(self._kept.astype(np.int64)))

    @override
    def row_of(self, name: str) -> int:
        stem, line = name.removeprefix(f"{self._source}/").rsplit(":", 1)
        row = self._kept.dtype.type(self._rows.row(stem, int(line)))  # of another type, numpy would copy all rows
        return int(np.searchsorted(self._kept, row))

    @override
    def name_of(self, row: int) -> str:
        path, line = self._rows.line(int(self._kept[row]))
        return f"{self._source}/{path.stem}:{line}" if self._source else f"{path.stem}:{line}"

    @override
    def sources(self, names: Sequence[str]) -> Mapping[str, NDArray[np.integer]]:
        return {self._source: np.arange(len(self), dtype=np.uint32)}

    @override
    def digest(self, rows: NDArray[np.integer], of: DigestOf = "rows") -> str:
        """Of the files' bytes, and of which rows are in the pool."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return hashlib.blake2b(self._rows.checksum().encode() + self._kept.tobytes(), digest_size=16).hexdigest()

    def _named(self, prompt: Prompt) -> Prompt:
        """Of a source of a mixture."""
        return replace(prompt, id=f"{self._source}/{prompt.id}", source=self._source) if self._source else prompt

    def _move(self, number: int, upcoming: Upcoming) -> None:
        """Hold the following window, or, if it lacks the row that is drawn, one that begins with it."""
        following, self._following = self._following, None
        held = following.result() if following is not None else None
        if held is None or held.batch(number) is None:
            held = self._read(upcoming.number, upcoming)
        self._held = held
        self._following = self._reader.submit(self._read, held.stop, upcoming)

    def _read(self, start: int, upcoming: Upcoming) -> _Held:
        """The window that begins with this draw, across the end of an epoch if need be."""
        each = self._rows.row_bytes
        most = max(_WINDOW_BYTES // each, min(len(self) // _MOST_WINDOWS, _LARGE_WINDOW_BYTES // each), 1)
        stop = start + min(most, _MOST_ROWS, len(self))
        numbers = np.unique(self._kept[upcoming.rows(start, stop)]).astype(np.int64)
        return _Held(numbers, tuple(self._rows.selected(numbers, None)), stop)

    def _is_long(self, place: str, why: TooLong) -> None:
        if self._form.on_long == "fail":
            raise DataError(f"{place}: the prompt has {why}; raise it or set {self._form.keys[1]}=drop")
        self._too_long += 1
        if not self._too_long & (self._too_long - 1):
            logger.warning(
                "dropped %d prompts so far that have more tokens than %s when they were drawn; the last is %s with %s",
                *(self._too_long, f"{why.key}={why.most}", place, why.length),
            )


class _Held:
    """Rows in memory: their ascending ``numbers``, and record batches of them, one after the other. ``stop``: number of
    the first draw after them."""

    def __init__(self, numbers: NDArray[np.int64], batches: Sequence[Any], stop: int) -> None:
        self._numbers, self._batches, self.stop = numbers, batches, stop
        self._starts = np.cumsum([0, *map(len, batches)])

    def batch(self, number: int) -> Any:
        """The row alone; None if it is not held."""
        at = int(np.searchsorted(self._numbers, number))
        if at == len(self._numbers) or self._numbers[at] != number:
            return None
        part = int(np.searchsorted(self._starts, at, "right")) - 1
        return self._batches[part].slice(at - int(self._starts[part]), 1)


class Joined(Pool):
    """Pools of several sources, one after the other; each has one source."""

    def __init__(self, parts: Sequence[Pool]) -> None:
        self._parts = parts
        self._starts = np.cumsum([0, *map(len, parts)])
        self.dropped = sum(part.dropped for part in parts)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @override
    def at(self, row: int, upcoming: Upcoming) -> Prompt | None:
        part, start = self._part(row)
        return part.at(row - start, _inside(upcoming, start, len(part)))

    @property
    @override
    def reads(self) -> bool:
        return any(part.reads for part in self._parts)

    @override
    def read_ahead(self, row: int, upcoming: Upcoming) -> bool:
        part, start = self._part(row)
        return part.read_ahead(row - start, _inside(upcoming, start, len(part)))

    @override
    def conversations(self) -> Iterator[Prompt]:
        return chain.from_iterable(part.conversations() for part in self._parts)

    @override
    def row_of(self, name: str) -> int:
        source = name.split("/", 1)[0]
        at = next(i for i, part in enumerate(self._parts) if part.name_of(0).startswith(f"{source}/"))
        return int(self._starts[at]) + self._parts[at].row_of(name)

    @override
    def name_of(self, row: int) -> str:
        part, start = self._part(row)
        return part.name_of(row - start)

    @override
    def sources(self, names: Sequence[str]) -> Mapping[str, NDArray[np.integer]]:
        found = {}
        for part, start in zip(self._parts, self._starts.tolist(), strict=False):
            (name,) = {part.name_of(0).split("/", 1)[0]}
            found[name] = np.arange(start, start + len(part), dtype=np.uint32)
        return {name: found[name] for name in names}

    @override
    def digest(self, rows: NDArray[np.integer], of: DigestOf = "rows") -> str:
        part, start = self._part(int(rows[0]))
        return part.digest(rows - np.uint32(start), of)

    def _part(self, row: int) -> tuple[Pool, int]:
        at = int(np.searchsorted(self._starts, row, "right")) - 1
        return self._parts[at], int(self._starts[at])


def _inside(upcoming: Upcoming, start: int, count: int) -> Upcoming:
    """Those of the rows that are of the part with ``count`` rows from ``start`` on, by their numbers in it."""

    def rows(first: int, stop: int) -> NDArray[np.integer]:
        found = upcoming.rows(first, stop)
        return found[(found >= start) & (found < start + count)] - np.uint32(start)

    return Upcoming(upcoming.number, rows)
