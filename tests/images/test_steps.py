"""The learner's steps of an image, run in a new environment: what they install is what constraints.txt pins.

Minutes, and the package index: `pytest tests/images` runs it. TransformerEngine, which wants nvcc, and engines for GPUs
are not installed: their wheels are there, and ask for nothing that the pins forbid.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


IMAGES = REPO / "slurm" / "images"
THERE = {  # an image's Python, Ubuntu 24.04's
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "extra": "",
}


def version_of(name: str) -> str:
    found = re.search(rf"^{name}=(\S+)$", (IMAGES / "versions").read_text(), re.M)
    assert found
    return found[1]


def wheel(name: str, version: str, folder: Path) -> list[Requirement]:
    """Downloads the wheel that an image's Python would take; what it asks for there."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (39, 34, 28)]
    options = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", *platforms, f"--dest={folder}"]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", *options, f"{name}=={version}"], check=True)
    (file,) = folder.glob(f"{name}-{version}-*.whl")
    with zipfile.ZipFile(file) as opened:
        (metadata,) = [path for path in opened.namelist() if path.endswith(".dist-info/METADATA")]
        said = Parser().parsestr(opened.read(metadata).decode())
    asked = [Requirement(text) for text in said.get_all("Requires-Dist", [])]
    return [one for one in asked if one.marker is None or one.marker.evaluate(THERE)]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_for_gpus_is_there_and_asks_for_nothing_that_its_pins_forbid(engine: str, tmp_path: Path) -> None:
    """Takes 15 seconds. What it asks for without a pin is not resolved: kernels for GPUs, which are gigabytes."""
    (other,) = re.findall(r"grep -v '\^([\w-]+)=='", (IMAGES / f"{engine}.sh").read_text())
    text = (REPO / "tests" / "engines" / f"{engine}.txt").read_text()
    pins = {canonicalize_name(name): pin for name, pin in re.findall(r"^([\w.-]+)==(\S+)", text, re.M)}
    asked = {canonicalize_name(one.name): one for one in wheel(engine, version_of(engine.upper()), tmp_path)}
    against = {name for name in asked.keys() & pins.keys() if not asked[name].specifier.contains(pins[name], True)}
    assert against == {other}


@pytest.mark.slow
def test_transformer_engine_is_there(tmp_path: Path) -> None:
    """Takes 15 seconds. Its extension for torch has sources alone, whose metadata want torch and nvcc to be made."""
    version = version_of("TRANSFORMER_ENGINE")
    for name in ("transformer_engine", "transformer_engine_cu13"):
        wheel(name, version, tmp_path)
    command = [sys.executable, "-m", "pip", "index", "versions", "transformer_engine_torch"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert version in re.findall(r"[\d.]*\d", said)
