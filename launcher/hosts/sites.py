"""Computes each engine server's site: the command that starts it on its node, its address, and its visible GPUs."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from launcher.hosts.slurm.allocation import Allocation
from launcher.servers.site import HERE, Site, StartAt
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import EngineError
from rl_megatron.placement.seats import Seat, seats_here, seats_of


def sites_of(config: RunConfig, allocation: Allocation | None, start_at: StartAt | None = None) -> list[Site]:
    """A site for each server to start, by ``start_at`` or else by this process with srun.

    Raises ConfigError if the servers do not fit.
    """
    if allocation is None:
        names = visible_gpus() if config.learner.device != "cpu" else []
        here = [Site(environment=_environment(seat, names)) for seat in seats_here(config, len(names))]
        return here if start_at is None else [replace(p, start=partial(start_at, i)) for i, p in enumerate(here)]
    seats = seats_of(config, allocation.nodes, allocation.engine_nodes)
    each = -(-len(seats) // len(allocation.engine_nodes or allocation.nodes))
    if start_at is None:
        found = [_site(seat, config, allocation, each) for seat in seats]
    else:
        found = [
            Site(host=_host(seat, allocation), environment=_environment(seat), start=partial(start_at, number))
            for number, seat in enumerate(seats)
        ]
    return [replace(site, number=number, count=len(found)) for number, site in enumerate(found)]


def _site(seat: Seat, config: RunConfig, allocation: Allocation, each: int) -> Site:
    host, environment = _host(seat, allocation), _environment(seat)
    if host == HERE:
        return Site(environment=environment)
    inside = ["env", *(f"{name}={value}" for name, value in environment.items())]  # after srun, which sets it
    return Site(host=host, before=(*allocation.server_command([seat.node], _cpus(config, allocation, each)), *inside))


def visible_gpus() -> list[str]:
    """This machine's GPUs, as ``CUDA_VISIBLE_DEVICES`` names them, in the order in which ranks take them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return list(filter(None, given.split(",")))
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def _environment(seat: Seat, names: Sequence[str] | None = None) -> Mapping[str, str]:
    """The variable that selects a seat's GPUs, from ``names`` of its node's GPUs if these are not plain numbers."""
    visible = ",".join(names[gpu] if names else str(gpu) for gpu in seat.gpus)
    return {"CUDA_VISIBLE_DEVICES": visible} if visible else {}


def _host(seat: Seat, allocation: Allocation) -> str:
    """The server's address. Raises EngineError."""
    if seat.node == allocation.here and not allocation.heterogeneous:  # this process is outside of other components
        return HERE
    try:
        return socket.gethostbyname(seat.node)
    except OSError as error:
        raise EngineError(f"node {seat.node} of job {allocation.id} has no address here: {error}") from error


def cpus_of_engine_node(config: RunConfig, allocation: Allocation) -> int:
    """CPU cores for all servers of a node without ranks."""
    each = -(-config.rollout.server.replicas // len(allocation.engine_nodes))
    return _cpus(config, allocation, each) * each


def _cpus(config: RunConfig, allocation: Allocation, each: int) -> int:
    """CPU cores of a server's step, if a node has ``each`` servers."""
    slurm = config.slurm
    ranks = slurm.tasks_per_node(config.learner.dims.world_size)
    if allocation.heterogeneous:
        return slurm.engines.cpus_per_server or slurm.cpus_per_task or 1
    return max(1, ranks * (slurm.cpus_per_task or 1) // each)
