"""Checks that the servers' engine is installed in its interpreter, without an import, which takes minutes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from launcher.preflight.subject import Found, Subject, problem, unchecked
from rl_megatron.errors import ConfigError
from rl_megatron.user_code import load_named

ANSWER_SECONDS = 20.0  # an interpreter on a disk of a network starts in some


def check(subject: Subject) -> Iterator[Found]:
    """Looks for the servers' engine in its interpreter; the project's own is there."""
    rollout = subject.config.rollout
    if not rollout.served or rollout.embedded:
        return
    if rollout.server.addresses is not None:
        yield unchecked(f"the servers at {rollout.server.addresses}")
        return
    given, other = rollout.python, subject.other_python
    if subject.for_job and subject.config.slurm.engines.container is not None:
        yield unchecked(f"whether {rollout.engine} is installed in slurm.engines.container")
        return
    if given is None and other is not None:
        yield unchecked(f"whether {rollout.engine} is installed in {other}")
        return
    key = f"rollout.python={given or sys.executable}"
    if given is not None and not given.is_file():
        yield problem(f"{key}: no such file; set the interpreter that {rollout.engine} is installed in")
        return
    try:
        module = module_of(rollout.engine)
    except ConfigError as error:
        yield problem(str(error))
        return
    package = module.partition(".")[0]
    there = has_module(package, given) if given else importlib.util.find_spec(package) is not None
    if there is None:
        yield unchecked(f"whether {package} is installed in {key}, which does not answer")
    elif not there:
        yield problem(
            f"{key}: {package} is not installed there; install it (docs/engines.md), and set "
            "rollout.python=<its environment>/bin/python"
        )
    else:
        yield unchecked(f"that {module} starts")


def module_of(engine: str) -> str:
    """The module that serves: the engine's own name, or the one of the user's Adapter. Raises ConfigError."""
    if ":" not in engine:
        return engine
    adapter = load_named(engine, "rollout.engine", "class with a module", lambda found: hasattr(found, "module"))
    return str(adapter.module)


def has_module(package: str, python: Path, seconds: float = ANSWER_SECONDS) -> bool | None:
    """Whether an interpreter finds the package: the files of its environment may say so, or else it is asked, from a
    folder without modules, as packages may lie elsewhere. None if it does not answer in ``seconds``."""
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
            timeout=seconds,
            env=dict(os.environ),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return {"True": True, "False": False}.get(done.stdout.strip())
