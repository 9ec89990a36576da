"""Computes each engine server's site: the command that starts it on its node, its address, and its visible GPUs."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

from launcher.hosts.slurm.allocation import Allocation
from launcher.processes.guards import HERE, ServerSite, Sites, StartAt
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError, EngineError
from rl_megatron.placement.seats import (
    ServerPlacement,
    local_server_placements,
    server_placements,
    standalone_placements,
)


def server_sites(config: RunConfig, allocation: Allocation | None, start_at: StartAt | None = None) -> list[Sites]:
    """Returns the sites of each server, started by ``start_at`` with a seat's number or by this process with srun.

    Raises ConfigError if the servers do not fit.
    """
    if allocation is None:
        seats = local_server_placements(config, _count_here(config))
        found = [ServerSite() for _ in seats]
    else:
        seats = server_placements(config, allocation.nodes, allocation.engine_nodes)
        each, parts = _each(seats, allocation), Counter(seat.server for seat in seats)
        found = [ServerSite(host=_host(seat, allocation, is_single=parts[seat.server] == 1)) for seat in seats]
        if start_at is None:
            found = [
                _srun_prefix(site, seat, config, allocation, each) for site, seat in zip(found, seats, strict=True)
            ]
    if start_at is not None:
        found = [replace(site, start=partial(start_at, number)) for number, site in enumerate(found)]
    count = config.rollout.server.count
    found = [
        replace(
            site,
            server_index=seat.server,
            num_servers=count,
            node=seat.node,
            gpus=seat.gpus,
            shares_gpus=seat.shares_gpus,
        )
        for seat, site in zip(seats, found, strict=True)
    ]
    together = groupby(zip(seats, found, strict=True), lambda pair: pair[0].server)
    return [[site for _, site in pairs] for _, pairs in together]


def standalone_sites(config: RunConfig) -> list[Sites]:
    """Returns the sites of servers on this machine, where no learner is. Raises ConfigError if they do not fit."""
    found = standalone_placements(config, _count_here(config))
    return [[ServerSite(server_index=seat.server, num_servers=len(found), gpus=seat.gpus)] for seat in found]


def _srun_prefix(
    site: ServerSite, seat: ServerPlacement, config: RunConfig, allocation: Allocation, each: int
) -> ServerSite:
    """Returns the site with the srun command that starts its guard, unless the guard is a child of this process."""
    slurm, image = config.slurm, config.slurm.engines.container
    if _here(seat, allocation) and image is None:
        return site
    command = allocation.server_command([seat.node], _cpus(config, each))
    contained = [*slurm.container_options(image, Path.cwd()), *slurm.container_prefix(image)]
    python = sys.executable if image is None else str(config.rollout.python)
    return replace(site, prefix_command=(*command, *contained), python=python)


def visible_gpus() -> list[str]:
    """Returns this machine's GPUs, as ``CUDA_VISIBLE_DEVICES`` names them, in the order in which ranks take them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return list(filter(None, given.split(",")))
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def _count_here(config: RunConfig) -> int:
    return len(visible_gpus()) if config.learner.device != "cpu" else 0


def _host(seat: ServerPlacement, allocation: Allocation, *, is_single: bool) -> str:
    """Returns the address of a server's node; loopback if it is this one, and the server is on it alone
    (``is_single``).

    Raises EngineError.
    """
    if is_single and _here(seat, allocation):
        return HERE
    try:
        if seat.node == allocation.this_node:  # a node's own name is often loopback there
            return allocation.address()
        return allocation.find_address(seat.node)
    except ConfigError as error:
        raise EngineError(str(error)) from error


def _here(seat: ServerPlacement, allocation: Allocation) -> bool:
    """True if this process is on the seat's node."""
    return seat.node == allocation.this_node


def cpus_of_engine_node(config: RunConfig, allocation: Allocation, seats: Sequence[ServerPlacement]) -> int | None:
    """Returns the number of CPU cores for all servers of a node without ranks; None: all of the job's."""
    each = _each(seats, allocation)
    cpus = _cpus(config, each)
    return None if cpus is None else cpus * each


def _each(seats: Sequence[ServerPlacement], allocation: Allocation) -> int:
    """Returns the largest number of servers on a node."""
    return -(-len(seats) // len(allocation.engine_nodes or allocation.nodes))


def _cpus(config: RunConfig, each: int) -> int | None:
    """Returns the number of CPU cores for the step of one of a node's ``each`` servers; None: all of the job's."""
    cores = config.slurm.cores(config.slurm.tasks_per_node(config.learner.dims.world_size))
    return None if cores is None else max(1, cores // each)
