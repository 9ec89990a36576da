"""Compares the libraries of the learner's environment and of the engine's, before their ranks join one group.

Checks the interpreter of an engine, which is not the trainer's. Without torch, which a login node may lack.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.processes.own_thread import run_in_own_thread
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError, EngineError
from rl_megatron.files import parse
from rl_megatron.weights.checks import libraries
from rl_megatron.weights.checks.libraries import (
    DEFAULTS,
    HANDLE,
    OF_A_GROUP,
    Libraries,
    compare_facts,
    facts,
    library_table,
)

if TYPE_CHECKING:
    from rl_megatron.engines.adapter import Adapter


SECONDS = 4.0  # the limit for an interpreter's answer on a login node; 0.2 to 0.4 s were measured


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionComparison:
    """The libraries of two environments, and why ranks of both cannot be one group; empty if they can."""

    table: str
    problem: str


def compare_environments(
    config: RunConfig, environment: Mapping[str, str], *, learner: Path, engine: Path, seconds: float = SECONDS
) -> VersionComparison:
    """Asks both interpreters, under the variables of ``environment``.

    Raises EngineError if one does not answer within ``seconds``.
    """
    of_engine = find_loaded_libraries(engine, {**environment, **shared_settings(config, environment)}, seconds)
    both = {f"learner {learner}": find_loaded_libraries(learner, environment, seconds), f"engine {engine}": of_engine}
    return VersionComparison(table=library_table(both), problem=group_problem(config, both))


def group_problem(config: RunConfig, environments: Mapping[str, Libraries]) -> str:
    """Returns why ranks of these environments, by name, cannot receive weights as configured; or empty.

    If the number of GPUs decides whether they join a group, ranks report the problem when they meet.
    """
    kind, way = config.transport, config.weights.transport
    if config.learner.device == "cpu" or not kind.direct or not config.rollout.served:
        return ""
    problem = compare_facts({n: facts(one, HANDLE if kind.last_hop else OF_A_GROUP) for n, one in environments.items()})
    return problem and f"weights.transport={way}: {problem}, or set weights.transport=file"


def describe_environments(learner: Path, engines: Sequence[Path]) -> str:
    """Returns a table of the interpreters' libraries, and a line for each way in which GPUs of two cannot get weights.

    Raises EngineError if one does not answer.
    """
    of_learner = {f"learner {learner}": find_loaded_libraries(learner, os.environ)}
    of_engines = {f"engine {engine}": find_loaded_libraries(engine, os.environ) for engine in engines}
    found = {
        (name, way): compare_facts({role: facts(one, fields) for role, one in {**of_learner, name: of}.items()})
        for name, of in of_engines.items()
        for way, fields in (("as members of one group", OF_A_GROUP), ("through a learner rank's memory", HANDLE))
    }
    refused = [f"weights.transport=direct on GPUs, {way}, is refused: {why}" for (_, way), why in found.items() if why]
    return "\n".join([library_table({**of_learner, **of_engines}), *refused])


def other_container(config: RunConfig) -> str | None:
    """Returns the container of ranks or servers, which hides its environment; None if neither is in one."""
    return None if config.run.launcher == "local" else config.slurm.container or config.slurm.engines.container


def shared_settings(config: RunConfig, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Returns NCCL's settings for servers that join the learner's ranks: those of ``environment``, or NCCL's defaults.

    An engine may set others where none is given: SGLang 0.5.21 sets NCCL_CUMEM_ENABLE=0.
    """
    if config.learner.device == "cpu" or not config.transport.members:
        return {}
    return {name: environment.get(name, default) for name, default in DEFAULTS.items()}


def find_loaded_libraries(python: Path, environment: Mapping[str, str], seconds: float = SECONDS) -> Libraries:
    """Returns the libraries that an interpreter's programs load with variables ``environment``. Raises EngineError."""
    try:
        done = subprocess.run(
            [python, libraries.__file__], capture_output=True, text=True, timeout=seconds, env=dict(environment)
        )
        return Libraries(**parse(done.stdout))
    except OSError as error:
        why = str(error.strerror)
    except subprocess.TimeoutExpired:
        why = f"it did not answer within {seconds:g} s"
    except (ValueError, TypeError):
        why = f"status {done.returncode}: {done.stderr.strip()[-200:]}"
    raise EngineError(f"{python}: cannot read the versions of its libraries: {why}")


ANSWER_SECONDS = 60.0  # an interpreter on a slow disk of a network starts in some ten


async def check_interpreter(python: Path, adapter: Adapter) -> None:
    """Raises ConfigError unless the engine is installed in ``python``."""
    there = await run_in_own_thread("interpreter", has_module, adapter.module.partition(".")[0], python)
    if there is None:
        raise ConfigError(
            f"rollout.python={python}: it does not start, or did not report within {ANSWER_SECONDS:g} s whether "
            f"{adapter.name} is installed; give the engine's interpreter, and check the disk that it is on"
        )
    if not there:
        raise ConfigError(
            f"rollout.python={python}: {adapter.name} is not installed there; install it (docs/engines.md), and "
            "set rollout.python=<its environment>/bin/python"
        )


def has_module(package: str, python: Path) -> bool | None:
    """True if an interpreter finds the package: its environment has the files, or the interpreter itself, run from a
    folder without modules, finds them elsewhere. None if it does not start, or answer in `ANSWER_SECONDS`."""
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
    """Makes the empty folder ``packages`` hold this package alone, for an interpreter that must not get others."""
    (packages / "rl_megatron").symlink_to(Path(__file__).resolve().parents[2] / "rl_megatron")


def python_path(packages: Path) -> str:
    """Returns a PYTHONPATH with ``packages`` before the user's own entries."""
    return os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
