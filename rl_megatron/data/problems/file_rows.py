"""The rows to train on of parquet files: what they are compared by, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rl_megatron.config.sections.data import FileKeys
from rl_megatron.data.problems.leaks import ProblemKey, ProblemTexts, digests_of
from rl_megatron.data.problems.parquet import ParquetRows
from rl_megatron.data.problems.records import Record, listed
from rl_megatron.data.problems.rendering import Problem, conversation, fields_of, form_of, problem_in, unrendered
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

    def compared(self, *by: ProblemKey) -> list[ProblemTexts]:
        """Returns the texts that rows are compared by, for each key. All keys share what Python makes of the rows."""
        read = _ReadRows(self)
        return [_RowTexts(read, one) for one in by]

    def are_plain(self, texts: int) -> bool:
        """True if Arrow can compare the first ``texts`` fields, and no other field is read of a problem."""
        return not (_others(self.data) or self.data.rejected_field) and self.rows.are_texts(texts)

    def problem(self, row: int, record: Record | str) -> Problem:
        """The problem of a row, without the tokenizer's template. Raises DataError as `problem_in` and `checked`."""
        return problem_in(self.checked(row, record), *self.rows.line(row), self.data)

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


class _ReadRows:
    """Problems of rows that are made by Python: some 50,000 a second. ``by_arrow``: hashes of this many texts."""

    def __init__(self, files: FileRows) -> None:
        self.files, self.by_arrow = files, dict[int, NDArray[np.int64]]()

    @cached_property
    def has_chats(self) -> bool:
        """True if texts of rows may be messages in JSON."""
        return self.files.data.chat_template and self.files.rows.has_lists()

    @cached_property
    def hashes(self) -> NDArray[np.int64]:
        """64 bits of one text of each row, and of two: [R, 2]. Raises DataError that names all bad rows."""
        hashes, problems = np.zeros((len(self.files.rows), 2), np.int64), list[str]()
        for row, record in self.files.rows.records(np.arange(len(self.files.rows)), self.files.columns):
            try:
                one = self.files.problem(row, record)
                hashes[row] = hash(one.hashed(1)), hash(one.hashed(2))
            except DataError as error:
                problems.append(str(error))
        if problems:
            raise DataError(listed(problems))
        return hashes


class _RowTexts(ProblemTexts):
    """The texts that each row is compared by."""

    def __init__(self, read: _ReadRows, by: ProblemKey) -> None:
        self._read, self._by = read, by
        self._files, self._form = read.files, form_of(read.files.data)

    def __len__(self) -> int:
        return len(self._files.rows)

    @override
    def place(self, row: int) -> str:
        return self._files.rows.place(row)

    @override
    def hashes(self) -> NDArray[np.int64]:
        texts = self._by.hashed
        if self._files.are_plain(texts) and not self._read.has_chats:
            if texts not in self._read.by_arrow:
                self._read.by_arrow[texts] = self._files.rows.hashes(texts, self._form)
            return self._read.by_arrow[texts]
        return self._read.hashes[:, texts - 1]

    @override
    def digests(self, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
        files, fields, texts = self._files, self._by.fields, 1 + self._by.answers
        if fields == () and files.are_plain(texts) and not self._read.has_chats:
            return files.rows.digests(rows, texts, self._form)
        records = files.rows.records(rows, None if fields is None else [*dict.fromkeys((*files.columns, *fields))])
        return digests_of(files.problem(row, record).compared(self._by) for row, record in records)
