"""Rows of metrics kept by column: a number takes 9 bytes, where in a dict for each row it takes about 120."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rl_megatron.observability.files import JsonRow, JsonValue, finite

_BLOCK = 512  # rows that are put into columns at once


@dataclass(frozen=True, slots=True)
class _Column:
    values: array[float] = field(default_factory=lambda: array("d"))  # NaN where it is None
    recorded: bytearray = field(default_factory=bytearray)  # 1 where the row has it; both may end before the rows do

    def put(self, places: NDArray[np.intp], values: NDArray[np.float64]) -> None:
        """``places`` ascend."""
        if (missing := int(places[-1]) + 1 - len(self.values)) > 0:
            self.values.frombytes(np.full(missing, math.nan).tobytes())
            self.recorded.extend(bytes(missing))
        np.frombuffer(self.values)[places] = values
        np.frombuffer(self.recorded, np.uint8)[places] = 1


class _Row(Mapping[str, float | None]):
    """Reads one row's numbers from the columns."""

    __slots__ = ("_at", "_columns")

    def __init__(self, at: int, columns: Mapping[str, _Column]) -> None:
        self._at, self._columns = at, columns

    @override
    def __contains__(self, name: object) -> bool:
        column = self._columns.get(name)  # type: ignore[call-overload]
        return column is not None and self._at < len(column.recorded) and column.recorded[self._at] == 1

    @override
    def __getitem__(self, name: str) -> float | None:
        column = self._columns[name]
        if self._at >= len(column.recorded) or not column.recorded[self._at]:
            raise KeyError(name)
        value = column.values[self._at]
        return None if math.isnan(value) else value

    @override
    def __iter__(self) -> Iterator[str]:
        return filter(self.__contains__, self._columns)

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)


class MetricColumns(Sequence[JsonRow]):
    """The rows that were added, with their numbers, and None for all else, as for texts."""

    def __init__(self) -> None:
        self._put: dict[str, _Column] = {}
        self._num = 0
        self._waiting: dict[tuple[str, ...], tuple[list[int], list[Sequence[JsonValue]]]] = {}  # by the names of a row

    @override
    def __len__(self) -> int:
        return self._num

    @overload
    def __getitem__(self, at: int) -> JsonRow: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[JsonRow]: ...

    @override
    def __getitem__(self, at: int | slice) -> JsonRow | Sequence[JsonRow]:
        places = range(self._num)[at]
        return _Row(places, self._columns) if isinstance(places, int) else [_Row(i, self._columns) for i in places]

    @property
    def names(self) -> list[str]:
        """Of all metrics, by their first row."""
        return list(self._columns)

    def values(self, name: str) -> NDArray[np.float64]:
        """Of a metric in each row; NaN where it is None, or the row lacks it."""
        found, column = np.full(self._num, math.nan), self._columns.get(name)
        if column is not None:
            found[: len(column.values)] = column.values
        return found

    def recorded(self, name: str) -> NDArray[np.intp]:
        """The places of the rows that have a metric, ascending."""
        column = self._columns.get(name)
        return np.flatnonzero(np.frombuffer(b"" if column is None else column.recorded, np.uint8))

    def append(self, row: JsonRow) -> None:
        """Add a row."""
        places, rows = self._waiting.setdefault(tuple(row), ([], []))
        places.append(self._num)
        rows.append(tuple(row.values()))
        self._num += 1
        if self._num % _BLOCK == 0:
            self._settle()

    def put(self, at: int, row: JsonRow) -> None:
        """Add these values to a row, in place of those of the same names."""
        self._settle()
        for name, value in row.items():
            self._column(name).put(np.array([at]), _floats([value]))

    @property
    def _columns(self) -> Mapping[str, _Column]:
        self._settle()
        return self._put

    def _settle(self) -> None:
        """Put the rows that wait into columns, those of the same names at once."""
        waiting, self._waiting = self._waiting, {}
        for names, (places, rows) in waiting.items():
            at = np.array(places)
            for name, values in zip(names, zip(*rows, strict=True), strict=True):
                self._column(name).put(at, _floats(values))

    def _column(self, name: str) -> _Column:
        if (column := self._put.get(name)) is None:
            column = self._put[name] = _Column()
        return column


def _floats(values: Sequence[JsonValue]) -> NDArray[np.float64]:
    """NaN for what is no finite float."""
    try:
        found = np.frombuffer(array("d", cast("Sequence[float]", values)))
    except (TypeError, OverflowError):
        found = np.array([math.nan if (number := finite(value)) is None else number for value in values], np.float64)
    return np.where(np.isfinite(found), found, math.nan)
