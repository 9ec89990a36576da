"""The learner's steps of an image, run in a new environment: what they install is what constraints.txt pins.

Minutes, and the package index: `make test-images` runs it. TransformerEngine, which wants nvcc, is left out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_learners_environment_has_the_pinned_versions_and_its_commands(tmp_path: Path) -> None:
    """Takes three minutes, most of them torch's."""
    given = {**os.environ, "PREFIX": str(tmp_path), "PYTHON": sys.executable, "TRANSFORMER_ENGINE": ""}
    given.pop("PYTHONPATH", None)
    for step in ("transformer_engine", "learner"):
        subprocess.run([REPO / "slurm" / "images" / f"{step}.sh"], env=given, cwd=tmp_path, check=True)
    pip = [tmp_path / "learner" / "bin" / "pip"]
    subprocess.run([*pip, "check"], check=True)
    pinned = {
        name.lower().replace("_", "-"): version
        for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (REPO / "constraints.txt").read_text(), re.M)
    }
    listed = json.loads(subprocess.run([*pip, "list", "--format=json"], capture_output=True, check=True).stdout)
    found = {one["name"].lower().replace("_", "-"): one["version"].partition("+")[0] for one in listed}
    assert {"torch", "megatron-core", "ray", "wandb"} <= found.keys()
    assert "pytest" not in found
    assert {name: found[name] for name in found.keys() & pinned.keys()} == {
        name: pinned[name] for name in found.keys() & pinned.keys()
    }
