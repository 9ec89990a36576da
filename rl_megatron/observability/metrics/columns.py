"""Rows of metrics kept by column: a number takes 9 bytes, where in a dict for each row it takes about 120."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from typing_extensions import override

from rl_megatron.observability.files import JsonRow, finite


@dataclass(frozen=True, slots=True)
class _Column:
    values: array[float] = field(default_factory=lambda: array("d"))  # NaN where it is None
    recorded: bytearray = field(default_factory=bytearray)  # 1 where the row has it; both may end before the rows do

    def put(self, at: int, value: float | None) -> None:
        if (missing := at - len(self.values)) > 0:
            self.values.extend(itertools.repeat(math.nan, missing))
            self.recorded.extend(bytes(missing))
        if missing >= 0:
            self.values.append(math.nan if value is None else value)
            self.recorded.append(1)
        else:
            self.values[at], self.recorded[at] = math.nan if value is None else value, 1


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


class MetricColumns:
    """``rows`` have the numbers of the rows that were added, and None for all else, as for texts."""

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}
        self.rows: list[JsonRow] = []

    @property
    def names(self) -> list[str]:
        """Of all metrics, by their first row."""
        return list(self._columns)

    def append(self, row: JsonRow) -> None:
        """Add a row."""
        self.rows.append(_Row(len(self.rows), self._columns))
        self.put(len(self.rows) - 1, row)

    def put(self, at: int, row: JsonRow) -> None:
        """Add these values to a row, in place of those of the same names."""
        for name, value in row.items():
            if (column := self._columns.get(name)) is None:
                column = self._columns[name] = _Column()
            column.put(at, finite(value))
