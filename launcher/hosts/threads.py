"""CPU threads of a rank."""

from __future__ import annotations

import os

from rl_megatron.config.run import RunConfig
from rl_megatron.placement.ranks import Placement, ranks_by_role


def threads_per_worker(config: RunConfig) -> int:
    """CPU threads of each worker: as configured, else an equal share of this machine's cores."""
    cores, count = len(os.sched_getaffinity(0)), sum(ranks_by_role(config).values())
    return config.learner.threads or max(1, cores // count)


def threads_per_rank(placement: Placement) -> int:
    """CPU threads of a rank: as many as the job gave each task, else an equal share of this node's cores."""
    given = os.environ.get("SLURM_CPUS_PER_TASK")
    return int(given) if given else max(1, len(os.sched_getaffinity(0)) // placement.ranks_per_node)
