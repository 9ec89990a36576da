"""Computes each engine server's site: the command that starts it on its node, its address, and its visible GPUs."""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

from launcher.hosts.slurm.allocation import Allocation, rank_command
from launcher.processes.guards import HERE, ServerSite, Sites, StartAt
from rl_megatron.config.beside import separate
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError, EngineError
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import make_placement, placeholder_nodes
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


def describe_steps(config: RunConfig) -> str:
    """Returns the srun commands of a job without Ray that does not exist yet, a line for each role and server. Its
    nodes are ``node0`` and so on."""
    nodes = {role: tuple(name.replace(" ", "") for name in names) for role, names in placeholder_nodes(config).items()}
    apart = {role: nodes[role] for role in separate(config)}
    learner, engines = nodes[LEARNER], nodes.get("engines", ())
    allocation = Allocation(
        id="", restart=0, this_node=learner[0], nodes=learner, engine_nodes=engines, folder=Path(), separate=apart
    )
    python = str(config.slurm.python or sys.executable)
    placements = [make_placement(config, nodes[role], role) for role in (LEARNER, *apart)]
    lines = [(each.role, shlex.join(rank_command(config.slurm, each, allocation, python))) for each in placements]
    seats = server_placements(config, learner, engines)
    for seat in seats:
        command = _srun_command(seat, config, allocation, _each(seats, allocation))
        lines.append((f"engine {seat.server}", f"{shlex.join(command)} ..." if command else "by the controller"))
    return "\n".join(
        ["commands that start it, with node0 for its first node:", *(f"  {who}: {said}" for who, said in lines)]
    )


def standalone_sites(config: RunConfig) -> list[Sites]:
    """Returns the sites of servers on this machine, where no learner is. Raises ConfigError if they do not fit."""
    found = standalone_placements(config, _count_here(config))
    return [[ServerSite(server_index=seat.server, num_servers=len(found), gpus=seat.gpus)] for seat in found]


def _srun_prefix(
    site: ServerSite, seat: ServerPlacement, config: RunConfig, allocation: Allocation, each: int
) -> ServerSite:
    """Returns the site with the srun command that starts its guard, unless the guard is a child of this process."""
    if not (command := _srun_command(seat, config, allocation, each)):
        return site
    python = sys.executable if config.slurm.engines.container is None else str(config.rollout.python)
    return replace(site, prefix_command=command, python=python)


def _srun_command(seat: ServerPlacement, config: RunConfig, allocation: Allocation, each: int) -> tuple[str, ...]:
    """Returns the command before that of a server's guard; empty for a child of the controller."""
    slurm, image = config.slurm, config.slurm.engines.container
    if _here(seat, allocation) and image is None:
        return ()
    command = allocation.server_command([seat.node], _cpus(config, each))
    return (*command, *slurm.container_options(image, Path.cwd()), *slurm.container_prefix(image))


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
