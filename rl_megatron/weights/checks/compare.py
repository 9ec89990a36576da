"""Compares the reports of an engine server's ranks with the learner's checksums of whole tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rl_megatron.weights.boxes import Box, Shape
from rl_megatron.weights.checks.checksums import add
from rl_megatron.weights.checks.reports import Report, kind_of
from rl_megatron.weights.checks.whole import by_tensor, is_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Hugging Face tensors by name: those that differ, with the parameters that hold them; and those unseen."""

    differing: Mapping[str, frozenset[str]]
    unseen: frozenset[str]

    def private(self, reports: Sequence[Report]) -> frozenset[str]:
        """Kinds of parameters that hold several tensors, over all layers and experts, all of which differ."""
        wrong = {(param, hf) for hf, params in self.differing.items() for param in params}
        same = {kind_of(param) for report in reports for param, hf, _, _ in report.rows if (param, hf) not in wrong}
        return frozenset(kind for kind, n in Counter(kind_of(p) for p, _ in wrong).items() if n > 1) - same


def compare(
    sealed: Mapping[str, int], shapes: Mapping[str, Shape], reports: Sequence[Report], private: frozenset[str]
) -> Comparison:
    """Compare one server's ranks with the sealed checksums, ignoring parameters of ``private`` kinds.

    A box that several ranks hold, as replicated norms and heads, must be equal on all, and counts once. A tensor that
    arrived with another checksum than the sealed one differs, whatever the ranks hold.
    """
    visible = [replace(one, rows=[row for row in one.rows if kind_of(row[0]) not in private]) for one in reports]
    boxes = by_tensor(row[1:] for report in visible for row in report.rows)
    read = by_tensor(row for report in reports for row in report.read)
    differing, unseen = {}, set()
    for name, shape in shapes.items():
        held, came = boxes.get(name, {}), read.get(name, {})
        if name in sealed and is_whole(came, shape) and _differ(came, sealed[name]):
            differing[name] = frozenset[str]()
        elif name not in sealed or not is_whole(held, shape):
            unseen.add(name)
        elif _differ(held, sealed[name]):
            differing[name] = frozenset(param for report in visible for param, hf, _, _ in report.rows if hf == name)
    return Comparison(differing=differing, unseen=frozenset(unseen))


def _differ(boxes: Mapping[Box, set[int]], sealed: int) -> bool:
    """Whether ranks hold different checksums of one box, or the sum over boxes is not the sealed checksum."""
    return any(len(sums) > 1 for sums in boxes.values()) or add(*(min(sums) for sums in boxes.values())) != sealed


def count_verified(
    sealed: Mapping[str, int], shapes: Mapping[str, Shape], reports: Sequence[Report]
) -> tuple[int, list[str]]:
    """How many tensors of one server can be compared with ``sealed``, and the names of those that differ."""
    found = compare(sealed, shapes, reports, frozenset())
    found = compare(sealed, shapes, reports, found.private(reports))
    return len(shapes) - len(found.unseen), sorted(found.differing)
