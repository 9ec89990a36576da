"""tests/mutants/equivalents.yaml follows the code: a line of it that has gone would end `make mutants` before the first
mutant."""

from __future__ import annotations

from tests.mutants.killed import named_equivalents


def test_every_line_that_it_names_is_in_its_file() -> None:
    named = named_equivalents()
    assert named
    assert all(line != mutant and reason for (_, line, mutant), reason in named.items())
