"""Places engine servers on nodes and GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where an engine server runs, and on which GPUs of that node; none: on its CPUs."""

    node: str
    gpus: tuple[int, ...]


def describe_seats(seats: Sequence[Seat]) -> str:
    """A line for each server."""
    return "\n".join(
        f"engine {i}: {seat.node}" + (f", GPUs {seat.gpus[0]}-{seat.gpus[-1]}" if seat.gpus else "")
        for i, seat in enumerate(seats)
    )


def seat(replicas: int, tp: int, nodes: Sequence[str], gpus_per_node: int, *, shared: bool) -> tuple[Seat, ...]:
    """Servers on nodes, each inside one, shared out evenly in order.

    Where GPUs are ``shared`` with the learner, servers may also share them among themselves. Raises ConfigError where
    a server would span nodes, or there are too few GPUs.
    """
    each = -(-replicas // len(nodes))
    if gpus_per_node and tp > gpus_per_node:
        raise ConfigError(
            f"rollout.server.tp={tp} is more than the {gpus_per_node} GPUs of a node: a server would leave its node, "
            "whose network is many times slower; lower it"
        )
    if gpus_per_node and each * tp > gpus_per_node and not shared:
        raise ConfigError(
            f"rollout.server.replicas={replicas} of tp={tp} on slurm.engines.nodes={len(nodes)} are {each} on a node, "
            f"{each * tp} GPUs of {gpus_per_node}; lower them, or set "
            f"slurm.engines.nodes={-(-replicas // (gpus_per_node // tp))}"
        )
    slots = max(1, gpus_per_node // tp)
    return tuple(
        Seat(
            node=nodes[i // each],
            gpus=tuple(range(i % each % slots * tp, (i % each % slots + 1) * tp)) if gpus_per_node else (),
        )
        for i in range(replicas)
    )


def seats_of(config: RunConfig, nodes: Sequence[str], engine_nodes: Sequence[str]) -> tuple[Seat, ...]:
    """Where the servers run that are started for a run; none where there are none to start. Raises as `seat` does."""
    section, slurm = config.rollout.server, config.slurm
    if not config.rollout.served or section.addresses:
        return ()
    gpus = (slurm.engine_gpus if engine_nodes else slurm.gpus_per_node) if config.learner.device != "cpu" else 0
    return seat(section.replicas, section.tp, engine_nodes or nodes, gpus, shared=not engine_nodes)


def seats_here(config: RunConfig, gpus: int) -> tuple[Seat, ...]:
    """As `seats_of`, on one machine with so many GPUs: behind those of the ranks, which take the first.

    Where there are too few, servers share them if the configuration says so: in turns, or with a part of each's memory.
    Raises ConfigError.
    """
    section, ranks = config.rollout.server, config.learner.dims.world_size * (1 + len(config.roles.separate))
    if not config.rollout.served or section.addresses:
        return ()
    if config.learner.device == "cpu":
        return (Seat(node="here", gpus=()),) * section.replicas
    wanted = section.replicas * section.tp
    apart = not section.colocated and ranks + wanted <= gpus
    if section.tp > gpus or not (apart or section.colocated or section.memory_fraction):
        raise ConfigError(
            f"{ranks} learner processes and rollout.server.replicas={section.replicas} of "
            f"rollout.server.tp={section.tp} want {ranks + wanted} GPUs, and this machine has {gpus}; lower them, or "
            "let servers share GPUs with the learner by rollout.server.colocated=true (they take turns) or "
            "rollout.server.memory_fraction (a share of each one's memory)"
        )
    first = ranks if apart else 0
    firsts = (first + i * section.tp for i in range(section.replicas))
    return tuple(Seat(node="here", gpus=tuple((f + j) % gpus for j in range(section.tp))) for f in firsts)
