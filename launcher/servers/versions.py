"""Compares the libraries of the learner's environment and of the engine's, before their ranks join one group."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_megatron.config.run import RunConfig
from rl_megatron.errors import EngineError
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

SECONDS = 4.0  # the limit for an interpreter's answer on a login node; 0.2 to 0.4 s were measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What two environments have, and why ranks of both cannot be one group; empty if they can."""

    table: str
    problem: str


def compare_environments(
    config: RunConfig, environment: Mapping[str, str], *, learner: Path, engine: Path, seconds: float = SECONDS
) -> Compared:
    """Ask both interpreters, under the variables of ``environment``.

    Raises EngineError if one does not answer within ``seconds``.
    """
    of_engine = libraries_of(engine, {**environment, **shared_settings(config, environment)}, seconds)
    both = {f"learner {learner}": libraries_of(learner, environment, seconds), f"engine {engine}": of_engine}
    return Compared(table=library_table(both), problem=why_no_group(config, both))


def why_no_group(config: RunConfig, environments: Mapping[str, Libraries]) -> str:
    """Why ranks of these environments, by name, cannot receive weights as configured; else empty.

    Where it depends on the number of GPUs whether they join a group, ranks say it when they meet.
    """
    kind, way = config.transport, config.weights.transport
    if config.learner.device == "cpu" or not kind.direct or not config.rollout.served:
        return ""
    problem = compare_facts({n: facts(one, HANDLE if kind.last_hop else OF_A_GROUP) for n, one in environments.items()})
    return problem and f"weights.transport={way}: {problem}, or set weights.transport=file"


def describe_environments(learner: Path, engines: Sequence[Path]) -> str:
    """A table of what the interpreters load, and a line for each way by which GPUs of two of them cannot get weights.

    Raises EngineError if one does not answer.
    """
    of_learner = {f"learner {learner}": libraries_of(learner, os.environ)}
    of_engines = {f"engine {engine}": libraries_of(engine, os.environ) for engine in engines}
    found = {
        (name, way): compare_facts({role: facts(one, fields) for role, one in {**of_learner, name: of}.items()})
        for name, of in of_engines.items()
        for way, fields in (("as members of one group", OF_A_GROUP), ("through a learner rank's memory", HANDLE))
    }
    refused = [f"weights.transport=direct on GPUs, {way}, is refused: {why}" for (_, way), why in found.items() if why]
    return "\n".join([library_table({**of_learner, **of_engines}), *refused])


def container_of(config: RunConfig) -> str | None:
    """The container of ranks or servers, whose environment cannot be asked from outside; None if both are in none."""
    return None if config.run.launcher == "local" else config.slurm.container or config.slurm.engines.container


def shared_settings(config: RunConfig, environment: Mapping[str, str]) -> Mapping[str, str]:
    """NCCL's settings for servers whose ranks join the learner's: those of ``environment``, or NCCL's defaults.

    An engine may set others where none is given: SGLang 0.5.21 sets NCCL_CUMEM_ENABLE=0.
    """
    if config.learner.device == "cpu" or not config.transport.members:
        return {}
    return {name: environment.get(name, default) for name, default in DEFAULTS.items()}


def libraries_of(python: Path, environment: Mapping[str, str], seconds: float = SECONDS) -> Libraries:
    """What programs of an interpreter load under the variables of ``environment``. Raises EngineError."""
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
    raise EngineError(f"{python}: the versions of its libraries cannot be read: {why}")
