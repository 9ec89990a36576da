"""The kit for one GPU (tests/gpu) on pretended ones, but for what the command line starts: 50 seconds."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.forks import FORKS
from tests.gpu.differences import largest, worst

REPO = Path(__file__).parents[2]
FILES = ("first/test_03_float32.py", "first/test_04_bfloat16.py", "first/test_05_resume.py", "first/test_06_engine.py")


def pytest_main(arguments: Sequence[str], figures: Path, said: Path) -> None:
    """In a fork: ``python -m pytest``, which need not import torch again. What it prints is in ``said``."""
    with said.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    os.environ["FIGURES"] = str(figures)
    os.chdir(REPO)
    code = pytest.main(["-q", "-rs", "-p", "no:cacheprovider", *arguments])
    sys.stdout.flush()
    os._exit(code)  # without a wait for the ranks' parent, which ends with this process


def asked(*arguments: str, folder: Path) -> tuple[int | None, str]:
    """The exit status of such a run, whose figures.md is in ``folder``, and what it printed."""
    process = FORKS.Process(target=pytest_main, args=(arguments, folder / "figures.md", folder / "said.txt"))
    process.start()
    process.join(3600)
    process.kill()
    return process.exitcode, (folder / "said.txt").read_text()


@pytest.mark.slow
def test_its_first_half_passes_and_prints_a_table(tmp_path: Path) -> None:
    """So a day with a GPU does not begin with a mistake in the kit, and reference.json has this code's numbers."""
    files = [f"tests/gpu/{name}" for name in FILES]
    code, printed = asked("-m", "gpu", "-p", "tests.gpu.pretended", *files, folder=tmp_path)
    kept = tmp_path / "figures.md"
    assert code == 0, printed[-8000:]
    assert "skipped" not in printed
    lines = ("Measured on a pretended GPU, ", "| float32, policy, beside the CPU | ", "| resumed, bfloat16 | equal")
    for line in lines:
        assert line in printed
    assert f"figures are in {kept} as soon as" in printed
    assert kept.read_text() in printed
    assert kept.read_text().count("\n| ") >= 5


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_infinitely_far(broken: float) -> None:
    assert worst([[1.0, 1.0 + 2e-7], [broken]], [[1.0, 1.0], [1.0]]) == math.inf
    assert largest([1e-7, broken]) == math.inf
    assert largest([1e-7, -3e-7]) == 3e-7


def test_without_a_gpu_it_is_skipped_with_the_way_out(tmp_path: Path) -> None:
    _, printed = asked("tests/gpu/first/test_05_resume.py", folder=tmp_path)
    assert "1 skipped" in printed
    assert "no GPU is seen; `make test-gpu` runs this on a machine that has one" in printed
