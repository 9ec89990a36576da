"""Says what pushes of weights and checkpoints of a job cost, and warns of those that take too much of a step.

It refuses a push into processes that cannot map the memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from launcher.preflight.subject import Found, Subject, fact, note, problem
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import made_up_nodes, placement_of
from tools.planner.estimates import estimate


def check(subject: Subject) -> Iterator[Found]:
    """Yields facts about a job, and notes. Raises ConfigError if the layout, the ranks or the servers do not fit."""
    config = subject.config
    yield from _movable_segments(subject)
    if not subject.for_job:
        return
    if config.run.launcher == "local":  # `submit` sets it
        config = config.model_copy(update={"run": config.run.model_copy(update={"launcher": "slurm"})})
    placement_of(config, made_up_nodes(config)[LEARNER])
    found = estimate(config, subject.shape)
    yield from map(fact, found.lines())
    yield from map(note, found.warnings())


def _movable_segments(subject: Subject) -> Iterator[Found]:
    """Yields a problem if processes would map memory of another's allocator that it may move."""
    config = subject.config
    given = subject.environment
    if config.learner.device == "cpu" or not config.transport.last_hop:
        return
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if re.search(r"\bexpandable_segments\s*:\s*true", given.get(name, ""), re.IGNORECASE):
            yield problem(
                f"{name}={given[name]}: weights.transport=direct maps one process's GPU memory in another, which "
                "torch's expandable segments do not allow; leave expandable_segments out, or set weights.transport=file"
            )
