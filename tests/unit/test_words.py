"""The laws of plain English see what breaks them, and nothing else."""

from __future__ import annotations

import pytest

from tests.words import PHRASES, code_breaches, document_breaches

FOUND = {
    "docstring's start": 'def f():\n    """Whether it runs."""\n',
    "long sentence": f'def f():\n    """Returns {"word " * 31}."""\n',
    "comment's start": "size = 3  # of a row\n",
    "name's word": "def load(most):\n    pass\n",
    "name's start": "def of_ranks():\n    pass\n",
    "name's end": "def seed_of():\n    pass\n",
    "British name": "def normalise():\n    pass\n",
    "British": 'def f():\n    raise ValueError("the colour of this text is wrong")\n',
    "at once": "x = 1  # all at once\n",
    "go on": "# Runs go on after that.\nx = 1\n",
    "have X do": "# Have a rank stop.\nx = 1\n",
    "beside": "# It stands beside others.\nx = 1\n",
    "behind": "# It stands behind others.\nx = 1\n",
    "of which": "# Rows of which none counts.\nx = 1\n",
    "nobody": "# It waits for nobody.\nx = 1\n",
    "what": "# It ends. What is left stays.\nx = 1\n",
    "whose": "# A rank whose pass ends.\n# A row whose text ends.\nx = 1\n",
}
FINE = '''
"""Counts rows: what each one has, and why."""


class Shape(Section):
    most: int = 3


def load(rows: int) -> None:
    """Loads all rows. See ``at once`` and `go on`."""
    size = 3  # rows of a file
    kept = 4  # noqa: of


def connection_made() -> None:
    raise ValueError("of no use")
'''


@pytest.mark.parametrize("law", FOUND)
def test_a_breach_is_found(law: str) -> None:
    assert [one.law for one in code_breaches("a.py", FOUND[law])] == [law]


def test_there_is_a_case_for_each_law() -> None:
    assert {*PHRASES, "whose"} <= {*FOUND}


def test_plain_code_has_none() -> None:
    assert [*map(str, code_breaches("a.py", FINE))] == []


def test_a_page_is_read_without_its_code() -> None:
    page = "# Title\n\nIt works.\n\n```sh\ntrain at once\n```\n\nRead `at once`.\n<!-- at once -->\n\nAll at\nonce.\n"
    assert [(one.law, one.line) for one in document_breaches("a.md", page)] == [("at once", 12)]
