"""Checks that the servers' engine is installed in its interpreter, without an import, which takes minutes, and compares
its torch and NCCL with the learner's."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from launcher.preflight.subject import Finding, PreflightContext, fact, problem, unchecked
from launcher.servers.versions import compare_environments, has_module, other_container
from rl_megatron.errors import ConfigError, EngineError
from rl_megatron.user_code import load_named


def check(subject: PreflightContext) -> Iterator[Finding]:
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
        yield problem(f"{key}: no such file; set it to the interpreter that has {rollout.engine} installed")
        return
    try:
        module = find_server_module(rollout.engine)
    except ConfigError as error:
        yield problem(str(error))
        return
    package = module.partition(".")[0]
    there = has_module(package, given) if given else importlib.util.find_spec(package) is not None
    if there is None:
        yield unchecked(f"whether {package} is installed in {key}, because the interpreter does not answer")
    elif not there:
        yield problem(
            f"{key}: {package} is not installed there; install it (docs/engines.md), and set "
            "rollout.python=<its environment>/bin/python"
        )
    else:
        yield unchecked(f"whether {module} starts")


def find_server_module(engine: str) -> str:
    """Returns the module that serves: the engine's own name, or the one of the user's Adapter. Raises ConfigError."""
    if ":" not in engine:
        return engine
    adapter = load_named(engine, "rollout.engine", "class with a module", lambda found: hasattr(found, "module"))
    return str(adapter.module)


_WHERE = "which ranks compare when they meet, before the first step"


def check_versions(subject: PreflightContext) -> Iterator[Finding]:
    """Yields both environments' versions, and a problem if ranks of both cannot be one group."""
    config = subject.config
    rollout, container = config.rollout, other_container(config)
    if not rollout.served:
        return
    if rollout.server.addresses is not None:
        if config.transport.direct:
            yield unchecked(f"torch and NCCL of the servers at {rollout.server.addresses}, {_WHERE}")
        return
    if container is not None:
        if config.transport.direct:
            yield unchecked(f"torch and NCCL in the container {container}, {_WHERE}")
        return
    learner = Path((subject.for_job and config.slurm.python) or sys.executable)
    try:
        compared = compare_environments(config, subject.environment, learner=learner, engine=rollout.python or learner)
    except EngineError as error:
        yield unchecked(str(error))
        return
    yield fact(compared.table)
    if compared.problem:
        yield problem(compared.problem)
