"""Adds up the checksums of boxes, which ranks report, to checksums of whole tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from rl_megatron.errors import CorruptionError
from rl_megatron.weights.boxes import Box, Shape, volume
from rl_megatron.weights.checks.checksums import add
from rl_megatron.weights.checks.reports import Read, Report


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSums:
    """Sums over the boxes of each tensor, a box that several ranks hold once: of checksums, and of elements.

    ``torn`` are tensors of which two ranks hold other bytes in one box.
    """

    checksums: Mapping[str, int]
    elements: Mapping[str, int]
    torn: Collection[str]

    def whole(self, name: str, shape: Shape) -> bool:
        """Whether the boxes, which do not overlap, fill the tensor."""
        return self.elements.get(name, 0) == prod(shape)

    def equals(self, name: str, sealed: int) -> bool:
        """Whether all ranks that hold a box of the tensor agree, and its checksum is the sealed one."""
        return name not in self.torn and add(self.checksums.get(name, 0)) == sealed


def sealed_by(reports: Sequence[Report], shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Checksums of whole tensors, from the reports of the learner's ranks on their boxes.

    Raises CorruptionError that names a tensor of which two ranks hold different bytes.
    """
    added = added_up(row[1:] for report in reports for row in report.rows)
    if added.torn:
        raise CorruptionError(
            f"{min(added.torn)}: learner ranks hold different bytes of it, though they must hold the same"
        )
    return {name: add(sum_) for name, sum_ in added.checksums.items() if added.whole(name, shapes[name])}


def largest_change(changes: Iterable[Mapping[str, tuple[float, float]]]) -> tuple[float, str] | None:
    """The largest relative error of a quantised tensor, in Frobenius norms, and its name; None if none is quantised.

    ``changes`` are squared norms of boxes and of what quantising changed in them (`Report.changes`).
    """
    sums: dict[str, tuple[float, float]] = {}
    for one in changes:
        for name, (squares, errors) in one.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + squares, before[1] + errors
    found = (((errors / squares) ** 0.5 if squares else 0.0, name) for name, (squares, errors) in sums.items())
    return max(found, default=None)


def added_up(rows: Iterable[Read]) -> TensorSums:
    """Add up the checksums of boxes, by tensor."""
    boxes: dict[tuple[str, Box], int] = {}
    torn = {hf for hf, box, sum_ in rows if boxes.setdefault((hf, box), sum_) != sum_}
    checksums, elements = dict[str, int](), dict[str, int]()
    volumes = {box: volume(box) for _, box in boxes}  # of the few that differ
    for (hf, box), sum_ in boxes.items():
        checksums[hf] = checksums.get(hf, 0) + sum_
        elements[hf] = elements.get(hf, 0) + volumes[box]
    return TensorSums(checksums=checksums, elements=elements, torn=torn)
