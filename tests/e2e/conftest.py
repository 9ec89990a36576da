"""A folder per test file in which to run the command line; models are shared."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.processes import REWARDS, Place
from tests.unit.launcher.commands import status_of

Refused = Callable[..., str]


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


@dataclass(frozen=True, kw_only=True)
class Told:
    """Calls a command in this process, in the place's folder. Returns its output, or with a ``status`` its errors."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str, status: int = 0) -> str:
        with self.monkeypatch.context() as changed:
            changed.chdir(self.folder)
            changed.setattr(sys, "path", [*sys.path])  # to which the command adds the folder, for the user's modules
            ended, out = status_of(*arguments), self.capsys.readouterr()
        for name in [n for n, module in sys.modules.items() if _file_of(module).startswith(str(self.folder))]:
            del sys.modules[name]
        assert ended == status, out
        assert "Traceback" not in out.err
        return out.err if status else out.out


def _file_of(module: object) -> str:
    return getattr(module, "__file__", None) or ""


@pytest.fixture
def told(place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Told:
    """For commands that print something and end, whose subject is not their process."""
    return Told(folder=place.folder, monkeypatch=monkeypatch, capsys=capsys)


@pytest.fixture
def refused(told: Told) -> Refused:
    """For commands that end with an error for the user before they start anything."""
    return partial(told, status=1)
