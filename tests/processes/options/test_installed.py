"""An option from another package: one file and its entry point, without any change here.

These tests start processes.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.options.test_installed import FILE, SAYS, package, run


def test_it_is_listed_refuses_and_has_its_keys_keywords_and_bytes(tmp_path: Path) -> None:
    done = run(package(tmp_path, FILE), SAYS)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["listed"] == "residual"
    assert said["documented"] == [
        "| `learner.residual_copies` | integer ≥ 0 | `0` | Copies in float32 of what runs past the layers. |"
    ]
    assert said["last key"] == "residual_copies"
    assert said["fixed"] == 3  # on a resume
    assert said["refused"] == "learner.residual_copies=3 with learner.pp=2; set learner.pp=1"
    assert "did you mean 'learner.residual_copies'?" in said["misspelled"]
    assert said["keyword"] == {"fp32_residual_connection": True}
    assert said["bytes"] == 3 * 4 * 48 * 16384 * 2048 / 4  # copies, bytes, layers, tokens, hidden size over tp
    assert said["advice"].endswith("Largest: residual; lower learner.residual_copies")


def test_one_that_cannot_be_loaded_is_told_with_its_package(tmp_path: Path) -> None:
    done = run(package(tmp_path, "raise OSError('no licence')"), "from launcher.entry import main; main()")
    assert done.returncode == 1
    assert done.stderr == (
        "error: the option 'residual' that residual-option brings (residual_option:OPTION) cannot be loaded: "
        "OSError('no licence'); fix or uninstall it\n"
    )
