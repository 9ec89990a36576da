"""Compares torch and NCCL of the learner's environment with those of the engine's, which takes half a second."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from launcher.preflight.subject import Found, Subject, fact, problem, unchecked
from launcher.servers.versions import compare_environments, container_of
from rl_megatron.errors import EngineError

_WHERE = "which ranks compare when they meet, before the first step"


def check(subject: Subject) -> Iterator[Found]:
    """Yields both environments' versions, and a problem if ranks of both cannot be one group."""
    config = subject.config
    rollout, container = config.rollout, container_of(config)
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
