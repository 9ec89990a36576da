"""A folder per test file in which to run the command line; models are shared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import REWARDS, Place


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny models of all runs are kept."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Place]:
    """A fresh folder for the runs of a test file."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "my_rewards.py").write_text(REWARDS)
    place = Place(folder=folder, cache=cache)
    try:
        yield place
    finally:
        place.clear()
