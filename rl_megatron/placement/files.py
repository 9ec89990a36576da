"""Chooses where files of weights for servers are, and which learner ranks write each. No torch."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.weights import NODE_MEMORY
from rl_megatron.http.urls import is_loopback
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import placeholder_nodes
from rl_megatron.placement.seats import server_placements


def engines_on_own_nodes(config: RunConfig) -> bool:
    """True if servers are on nodes without a learner rank: a run starts them there, or an address is not this machine.
    Raises ConfigError if they do not fit."""
    elsewhere = any(not is_loopback(host) for host in address_hosts(config.rollout.server.addresses or ""))
    return elsewhere or any(node is None for node in _nodes_of_servers(config))


def address_hosts(addresses: str) -> list[str]:
    """Returns the hosts of the servers at ``addresses``."""
    return [urlsplit(address.strip()).hostname or "" for address in addresses.split(",") if address]


def weights_folder(config: RunConfig) -> Path | None:
    """Returns the folder of weights for servers: in each node's memory, or a shared one. None: the run's folder."""
    return config.weights.folder or (None if engines_on_own_nodes(config) else NODE_MEMORY)


def file_writer_ranks(config: RunConfig) -> list[range]:
    """Returns the groups of learner ranks that each write one file with a full copy of the weights for servers.

    In the nodes' memory, each learner node with servers has a file, and so has the first, with the controller.
    Otherwise the first rank writes the only file. Raises ConfigError if the ranks do not fit the nodes.
    """
    folder, world = weights_folder(config), config.learner.dims.world_size
    if folder is None or not folder.is_relative_to(NODE_MEMORY):
        return [range(1)]
    if config.run.launcher == "local":
        return [range(world)]
    each = config.slurm.tasks_per_node(world)
    nodes = sorted({0, *(node for node in _nodes_of_servers(config) if node is not None)})
    return [range(node * each, (node + 1) * each) for node in nodes]


def _nodes_of_servers(config: RunConfig) -> list[int | None]:
    """Returns each server node's index among the learner's nodes. None: it is another node."""
    if config.run.launcher == "local":
        return []
    nodes = placeholder_nodes(config)
    numbers = {node: number for number, node in enumerate(nodes[LEARNER])}
    return [numbers.get(seat.node) for seat in server_placements(config, nodes[LEARNER], nodes.get("engines", ()))]
