"""What a mutant changes, and which tests can see it. Imports nothing that draws mutants or measures tests."""

from __future__ import annotations

import ast
import difflib
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass

from tests.flaky import is_rerun


@dataclass(frozen=True)
class Mutant:
    """One file's text with one place changed. ``path`` is relative to the repository; ``place`` tells the change from
    all others of the file, by the operator and the line's text."""

    path: str
    place: str
    source: str
    mutated: str

    def _changes(self) -> list[tuple[int, int, int, int]]:
        before, after = self.source.splitlines(), self.mutated.splitlines()
        codes = difflib.SequenceMatcher(None, before, after, False).get_opcodes()
        return [where for kind, *where in codes if kind != "equal"]

    def lines(self) -> tuple[str, str]:
        """The changed lines before and after, each stripped and joined by spaces."""
        before, after, changes = self.source.splitlines(), self.mutated.splitlines(), self._changes()
        old = [line.strip() for start, end, _, _ in changes for line in before[start:end]]
        new = [line.strip() for _, _, start, end in changes for line in after[start:end]]
        return " ".join(old), " ".join(new)

    def statements(self) -> set[int]:
        """The numbers of the lines of the innermost statements that change; of those with a body, of what is before."""
        out: set[int] = set()
        nodes = [
            (min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))]), node)
            for node in ast.walk(ast.parse(self.source))
            if isinstance(node, ast.stmt | ast.excepthandler)
        ]
        for row in {row for start, end, _, _ in self._changes() for row in range(start + 1, max(end, start + 1) + 1)}:
            around = [(first, node) for first, node in nodes if first <= row <= node.end_lineno]
            for first, node in sorted(around, key=lambda one: one[0])[-1:]:
                body = getattr(node, "body", None)
                out |= {*range(first, max(first, body[0].lineno - 1 if body else node.end_lineno) + 1)}
        return out

    def diff(self) -> str:
        """A unified diff."""
        before, after = self.source.splitlines(), self.mutated.splitlines()
        return "\n".join(difflib.unified_diff(before, after, self.path, self.path, lineterm=""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the tests of a room did without a mutant: the seconds of each that passed, those that failed, and which
    executed a line, by file and number; "" is the import."""

    seconds: dict[str, float]
    failed: list[str]
    lines: dict[str, dict[str, list[str]]]

    def at(self, mutant: Mutant) -> set[str]:
        """The tests that execute a changed line, and "" if an import does, or none is known."""
        lines, rows = self.lines.get(mutant.path, {}), mutant.statements()
        return {test for row in rows for test in lines.get(str(row), [])} if rows else {""}

    def groups(self, mutant: Mutant) -> list[list[str]]:
        """The tests to try: what executes a changed line, the quickest first; and what starts processes, whose lines
        are not seen here."""
        order, at = sorted(self.seconds, key=self.seconds.__getitem__), self.at(mutant)
        return [[test for test in order if test in at], [test for test in order if is_rerun(test) and test not in at]]


def exchanges(
    old: types.CodeType, new: types.CodeType, outer: bool = True
) -> Iterator[tuple[types.CodeType, types.CodeType | None, bool]]:
    """The functions' code objects that differ, and whether none is around them; (old, None, True) for a difference of
    a module's or a class's own code."""
    inner = [[one for one in code.co_consts if isinstance(one, types.CodeType)] for code in (old, new)]
    own = [
        (code.co_code, code.co_names, [repr(one) for one in code.co_consts if not isinstance(one, types.CodeType)])
        for code in (old, new)
    ]
    function, same = bool(old.co_flags & inspect.CO_OPTIMIZED), len(inner[0]) == len(inner[1])
    if function or not same or own[0] != own[1]:
        yield old, new if function and len(old.co_freevars) == len(new.co_freevars) else None, outer
    for a, b in zip(*inner, strict=True) if same else ():
        if a != b:
            yield from exchanges(a, b, outer and not function)
