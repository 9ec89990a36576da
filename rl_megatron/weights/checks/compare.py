"""Adds the checksums of boxes up over ranks and compares them with those of whole tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from rl_megatron.errors import CorruptionError
from rl_megatron.weights.boxes import Box, Shape
from rl_megatron.weights.checks.checksums import add
from rl_megatron.weights.checks.reports import Read, Report, kind_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Hugging Face tensors by name: those that differ, with the parameters they lie in; and those unseen."""

    differing: Mapping[str, frozenset[str]]
    unseen: frozenset[str]

    def private(self, reports: Sequence[Report]) -> frozenset[str]:
        """Kinds of parameters that hold several tensors, over all layers and experts, all of which differ."""
        wrong = {(param, hf) for hf, params in self.differing.items() for param in params}
        same = {kind_of(param) for report in reports for param, hf, _, _ in report.rows if (param, hf) not in wrong}
        return frozenset(kind for kind, n in Counter(kind_of(p) for p, _ in wrong).items() if n > 1) - same


def sealed_by(reports: Sequence[Report], shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Checksums of whole tensors from what the learner's ranks say of their boxes.

    Raises CorruptionError naming a tensor that two of them hold otherwise.
    """
    out = {}
    for name, held in _by_tensor(row[1:] for report in reports for row in report.rows).items():
        if any(len(sums) > 1 for sums in held.values()):
            raise CorruptionError(f"{name}: ranks of the learner that should hold the same hold different bytes of it")
        if _is_whole(held, shapes[name]):
            out[name] = add(*(min(sums) for sums in held.values()))
    return out


def compare(
    sealed: Mapping[str, int], shapes: Mapping[str, Shape], reports: Sequence[Report], private: frozenset[str]
) -> Comparison:
    """What the ranks of one server hold beside the sealed checksums; parameters of ``private`` kinds say nothing.

    A box that several hold, as replicated norms and heads, must be the same everywhere, and counts once. A tensor
    that arrived with another checksum than it was sealed with differs, however it is held.
    """
    visible = [replace(one, rows=[row for row in one.rows if kind_of(row[0]) not in private]) for one in reports]
    boxes = _by_tensor(row[1:] for report in visible for row in report.rows)
    read = _by_tensor(row for report in reports for row in report.read)
    differing, unseen = {}, set()
    for name, shape in shapes.items():
        held, came = boxes.get(name, {}), read.get(name, {})
        if name in sealed and _is_whole(came, shape) and _differ(came, sealed[name]):
            differing[name] = frozenset[str]()
        elif name not in sealed or not _is_whole(held, shape):
            unseen.add(name)
        elif _differ(held, sealed[name]):
            differing[name] = frozenset(param for report in visible for param, hf, _, _ in report.rows if hf == name)
    return Comparison(differing=differing, unseen=frozenset(unseen))


def _by_tensor(rows: Iterable[Read]) -> dict[str, dict[Box, set[int]]]:
    boxes: dict[str, dict[Box, set[int]]] = {}
    for hf, box, sum_ in rows:
        boxes.setdefault(hf, {}).setdefault(box, set()).add(sum_)
    return boxes


def _differ(boxes: Mapping[Box, set[int]], sealed: int) -> bool:
    """Whether two ranks hold one of them with unlike checksums, or all together make another tensor."""
    return any(len(sums) > 1 for sums in boxes.values()) or add(*(min(sums) for sums in boxes.values())) != sealed


def _is_whole(boxes: Iterable[Box], shape: Shape) -> bool:
    return sum(prod(high - low for low, high in box) for box in boxes) == prod(shape)
