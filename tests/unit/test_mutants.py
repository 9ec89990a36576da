"""The files of `make mutants` follow the code and the tests: what they name is there."""

from __future__ import annotations

from tests.mutants.killed import file_of, killed_mutants
from tests.mutants.planted import planted_faults
from tests.mutants.rooms import REPO, ROOMS, files_of


def test_every_path_and_test_of_a_room_exists() -> None:
    names = [room.name for room in ROOMS]
    assert len({*names}) == len(names)
    assert all(files_of(room) for room in ROOMS)


def test_no_file_is_in_two_rooms() -> None:
    files = [file for room in ROOMS for file in files_of(room)]
    assert len({*files}) == len(files)


def test_a_recorded_mutant_is_in_a_file_of_a_room_or_gone() -> None:
    files = {file for room in ROOMS for file in files_of(room)}
    there = {path for path, _ in killed_mutants() if (REPO / path).exists()}
    assert there <= files


def test_a_recorded_test_has_the_form_of_a_name() -> None:
    assert all(file_of(test).endswith(".py") for test in killed_mutants().values() if test.startswith("tests/"))


def test_every_planted_fault_has_its_old_text_once_and_a_test() -> None:
    faults = planted_faults()
    assert len({fault.name for fault in faults}) == len(faults) == 25
    assert [problem for fault in faults if (problem := fault.problem())] == []
    assert all(fault.old != fault.new for fault in faults)
