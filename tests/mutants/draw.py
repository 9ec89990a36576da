"""Mutants of cosmic-ray's operators, drawn with a seed: each is one file with one place changed.

A place's lot is drawn from the seed, the file's name, the line and the operator, so that a changed line changes its own
mutants and leaves the others that are drawn as they are.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names

from tests.mutants.selected import Mutant

SAME = ("_Eq_Is", "_NotEq_IsNot")  # for names and small integers, which CPython keeps once, `is` is `==`


def behavior(source: str) -> str:
    """The syntax tree without annotations, which nothing here evaluates, and without the marks `*` and `/` among
    parameters, which an operator takes for arithmetic; "" where the text is no Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.arguments):
            node.args = [*node.posonlyargs, *node.args, *node.kwonlyargs]
            node.defaults = [*node.defaults, *(x for x in node.kw_defaults if x is not None)]
            node.posonlyargs, node.kwonlyargs, node.kw_defaults = [], [], []
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.dump(tree)


def places(source: str, operators: dict[str, Operator]) -> Iterator[tuple[str, str, int]]:
    """Every place that an operator changes: what tells it from all others, the operator, its number there."""
    lines, nodes = source.splitlines(), list(ast_nodes(get_ast(source)))
    for name, operator in sorted(operators.items()):
        seen: Counter[str] = Counter()
        positions = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for number, (row, column) in enumerate(positions):
            line = lines[row - 1]
            place = f"{name} {line.strip()} {column - len(line) + len(line.lstrip())}"
            yield f"{place} {seen[place]}", name, number
            seen[place] += 1


@functools.cache
def operators() -> dict[str, Operator]:
    """Cosmic-ray's operators without arguments, by name."""
    kinds = {name: get_operator(name) for name in operator_names()}
    return {name: kind() for name, kind in kinds.items() if not kind.arguments() and not name.endswith(SAME)}


@functools.cache
def places_of(file: Path) -> dict[str, tuple[str, int]]:
    """The operator and its number by place; empty where the file does not exist."""
    source = file.read_text("utf-8") if file.exists() else ""
    return {place: (name, number) for place, name, number in places(source, operators())}


def mutants_at(repository: Path, chosen: Iterable[tuple[str, str]]) -> Iterator[Mutant]:
    """The mutants of the chosen (path, place), in their order; none that differs in annotations alone."""
    before: dict[str, str] = {}
    for path, place in chosen:
        source = (repository / path).read_text("utf-8")
        name, number = places_of(repository / path)[place]
        mutated = mutate_code(source, operators()[name], number)
        before[path] = before.get(path) or behavior(source)
        if mutated is not None and behavior(mutated) not in ("", before[path]):
            yield Mutant(path, place, source, mutated)


def drawn(repository: Path, paths: list[str], seed: int) -> Iterator[Mutant]:
    """Every mutant of ``paths`` once, in the seed's order."""
    found = []
    for path in paths:
        for place in places_of(repository / path):
            lot = hashlib.sha256(f"{seed} {Path(path).name} {place}".encode()).digest()
            found.append((lot, path, place))
    yield from mutants_at(repository, [(path, place) for _, path, place in sorted(found)])


def found_again(repository: Path, paths: list[str], path: str, place: str) -> str | None:
    """The file of a recorded mutant: ``path``, or the only one of ``paths`` that has its place; None: it is gone."""
    if place in places_of(repository / path):
        return path
    others = [other for other in paths if place in places_of(repository / other)]
    return others[0] if len(others) == 1 else None
