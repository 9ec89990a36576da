"""The kit for one GPU (tests/gpu) on pretended ones, but for what the command line starts: 50 seconds."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.differences import largest, worst

REPO = Path(__file__).parents[2]
FILES = ("first/test_03_float32.py", "first/test_04_bfloat16.py", "first/test_05_resume.py", "first/test_06_engine.py")


@pytest.mark.slow
def test_its_first_half_passes_and_prints_a_table(tmp_path: Path) -> None:
    """So a day with a GPU does not begin with a mistake in the kit, and reference.json has this code's numbers."""
    options = ["-q", "-rs", "-m", "gpu", "-p", "tests.gpu.pretended", "-p", "no:cacheprovider"]
    kept = tmp_path / "figures.md"
    inherited = {n: value for n, value in os.environ.items() if not n.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(f"tests/gpu/{name}" for name in FILES)],
        cwd=REPO,
        env=inherited | {"FIGURES": str(kept)},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert "skipped" not in done.stdout
    for line in (
        "Measured on a pretended GPU, ",
        "| float32, policy, beside the CPU | ",
        "| resumed, bfloat16 | equal",
    ):
        assert line in done.stdout
    assert f"figures are in {kept} as soon as" in done.stdout
    assert kept.read_text() in done.stdout
    assert kept.read_text().count("\n| ") >= 5


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_infinitely_far(broken: float) -> None:
    assert worst([[1.0, 1.0 + 2e-7], [broken]], [[1.0, 1.0], [1.0]]) == math.inf
    assert largest([1e-7, broken]) == math.inf
    assert largest([1e-7, -3e-7]) == 3e-7


def test_without_a_gpu_it_is_skipped_with_the_way_out() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
        "tests/gpu/first/test_05_resume.py",
    ]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert "1 skipped" in done.stdout
    assert "no GPU is seen; `make test-gpu` runs this on a machine that has one" in done.stdout
