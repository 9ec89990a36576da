"""Checks the interpreter of an engine, which is not the trainer's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.processes.own_thread import in_own_thread
from rl_megatron.errors import ConfigError

if TYPE_CHECKING:  # it imports torch, which a login node that checks a job may lack
    from rl_megatron.engines.adapter import Adapter

ANSWER_SECONDS = 60.0  # an interpreter on a slow disk of a network starts in some ten


async def check_interpreter(python: Path, adapter: Adapter) -> None:
    """Raises ConfigError unless the engine is installed in ``python``."""
    there = await in_own_thread("interpreter", has_module, adapter.module.partition(".")[0], python)
    if there is None:
        raise ConfigError(
            f"rollout.python={python}: it does not start, or has not said in {ANSWER_SECONDS:g} s whether "
            f"{adapter.name} is installed; give the engine's interpreter, and look at the disk that it is on"
        )
    if not there:
        raise ConfigError(
            f"rollout.python={python}: {adapter.name} is not installed there; install it (docs/engines.md), and "
            "set rollout.python=<its environment>/bin/python"
        )


def has_module(package: str, python: Path) -> bool | None:
    """Whether an interpreter finds the package: the files of its environment may say so, or else it is asked, from a
    folder without modules, as packages may lie elsewhere. None if it does not start, or answer in `ANSWER_SECONDS`."""
    environment = python.absolute().parent.parent  # not resolved: in an environment the interpreter is a link
    packages = [*environment.glob("lib/python3*/site-packages"), *environment.glob("lib64/python3*/site-packages")]
    if any((folder / package).is_dir() or any(folder.glob(f"{package}-*.dist-info")) for folder in packages):
        return True
    code = f"import importlib.util; print(importlib.util.find_spec({package!r}) is not None)"
    try:
        done = subprocess.run(
            [python.absolute(), "-c", code],
            cwd="/",
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
            env=dict(os.environ),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return {"True": True, "False": False}.get(done.stdout.strip())


def show_package(packages: Path) -> None:
    """Have the empty folder ``packages`` hold this package alone, for an interpreter that must not get those beside."""
    (packages / "rl_megatron").symlink_to(Path(__file__).resolve().parents[2] / "rl_megatron")


def python_path(packages: Path) -> str:
    """A PYTHONPATH with ``packages`` before the user's own entries."""
    return os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
