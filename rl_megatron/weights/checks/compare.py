"""Compares the reports of an engine server's ranks with the learner's checksums of whole tensors.

Reads reports of engine ranks, as `packed_report` writes them.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from rl_megatron.errors import CorruptionError
from rl_megatron.weights.boxes import Box, Shape
from rl_megatron.weights.checks.reports import (
    ChecksumReport,
    PlacedBox,
    ReportColumn,
    added_up,
    digest_of_boxes,
    parameter_kind,
)

logger = logging.getLogger(__name__)

_NAMED = 20  # tensors that an error names


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Hugging Face tensors by name: those that differ, with the parameters that hold them; and those unseen."""

    differing: Mapping[str, frozenset[str]]
    unchecked: frozenset[str]

    def private(self, reports: Sequence[ChecksumReport]) -> frozenset[str]:
        """Kinds of parameters that hold several tensors, over all layers and experts, and all of them differ."""
        wrong = {(param, hf) for hf, params in self.differing.items() for param in params}
        right = {param for report in reports for param, hf, _, _ in report.rows if (param, hf) not in wrong}
        several = {kind for kind, n in Counter(parameter_kind(param) for param, _ in wrong).items() if n > 1}
        return frozenset(several - {parameter_kind(param) for param in right})

    def verified(self, server: str, owner: str) -> frozenset[str]:
        """The unseen tensors. Raises CorruptionError for those that differ from ``owner`` bytes."""
        named = sorted(self.differing)
        if named:
            more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
            raise CorruptionError(f"{server}: its bytes are not those {owner} in {', '.join(named[:_NAMED])}{more}")
        return self.unchecked


def compare(
    sealed: Mapping[str, int], shapes: Mapping[str, Shape], reports: Sequence[ChecksumReport], private: frozenset[str]
) -> Comparison:
    """Compares one server's ranks with the sealed checksums, ignoring parameters of ``private`` kinds.

    A box that several ranks hold, as replicated norms and heads, must be equal on all, and counts once. A tensor that
    arrived with another checksum than the sealed one differs, whatever the ranks hold.
    """
    rows = [row for report in reports for row in report.rows]
    if private:
        hidden = {param for param in {row[0] for row in rows} if parameter_kind(param) in private}
        rows = [row for row in rows if row[0] not in hidden]
    held, read = added_up(row[1:] for row in rows), added_up(row for report in reports for row in report.read)
    unseen, wrong = set[str](), set[str]()
    differing: dict[str, set[str]] = {}
    for name, shape in shapes.items():
        if name in sealed and read.is_complete(name, shape) and not read.equals(name, sealed[name]):
            differing[name] = set()
        elif name not in sealed or not held.is_complete(name, shape):
            unseen.add(name)
        elif not held.equals(name, sealed[name]):
            differing[name] = set()
            wrong.add(name)
    for param, hf, _, _ in rows if wrong else ():
        if hf in wrong:
            differing[hf].add(param)
    return Comparison(
        differing={name: frozenset(params) for name, params in differing.items()}, unchecked=frozenset(unseen)
    )


class ServerComparisons:
    """Compares servers' ranks with sealed checksums, one server after another. Which kinds of parameters a server keeps
    in a private layout is found by its first comparison."""

    def __init__(self) -> None:
        self.private: dict[str, frozenset[str]] = {}  # kinds of parameters, by server

    def find(
        self,
        name: str,
        sealed: Mapping[str, int],
        shapes: Mapping[str, Shape],
        reports: Sequence[ChecksumReport],
        known: dict[object, Comparison] | None = None,
    ) -> Comparison:
        """Returns the differing and the unseen tensors of the server, without its private kinds.

        ``known``: the comparisons of servers with the same lists in their reports, which equal layouts have.
        """
        known = {} if known is None else known

        def compared(private: frozenset[str]) -> Comparison:
            which = private, *((id(report.rows), id(report.read)) for report in reports)
            if which not in known:
                known[which] = compare(sealed, shapes, reports, private)
            return known[which]

        found = compared(private := self.private.get(name, frozenset()))
        if found.differing and name not in self.private:
            found = compared(private := found.private(reports))
        if name not in self.private and not found.differing:
            self.private[name] = private
            kinds = f", of these {', '.join(sorted(private))} in private layouts" if private else ""
            logger.info(
                "%s: checksums verify all but %d of %d tensors%s", name, len(found.unchecked), len(shapes), kinds
            )
        return found


_PLACES: dict[ReportColumn, Any] = {"rows": tuple[tuple[str, str, Box], ...], "read": tuple[tuple[str, Box], ...]}
_UNNAMED = msgspec.Raw()


class _Packed(msgspec.Struct, frozen=True):
    digest: str
    sums: bytes
    places: msgspec.Raw = _UNNAMED


class _RankReport(msgspec.Struct, frozen=True):
    rows: _Packed
    read: _Packed
    seconds: float
    window: int


class _Shared(list[Any]):
    """A list that may be referred to weakly."""


class ReportReader:
    """Knows the boxes that ranks have named.

    Equal columns, as of ranks of servers of equal layouts, are one object for as long as it is in use.
    """

    def __init__(self) -> None:
        self._places: dict[str, tuple[PlacedBox, ...]] = {}  # ranks' boxes, by their digest
        self._columns: WeakValueDictionary[tuple[str, bytes], _Shared] = WeakValueDictionary()  # key: box, sum digests

    @property
    def known(self) -> list[str]:
        """Digests of the boxes that no rank needs to name again."""
        return sorted(self._places)

    def read(self, text: bytes) -> ChecksumReport:
        """The report in the JSON ``text``. Raises ValueError that names the first part that is not of this form. Also
        where a column has not one checksum for each of its boxes, and where these are unknown."""
        try:
            said = msgspec.json.decode(text, type=_RankReport)
        except msgspec.ValidationError as error:
            raise ValueError(f"{error}; the server needs the trainer's version of rl_megatron") from error
        rows, read = self._column("rows", said.rows), self._column("read", said.read)
        return ChecksumReport(rows=rows, read=read, seconds=said.seconds, window=said.window)

    def _column(self, column: ReportColumn, packed: _Packed) -> _Shared:
        key = packed.digest, hashlib.blake2b(packed.sums, digest_size=32).digest()
        if (found := self._columns.get(key)) is None:
            places = self._known(column, packed)
            if len(packed.sums) != 8 * len(places):
                raise ValueError(
                    f"{column}: {len(packed.sums)} bytes of checksums for {len(places)} boxes, not 8 for each"
                )
            sums = np.frombuffer(packed.sums, "<u8").tolist()
            found = self._columns[key] = _Shared((*place, sum_) for place, sum_ in zip(places, sums, strict=True))
        return found

    def _known(self, column: ReportColumn, packed: _Packed) -> tuple[PlacedBox, ...]:
        if packed.digest not in self._places:
            if packed.places is _UNNAMED:
                raise ValueError(
                    f"{column}: it names no boxes, and those of digest {packed.digest:.80} are not known here"
                )
            try:
                places = msgspec.json.decode(packed.places, type=_PLACES[column])
            except ValueError as error:
                raise ValueError(f"{column}: {error}") from error
            if (digest := digest_of_boxes(column, places)) != packed.digest:
                raise ValueError(f"{column}: its boxes have digest {digest}, but it says {packed.digest:.80}")
            self._places = {**self._places, digest: places}  # another thread may list them
        return self._places[packed.digest]
