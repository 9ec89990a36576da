"""Says what pushes of weights and checkpoints of a job cost, and warns of those that take too much of a step.

It refuses a push into processes that do not see the memory that they would map, or cannot map it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from launcher.preflight.subject import Found, Subject, fact, note, problem
from rl_megatron.config.run import RunConfig
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import made_up_nodes, placement_of
from rl_megatron.scaling.estimates import estimate


def check(subject: Subject) -> Iterator[Found]:
    """Yields facts about a job, and notes. Raises ConfigError if the layout, the ranks or the servers do not fit."""
    config = subject.config
    yield from _unseen_gpus(config)
    yield from _movable_segments(subject)
    if not subject.for_job:
        return
    if config.run.launcher == "local":  # `submit` sets it
        config = config.model_copy(update={"run": config.run.model_copy(update={"launcher": "slurm"})})
    placement_of(config, made_up_nodes(config)[LEARNER])
    found = estimate(config, subject.shape)
    yield from map(fact, found.lines())
    yield from map(note, found.warnings())


def _unseen_gpus(config: RunConfig) -> Iterator[Found]:
    """Yields a problem if servers would map the memory of GPUs that they do not see: a server sees its own ranks'."""
    server, kind, ranks = config.rollout.server, config.transport, config.learner.dims.world_size
    starts = config.rollout.served and server.addresses is None
    if starts and kind.has_rings_on_gpus and server.ranks < ranks:
        yield problem(
            f"weights.transport={kind.name}: a server's ranks map memory of the learner's {ranks} GPUs, but a server "
            f"of rollout.server.tp={server.tp} sees only its own {server.ranks}; set rollout.server.tp={ranks}, or "
            "weights.transport=file"
        )


def _movable_segments(subject: Subject) -> Iterator[Found]:
    """Yields a problem if processes would map memory of another's allocator that it may move."""
    config = subject.config
    kind, given = config.transport, subject.environment
    if config.learner.device == "cpu" or not (kind.has_rings_on_gpus or kind.group == "learner"):
        return
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if re.search(r"\bexpandable_segments\s*:\s*true", given.get(name, ""), re.IGNORECASE):
            yield problem(
                f"{name}={given[name]}: weights.transport={kind.name} maps one process's GPU memory in another, which "
                "torch's expandable segments do not allow; leave expandable_segments out, or set weights.transport="
                f"{'file' if config.rollout.served else 'process_group'}"
            )
