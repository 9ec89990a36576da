"""A failed test of processes runs again, alone; one that fails twice, and one of another kind, fail the session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import flaky

ONCE = """
import pathlib
COUNT = pathlib.Path(__file__).with_suffix(".count")

def test_it():
    before = COUNT.read_text() if COUNT.exists() else ""
    COUNT.write_text(before + "x")
    assert before, "the first time"
"""
ALWAYS = "def test_it():\n    assert False, 'each time'\n"
NEVER = "def test_it():\n    pass\n"


def run(folder: Path, files: dict[str, str], *options: str) -> tuple[int, str]:
    """pytest's exit status and output for ``files`` under ``folder``/tests with the plugin."""
    (folder / "conftest.py").write_text(Path(flaky.__file__).read_text())
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    for name, text in files.items():
        path = folder / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "tests"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("options", [("-p", "no:xdist"), ("-n", "2")])
def test_a_test_of_processes_that_passes_the_second_time_is_named(tmp_path: Path, options: tuple[str, ...]) -> None:
    status, output = run(tmp_path, {"e2e/test_once.py": ONCE, "unit/test_never.py": NEVER}, *options)
    assert status == 0, output
    assert "flaky: tests/e2e/test_once.py::test_it" in output
    assert "the first time" in output.partition("flaky: ")[2]


def test_a_test_that_fails_twice_fails_the_session(tmp_path: Path) -> None:
    status, output = run(tmp_path, {"e2e/test_once.py": ONCE, "engines/test_always.py": ALWAYS}, "-p", "no:xdist")
    assert status == 1
    assert "running 2 failed tests" in output
    assert "flaky:" not in output


def test_a_test_without_processes_is_not_run_again(tmp_path: Path) -> None:
    status, output = run(tmp_path, {"unit/test_once.py": ONCE, "e2e/test_other.py": ONCE}, "-p", "no:xdist")
    assert status == 1
    assert "running" not in output
    assert (tmp_path / "tests/unit/test_once.count").read_text() == "x"
