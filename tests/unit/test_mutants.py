"""The files of `make mutants` follow the code and the tests: what they name is there."""

from __future__ import annotations

import ast
import types

from tests.mutants.killed import file_of, killed_mutants
from tests.mutants.planted import planted_faults
from tests.mutants.rooms import REPO, ROOMS, files_of
from tests.mutants.selected import Mutant, Seen, exchanges


def test_every_path_and_test_of_a_room_exists() -> None:
    names = [room.name for room in ROOMS]
    assert len({*names}) == len(names)
    assert all(files_of(room) for room in ROOMS)


def test_no_file_is_in_two_rooms() -> None:
    files = [file for room in ROOMS for file in files_of(room)]
    assert len({*files}) == len(files)


def test_a_recorded_mutant_is_in_a_file_of_a_room_or_gone() -> None:
    files = {file for room in ROOMS for file in files_of(room)}
    assert {path for path, _ in killed_mutants() if (REPO / path).exists()} <= files


def test_a_recorded_test_is_there() -> None:
    names = {test.split("[")[0] for test in killed_mutants().values() if test.startswith("tests/")}
    files = {file_of(name) for name in names if (REPO / file_of(name)).exists()}  # one that fails as a whole is a name
    there = files | {
        f"{file}::{node.name}"
        for file in files
        for node in ast.walk(ast.parse((REPO / file).read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert sorted(names - there) == []


def test_a_mutant_is_tried_with_the_tests_that_execute_its_statement_the_quickest_first() -> None:
    source = "def f(x):\n    return g(\n        x + 1)\n@d\nclass A: LIMIT = 1\n"
    mutant = Mutant("f.py", "", source, source.replace("+", "-"))
    others = [Mutant("f.py", "", source, source.replace(*words)) for words in (("= 1", "= 2"), ("@d\n", ""))]
    slow, quick, other, process = "tests/unit/a.py::a", "tests/unit/b.py::b", "tests/unit/c.py::c", "tests/e2e/d.py::d"
    lines = {"f.py": {"1": [""], "2": [slow, quick], "4": [""], "5": [""]}}
    seen = Seen(seconds={slow: 2.0, quick: 1.0, other: 0.5, process: 9.0}, failed=[], lines=lines)
    assert seen.groups(mutant) == [[quick, slow], [process]]
    assert [seen.at(one) for one in (mutant, *others)] == [{slow, quick}, {""}, {""}]


def test_functions_get_the_code_of_a_mutant_and_a_constant_must_be_imported() -> None:
    source = "SIZE = 1\ndef f(x, y=SIZE):\n    def g():\n        return x + y\n    return g()\n"
    module, old = types.ModuleType("m"), compile(source, "m", "exec")
    exec(old, module.__dict__)
    for a, b, outer in exchanges(old, compile(source.replace("x + y", "x - y"), "m", "exec")):
        if outer:
            assert a == module.f.__code__
            module.f.__code__ = b
    assert module.f(5) == 4
    for other in (source.replace("SIZE = 1", "SIZE = 2"), source.replace("y=SIZE", "y=3")):
        assert any(b is None for _, b, _ in exchanges(old, compile(other, "m", "exec")))


def test_every_planted_fault_has_its_old_text_once_and_a_test() -> None:
    faults = planted_faults()
    assert len({fault.name for fault in faults}) == len(faults) == 30
    assert [problem for fault in faults if (problem := fault.problem())] == []
    assert all(fault.old != fault.new for fault in faults)
