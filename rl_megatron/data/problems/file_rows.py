"""The rows to train on of parquet files: what they are compared by, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rl_megatron.config.sections.data import FileKeys
from rl_megatron.data.problems.conversations import conversation, conversation_text, unrendered
from rl_megatron.data.problems.leaks import ProblemTexts, digests_of, spaced
from rl_megatron.data.problems.parquet import ParquetRows
from rl_megatron.data.problems.records import Record, listed
from rl_megatron.data.problems.rendering import check_pair, fields_of, system_of
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

    @property
    def texts(self) -> ProblemTexts:
        """What may not be held out."""
        return self.rows if self.data.messages_field is None else _RowTexts(self, _conversation_text)

    @property
    def wholes(self) -> ProblemTexts:
        """What two rows have in common of which the first alone is trained on where nothing is sampled."""
        if self.data.messages_field is not None:
            return self.texts
        if self.data.rejected_field is None and self.data.system_field is None and self.rows.are_texts:
            return _AnsweredTexts(self.rows)
        return _RowTexts(self, _answered_text)

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


def file_rows(paths: Sequence[Path], data: FileKeys, key: str) -> FileRows:
    """Of parquet files, whose footers are read; ``key``: the config key that gave them. Raises as `ParquetRows`."""
    return FileRows(ParquetRows(paths, fields_of(data), key, _others(data)), data)


def _others(data: FileKeys) -> tuple[str, ...]:
    """The fields besides those of texts that a row must have."""
    written = (data.messages_field, data.rejected_field, data.tools_field, data.context_field)
    names = (*written, data.margin_field, data.system_field)
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


class _RowTexts(_OfRows):
    """Texts that are made of several columns of a row: by Python, some 60,000 a second."""

    def __init__(self, files: FileRows, text: Callable[[Record, str, FileKeys], str]) -> None:
        super().__init__(files.rows)
        self._files, self._text = files, text

    @override
    def hashes(self) -> NDArray[np.int64]:
        """Raises DataError that names all bad rows."""
        hashes, problems = np.zeros(len(self), np.int64), list[str]()
        for row, record in self._rows.records(np.arange(len(self)), self._files.columns):
            try:
                hashes[row] = hash(self._of(row, record))
            except DataError as error:
                problems.append(str(error))
        if problems:
            raise DataError(listed(problems))
        return hashes

    @override
    def digests(self, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
        return digests_of(self._of(row, record) for row, record in self._rows.records(rows, self._files.columns))

    def _of(self, row: int, record: Record | str) -> str:
        return self._text(self._files.checked(row, record), self._rows.place(row), self._files.data)


def _conversation_text(record: Record, place: str, data: FileKeys) -> str:
    return spaced(conversation_text(record, place, data, in_structs=True))


def _answered_text(record: Record, place: str, data: FileKeys) -> str:
    check_pair(record, place, data)
    system = system_of(record, place, data)
    return spaced(*([system] if system else []), *record.texts)
