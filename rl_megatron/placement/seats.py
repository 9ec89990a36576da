"""Places engine servers on nodes and GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The node and the GPUs of an engine server; without GPUs it runs on the node's CPUs."""

    node: str
    gpus: tuple[int, ...]


def describe_seats(seats: Sequence[Seat]) -> str:
    """One line per server: its node and its GPUs."""
    return "\n".join(
        f"engine {i}: {seat.node}" + (f", GPUs {seat.gpus[0]}-{seat.gpus[-1]}" if seat.gpus else "")
        for i, seat in enumerate(seats)
    )


def seat(replicas: int, tp: int, nodes: Sequence[str], gpus_per_node: int, *, shared: bool) -> tuple[Seat, ...]:
    """Seats of ``replicas`` servers, spread evenly over the nodes in order; no server spans two nodes.

    If servers share GPUs with the learner (``shared``), several servers may share a GPU. Raises ConfigError if a server
    would span nodes, or there are too few GPUs.
    """
    each = -(-replicas // len(nodes))
    if gpus_per_node and tp > gpus_per_node:
        raise ConfigError(
            f"rollout.server.tp={tp} is more than the {gpus_per_node} GPUs of a node: a server would span nodes, whose "
            "network is many times slower; lower it"
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
    """The seats of the servers that a run starts; empty if it starts none. Raises as `seat` does."""
    section, slurm = config.rollout.server, config.slurm
    if not config.rollout.served or section.addresses:
        return ()
    gpus = (slurm.engine_gpus if engine_nodes else slurm.gpus_per_node) if config.learner.device != "cpu" else 0
    return seat(section.replicas, section.tp, engine_nodes or nodes, gpus, shared=not engine_nodes)


def seats_here(config: RunConfig, gpus: int) -> tuple[Seat, ...]:
    """The seats of the servers that a run starts on one machine with ``gpus`` GPUs: those after the ranks' GPUs.

    If there are too few, servers share the ranks' GPUs, provided that the configuration allows it: in turns, or with a
    part of each GPU's memory. Raises ConfigError if it does not.
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
            f"rollout.server.tp={section.tp} need {ranks + wanted} GPUs, and this machine has {gpus}; lower them, or "
            "let servers share GPUs with the learner by rollout.server.colocated=true (they take turns) or "
            "rollout.server.memory_fraction (a share of each one's memory)"
        )
    first = ranks if apart else 0
    firsts = (first + i * section.tp for i in range(section.replicas))
    return tuple(Seat(node="here", gpus=tuple((f + j) % gpus for j in range(section.tp))) for f in firsts)
