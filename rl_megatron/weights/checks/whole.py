"""Adds up the checksums of boxes, which ranks report, to checksums of whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from rl_megatron.errors import CorruptionError
from rl_megatron.weights.boxes import Box, Shape, volume
from rl_megatron.weights.checks.checksums import add
from rl_megatron.weights.checks.reports import Read, Report


def sealed_by(reports: Sequence[Report], shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Checksums of whole tensors, from the reports of the learner's ranks on their boxes.

    Raises CorruptionError that names a tensor of which two ranks hold different bytes.
    """
    out = {}
    for name, held in by_tensor(row[1:] for report in reports for row in report.rows).items():
        if any(len(sums) > 1 for sums in held.values()):
            raise CorruptionError(f"{name}: learner ranks hold different bytes of it, though they must hold the same")
        if is_whole(held, shapes[name]):
            out[name] = add(*(min(sums) for sums in held.values()))
    return out


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


def by_tensor(rows: Iterable[Read]) -> dict[str, dict[Box, set[int]]]:
    """By tensor, the reported checksums of each of its boxes."""
    boxes: dict[str, dict[Box, set[int]]] = {}
    for hf, box, sum_ in rows:
        boxes.setdefault(hf, {}).setdefault(box, set()).add(sum_)
    return boxes


def is_whole(boxes: Iterable[Box], shape: Shape) -> bool:
    """Whether boxes that do not overlap fill a tensor."""
    return sum(map(volume, boxes)) == prod(shape)
