"""The rows to train on of parquet files: what they are compared by, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rl_megatron.config.sections.data import FileKeys
from rl_megatron.data.problems.conversations import check_pair, compared_text, conversation_text, messages_of
from rl_megatron.data.problems.leaks import ProblemTexts, digests_of, spaced
from rl_megatron.data.problems.parquet import ParquetRows
from rl_megatron.data.problems.records import Record, listed
from rl_megatron.data.problems.rendering import conversation, fields_of, unrendered
from rl_megatron.errors import DataError
from rl_megatron.types import Prompt


@dataclass(frozen=True, slots=True)
class FileRows:
    """Problems, pairs of answers, or conversations, none of which is in memory."""

    rows: ParquetRows
    data: FileKeys

    @property
    def columns(self) -> list[str]:
        """Those that the texts of a row are made of."""
        return [*fields_of(self.data), *_others(self.data)]

    def compared(self, *, samples: bool) -> tuple[ProblemTexts, ProblemTexts]:
        """What may not be held out, and what rows have in common of which the first alone is trained on, where
        something ``samples``, or nothing does. What Python makes of a row is made once for both."""
        data, rows = self.data, self.rows
        if data.messages_field is not None:
            texts = _RowTexts(_ReadRows(self, _conversation_texts), 0)
            return texts, texts
        asked = rows.are_texts(1)
        if asked and samples and data.system_field is None:
            return rows, rows
        if not samples and data.rejected_field is None and data.system_field is None and rows.are_texts():
            return rows, _AnsweredTexts(rows)
        read = _ReadRows(self, _prompt_texts if samples else _answered_texts)
        return rows if asked else _RowTexts(read, 0), _RowTexts(read, 1)

    def conversations(self, rows: NDArray[np.int64]) -> Iterator[Prompt]:
        """Those of these ascending rows, without fields that are no part of them; none where rows are problems."""
        if self.data.messages_field is None:
            return
        for row, record in self.rows.records(rows, self.columns):
            yield from unrendered([conversation(self.checked(row, record), *self.rows.line(row), self.data)])

    def checked(self, row: int, record: Record | str) -> Record:
        """The record. Raises DataError that names the row if it is what is wrong with it."""
        if isinstance(record, str):
            raise DataError(f"{self.rows.place(row)}: {record}")
        return record


def file_rows(paths: Sequence[Path], data: FileKeys, key: str, *, lists: bool) -> FileRows:
    """Of parquet files, whose footers are read; ``key``: the config key that gave them; ``lists``: prompts may be ones.
    Raises as `ParquetRows`."""
    return FileRows(ParquetRows(paths, fields_of(data), key, _others(data), lists=lists), data)


def _others(data: FileKeys) -> tuple[str, ...]:
    """The fields besides those of texts that a row must have."""
    written = (data.messages_field, data.rejected_field, data.tools_field, data.context_field)
    names = (*written, data.margin_field, data.system_field, data.demonstration_field)
    return tuple(dict.fromkeys(name for name in names if name is not None and name not in fields_of(data)))


class _OfRows(ProblemTexts):
    """A text of each row of parquet files."""

    def __init__(self, rows: ParquetRows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @override
    def place(self, row: int) -> str:
        return self._rows.place(row)


class _AnsweredTexts(_OfRows):
    """Questions with their answers, in columns of text."""

    @override
    def hashes(self) -> NDArray[np.int64]:
        return self._rows.hashes(texts=2)

    @override
    def digests(self, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
        return self._rows.digests(rows, texts=2)


class _ReadRows:
    """Two texts that are made of several columns of a row: by Python, some 50,000 rows a second."""

    def __init__(self, files: FileRows, texts: Callable[[Record, str, FileKeys], tuple[str, str]]) -> None:
        self.files, self._texts = files, texts

    @cached_property
    def hashes(self) -> NDArray[np.int64]:
        """Of both texts of each row: [R, 2]. Raises DataError that names all bad rows."""
        hashes, problems = np.zeros((len(self.files.rows), 2), np.int64), list[str]()
        for row, record in self.files.rows.records(np.arange(len(self.files.rows)), self.files.columns):
            try:
                hashes[row] = tuple(map(hash, self.of(row, record)))
            except DataError as error:
                problems.append(str(error))
        if problems:
            raise DataError(listed(problems))
        return hashes

    def of(self, row: int, record: Record | str) -> tuple[str, str]:
        """The texts of a row."""
        return self._texts(self.files.checked(row, record), self.files.rows.place(row), self.files.data)


class _RowTexts(_OfRows):
    """One of the texts of each row."""

    def __init__(self, read: _ReadRows, which: int) -> None:
        super().__init__(read.files.rows)
        self._read, self._which = read, which

    @override
    def hashes(self) -> NDArray[np.int64]:
        return self._read.hashes[:, self._which]

    @override
    def digests(self, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
        records = self._rows.records(rows, self._read.files.columns)
        return digests_of(self._read.of(row, record)[self._which] for row, record in records)


def _conversation_texts(record: Record, place: str, data: FileKeys) -> tuple[str, str]:
    text = spaced(conversation_text(record, place, data, in_structs=True))
    return text, text


def _prompt_texts(record: Record, place: str, data: FileKeys) -> tuple[str, str]:
    """Without what the system says, and with it."""
    check_pair(record, place, data)
    messages = messages_of(record, place, data, in_structs=True)
    return compared_text(messages, system=False), compared_text(messages, system=True)


def _answered_texts(record: Record, place: str, data: FileKeys) -> tuple[str, str]:
    """As `_prompt_texts`, the second with the answers."""
    asked, whole = _prompt_texts(record, place, data)
    return asked, spaced(whole, *record.texts[1:])
