"""The notebook of the Python API prints what is stored in it."""

from __future__ import annotations

from pathlib import Path

from tests.notebook import executed, page, shown
from tests.proof.run import stale

NOTEBOOK = Path(__file__).parents[2] / "docs" / "python_api.ipynb"


def test_the_page_is_the_notebook() -> None:
    assert (NOTEBOOK.with_suffix(".md")).read_text() == page(NOTEBOOK)


def test_each_cell_prints_what_the_notebook_shows(tmp_path: Path) -> None:
    stored, printed = shown(NOTEBOOK), executed(NOTEBOOK, tmp_path)
    assert len(stored) == len(printed) == 10
    assert all(stored)
    assert [why for known, now in zip(stored, printed, strict=True) if (why := stale(known, now))] == []
