"""How an engine server gets to where it runs: a command before its own, an address, and what it may see there."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from launcher.placement import Seat, seats_of
from launcher.slurm import Job
from rl_megatron.config import RunConfig
from rl_megatron.errors import EngineError

_LOW, _HIGH = 20_000, 32_000  # below what systems hand out by themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one server runs. Its guard is started by ``before`` and the guard's command, with the same pipe."""

    host: str = "127.0.0.1"
    before: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def port(self) -> int:
        """A port for the server: free here, or on another node one that few others take."""
        if self.before:
            return _LOW + secrets.randbelow(_HIGH - _LOW)
        with socket.socket() as found:
            found.bind((self.host, 0))
            return int(found.getsockname()[1])


def places(config: RunConfig, job: Job | None) -> list[Place]:
    """A place for each server that is started. Raises ConfigError where they do not fit."""
    if job is None:
        return [Place()] * config.rollout.server.replicas
    seats = seats_of(config, job.nodes, job.engine_nodes)
    each = -(-len(seats) // len(job.engine_nodes or job.nodes))
    return [_place(seat, config, job, each) for seat in seats]


def elsewhere(found: Sequence[Place]) -> bool:
    """Whether any server is on another node, where it does not see this one's memory."""
    return any(place.before for place in found)


def _place(seat: Seat, config: RunConfig, job: Job, each: int) -> Place:
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, seat.gpus))} if seat.gpus else {}
    if seat.node == job.here and not job.heterogeneous:  # this process has nothing of another component
        return Place(environment=environment)
    try:
        host = socket.gethostbyname(seat.node)
    except OSError as error:
        raise EngineError(f"node {seat.node} of job {job.id} has no address here: {error}") from error
    inside = ["env", *(f"{name}={value}" for name, value in environment.items())]  # srun sets it, so behind srun
    return Place(host=host, before=(*job.server_command(seat.node, _cpus(config, job, each)), *inside))


def _cpus(config: RunConfig, job: Job, each: int) -> int:
    """CPU cores of a server's step, ``each`` of them on a node."""
    slurm = config.slurm
    ranks = slurm.tasks_per_node(config.learner.dims.world_size)
    if job.heterogeneous:
        return slurm.engines.cpus_per_server or slurm.cpus_per_task or 1
    return max(1, ranks * (slurm.cpus_per_task or 1) // each)
