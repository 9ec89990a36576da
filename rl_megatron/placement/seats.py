"""Places engine servers on nodes and GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.errors import ConfigError
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import placeholder_nodes, ranks_by_role


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlacement:
    """A node of an engine server and its GPUs there. Without GPUs it runs on the node's CPUs."""

    node: str
    gpus: tuple[int, ...]
    server: int = 0
    node_index: int = 0  # index of this node within the server
    shares_gpus: bool = False  # ranks may use its GPUs too


def describe_placements(seats: Sequence[ServerPlacement]) -> str:
    """Returns a line per node of each server, with the node and the GPUs."""
    return "\n".join(
        f"engine {s.server}: {s.node}" + (f", GPUs {s.gpus[0]}-{s.gpus[-1]}" if s.gpus else "") for s in seats
    )


def place_servers(
    section: ServerSection, nodes: Sequence[str], gpus_per_node: int, *, shared: bool
) -> tuple[ServerPlacement, ...]:
    """Places servers, spread evenly over the nodes in order. A server on several nodes has neighboring ones.

    If servers share GPUs with the learner (``shares_gpus``), several servers may share a GPU. Raises ConfigError if
    there are too few GPUs or nodes, or a tensor-parallel group would span nodes although ``nodes`` does not say so."""
    span = section.span(gpus_per_node)
    blocks = [nodes[i : i + span] for i in range(0, len(nodes) - span + 1, span)]
    count, own = section.count, section.ranks // span
    each = -(-count // max(1, len(blocks)))
    problems = [*_node_problems(section, nodes, gpus_per_node, span)]
    if not problems and gpus_per_node and each * own > gpus_per_node and not shared:
        problems.append(
            f"rollout.server.replicas={count} of {_degrees(section)} on slurm.engines.nodes={len(nodes)} "
            f"are {each} on a node, {each * own} GPUs of {gpus_per_node}; lower them, or set "
            f"slurm.engines.nodes={-(-count // (gpus_per_node // own)) * span}"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    slots = max(1, gpus_per_node // own)
    firsts = [i % each % slots * own for i in range(count)]
    return tuple(
        ServerPlacement(
            node=node,
            gpus=tuple(range(firsts[i], firsts[i] + own)) if gpus_per_node else (),
            server=i,
            node_index=part,
            shares_gpus=shared and gpus_per_node > 0,
        )
        for i in range(count)
        for part, node in enumerate(blocks[i // each])
    )


def _node_problems(section: ServerSection, nodes: Sequence[str], gpus_per_node: int, span: int) -> Iterator[str]:
    """Yields the reason why servers of ``span`` nodes do not fit."""
    given = f"rollout.server.nodes={span}"
    if gpus_per_node and section.tp > gpus_per_node and section.nodes is None:
        yield (
            f"rollout.server.tp={section.tp} is more than the {gpus_per_node} GPUs of a node: its group would span "
            f"nodes, whose network is many times slower; lower it, raise rollout.server.pp or dp, or allow it with "
            f"{given}"
        )
    elif section.ranks % span:
        yield f"{given} cannot share out {_degrees(section)} = {section.ranks} GPUs evenly; change one of them"
    elif gpus_per_node and section.ranks // span > gpus_per_node:
        yield (
            f"{given} of {_degrees(section)} need {section.ranks // span} GPUs of each node, which has "
            f"{gpus_per_node}; raise rollout.server.nodes or lower a degree"
        )
    elif len(nodes) % span:
        yield (
            f"{given}, but the servers' nodes are {len(nodes)}, not a multiple of it; change rollout.server.nodes or "
            "slurm.engines.nodes"
        )


def _degrees(section: ServerSection) -> str:
    """Returns text like ``rollout.server.tp=8``, with the other degrees above 1."""
    others = "".join(f" * {key}={getattr(section, key)}" for key in ("pp", "dp") if getattr(section, key) > 1)
    return f"rollout.server.tp={section.tp}{others}"


def server_placements(
    config: RunConfig, nodes: Sequence[str], engine_nodes: Sequence[str]
) -> tuple[ServerPlacement, ...]:
    """Places the servers that a run starts; empty if it starts none. Raises like `place_servers`."""
    section, slurm = config.rollout.server, config.slurm
    if not config.rollout.served or section.addresses:
        return ()
    gpus = slurm.gpus_per_node if config.learner.device != "cpu" else 0
    return place_servers(section, engine_nodes or nodes, gpus, shared=not engine_nodes)


def gpus_on_learner_nodes(config: RunConfig, here: int | None = None) -> list[list[int]]:
    """Returns the GPUs of each server that a run starts on the learner's nodes, or [] if servers are on other nodes.

    A GPU has its rank's number. GPUs without a rank follow after all ranks. ``here``: GPUs of the one machine that the
    run is on. None: it is a job, or the number is unknown, and servers have their own GPUs there if
    slurm.gpus_per_node are enough. Raises like `place_servers` or `local_server_placements`.
    """
    by_role, each = placeholder_nodes(config), config.slurm.gpus_per_node
    wanted = sum(ranks_by_role(config).values()) + config.rollout.server.count * config.rollout.server.ranks
    if here is None and config.run.launcher == "local" and wanted <= each:
        here = each
    if here is not None:
        number, seats = {"here": 0}, local_server_placements(config, here)
    elif "engines" in by_role:
        return []
    else:
        number = {node: i for i, node in enumerate(by_role[LEARNER])}
        seats = server_placements(config, by_role[LEARNER], ())
    world = config.learner.dims.world_size
    tasks = config.slurm.tasks_per_node(world) if here is None else here
    servers: dict[int, list[int]] = {}
    for one in seats:
        n = number[one.node]
        of = [n * tasks + gpu if gpu < tasks else world + n * each + gpu for gpu in one.gpus]
        servers.setdefault(one.server, []).extend(of)
    return list(servers.values())


def local_server_placements(config: RunConfig, gpus: int) -> tuple[ServerPlacement, ...]:
    """Places the servers that a run starts on one machine with ``gpus`` GPUs: they get those after the ranks' GPUs.

    If there are too few, servers share the ranks' GPUs in turns, or with a part of each GPU's memory. Raises
    ConfigError if the configuration does not allow that.
    """
    section, ranks = config.rollout.server, sum(ranks_by_role(config).values())
    if not config.rollout.served or section.addresses:
        return ()
    if section.nodes is not None and section.nodes > 1:
        raise ConfigError(
            f"rollout.server.nodes={section.nodes}, but the run is on one machine; send it as a job (rl-megatron "
            "submit), or leave the key out"
        )
    if config.learner.device == "cpu":
        return tuple(ServerPlacement(node="here", gpus=(), server=i) for i in range(section.count))
    own = section.ranks
    wanted = section.count * own
    apart = not section.colocated and ranks + wanted <= gpus
    if own > gpus or not (apart or section.colocated or section.memory_fraction):
        raise ConfigError(
            f"{ranks} learner processes and rollout.server.replicas={section.count} of "
            f"{_degrees(section)} need {ranks + wanted} GPUs, and this machine has {gpus}; lower them, or "
            "let servers share GPUs with the learner by rollout.server.memory_fraction (a share of each one's memory), "
            "with rollout.server.colocated=true if they shall take turns"
        )
    return _place_in_order(section.count, own, gpus, first=ranks if apart else 0, shared=not apart)


def standalone_placements(config: RunConfig, gpus: int) -> tuple[ServerPlacement, ...]:
    """Places ``rollout.server.replicas`` on one machine with ``gpus`` GPUs without ranks. A single server sees all.

    If there are too few, several share a GPU. Raises ConfigError if rollout.server.memory_fraction has no room for
    them.
    """
    section = config.rollout.server
    if not config.rollout.served or section.addresses:
        return ()
    if config.learner.device == "cpu" or section.count == 1:
        return tuple(ServerPlacement(node="here", gpus=(), server=i) for i in range(section.count))
    own, wanted, share = section.ranks, section.count * section.ranks, section.memory_fraction or 1
    each = -(-wanted // max(1, gpus))
    if own > gpus or each * share > 1:
        shared = f", or let {each} share a GPU by rollout.server.memory_fraction={100 // each / 100:g}"
        raise ConfigError(
            f"rollout.server.replicas={section.count} of {_degrees(section)} need {wanted} GPUs, and this machine has "
            f"{gpus}; lower them{shared if own <= gpus else ''}"
        )
    return _place_in_order(section.count, own, gpus)


def _place_in_order(
    servers: int, own: int, gpus: int, *, first: int = 0, shared: bool = False
) -> tuple[ServerPlacement, ...]:
    """Gives each server the next ``own`` GPUs, from the ``first`` on, in rotation."""
    starts = (first + i * own for i in range(servers))
    return tuple(
        ServerPlacement(node="here", gpus=tuple((start + j) % gpus for j in range(own)), server=i, shares_gpus=shared)
        for i, start in enumerate(starts)
    )
