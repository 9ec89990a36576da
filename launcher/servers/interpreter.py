"""Checks the interpreter of an engine, which is not the trainer's."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from rl_megatron.errors import ConfigError
from rl_megatron.rollout.servers.adapter import Adapter

ANSWER_SECONDS = 60.0  # an interpreter on a slow disk of a network starts in some ten


async def check_interpreter(python: Path, adapter: Adapter) -> None:
    """Raises ConfigError if the engine is not installed in ``python``, or it has not answered in `ANSWER_SECONDS`."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({adapter.module!r}) is None)"
    try:
        process = await asyncio.create_subprocess_exec(str(python), "-P", "-c", code, env=dict(os.environ))
    except OSError as error:
        raise ConfigError(f"rollout.python={python}: {error.strerror}; give the engine's interpreter") from error
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            status = await process.wait()
    except TimeoutError as error:
        raise ConfigError(
            f"rollout.python={python}: it has not said in {ANSWER_SECONDS:g} s whether {adapter.name} is installed; "
            "look at the disk that it is on"
        ) from error
    finally:
        if process.returncode is None:
            process.kill()
    if status:
        raise ConfigError(
            f"rollout.python={python}: {adapter.name} is not installed there; install it (docs/engines.md), and "
            "set rollout.python=<its environment>/bin/python"
        )


def show_package(packages: Path) -> None:
    """Have the empty folder ``packages`` hold this package alone, for an interpreter that must not get those beside."""
    (packages / "rl_megatron").symlink_to(Path(__file__).resolve().parents[2] / "rl_megatron")


def python_path(packages: Path) -> str:
    """A PYTHONPATH with ``packages`` before the user's own entries."""
    return os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
