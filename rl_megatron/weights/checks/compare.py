"""Compares the reports of an engine server's ranks with the learner's checksums of whole tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_megatron.weights.boxes import Shape
from rl_megatron.weights.checks.reports import Report, kind_of
from rl_megatron.weights.checks.whole import added_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Hugging Face tensors by name: those that differ, with the parameters that hold them; and those unseen."""

    differing: Mapping[str, frozenset[str]]
    unseen: frozenset[str]

    def private(self, reports: Sequence[Report]) -> frozenset[str]:
        """Kinds of parameters that hold several tensors, over all layers and experts, all of which differ."""
        wrong = {(param, hf) for hf, params in self.differing.items() for param in params}
        right = {param for report in reports for param, hf, _, _ in report.rows if (param, hf) not in wrong}
        several = {kind for kind, n in Counter(kind_of(param) for param, _ in wrong).items() if n > 1}
        return frozenset(several - {kind_of(param) for param in right})


def compare(
    sealed: Mapping[str, int], shapes: Mapping[str, Shape], reports: Sequence[Report], private: frozenset[str]
) -> Comparison:
    """Compare one server's ranks with the sealed checksums, ignoring parameters of ``private`` kinds.

    A box that several ranks hold, as replicated norms and heads, must be equal on all, and counts once. A tensor that
    arrived with another checksum than the sealed one differs, whatever the ranks hold.
    """
    rows = [row for report in reports for row in report.rows]
    if private:
        hidden = {param for param in {row[0] for row in rows} if kind_of(param) in private}
        rows = [row for row in rows if row[0] not in hidden]
    held, read = added_up(row[1:] for row in rows), added_up(row for report in reports for row in report.read)
    unseen, wrong = set[str](), set[str]()
    differing: dict[str, set[str]] = {}
    for name, shape in shapes.items():
        if name in sealed and read.whole(name, shape) and not read.equals(name, sealed[name]):
            differing[name] = set()
        elif name not in sealed or not held.whole(name, shape):
            unseen.add(name)
        elif not held.equals(name, sealed[name]):
            differing[name] = set()
            wrong.add(name)
    for param, hf, _, _ in rows if wrong else ():
        if hf in wrong:
            differing[hf].add(param)
    return Comparison(
        differing={name: frozenset(params) for name, params in differing.items()}, unseen=frozenset(unseen)
    )


def count_verified(
    sealed: Mapping[str, int], shapes: Mapping[str, Shape], reports: Sequence[Report]
) -> tuple[int, list[str]]:
    """How many tensors of one server can be compared with ``sealed``, and the names of those that differ."""
    found = compare(sealed, shapes, reports, frozenset())
    found = compare(sealed, shapes, reports, found.private(reports))
    return len(shapes) - len(found.unseen), sorted(found.differing)
