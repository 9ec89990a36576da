"""Finds how pushes of weights reach the engines: the transport, and the links that the bytes cross. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.weights import NODE_MEMORY
from rl_megatron.feature import make_pushes
from rl_megatron.http.urls import is_loopback
from rl_megatron.placement.files import address_hosts, file_writer_ranks, weights_folder
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import placeholder_nodes
from rl_megatron.placement.seats import server_placements


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The route of pushes to engines: the ``transport``, the links that bytes cross, and the file that engines read.

    ``shared``: that file is on a file system that several nodes share.
    """

    transport: str
    link: str  # links from learner ranks to engines or writers of a file; "": none
    file: str | None = None
    shared: bool = False

    @property
    def name(self) -> str:
        """The route in a row of metrics: the transport, or "shared_file" for weights on a shared file system."""
        return "shared_file" if self.shared else self.transport

    def describe(self) -> str:
        """Returns the links that bytes cross, in order, for a line."""
        return " and then through ".join(filter(None, (self.link, self.file)))


def find_route(config: RunConfig) -> Route:
    """Returns the route of a run's pushes. Raises ConfigError if servers do not fit the job's nodes."""
    kind, served = config.transport, config.rollout.served
    learner_apart = config.run.launcher != "local" and config.slurm.nodes > 1
    if make_pushes(config) is not None:
        file, shared = _served_file(config)
        alone = config.learner.dims.world_size == 1
        over = "" if alone else _over(config, learner_apart)
        return Route(transport="file", link=over, file=file, shared=shared)
    if served and kind.direct:
        nodes = engine_nodes(config)
        together = any(node in range(config.slurm.nodes) for node in nodes)
        over = _over(config, learner_apart or any(nodes), together)
        last = ", to the learner rank beside each of the servers' ranks" if kind.last_hop else ""
        return Route(transport=kind.name, link=over + last)
    if served:
        file, shared = _served_file(config)
        alone = len(file_writer_ranks(config)[0]) == config.learner.dims.world_size  # they hold all that they write
        over = "" if alone else _over(config, learner_apart)
        return Route(transport=kind.name, link=over, file=file, shared=shared)
    return Route(transport=kind.name, link=_over(config, learner_apart))


def engine_nodes(config: RunConfig) -> list[int]:
    """Returns the node of each rank of each server that the run starts, counted from the learner's first. A server by
    address counts once, because its ranks are unknown. Raises ConfigError if servers do not fit the job's nodes."""
    section = config.rollout.server
    if section.addresses is not None:
        hosts = address_hosts(section.addresses)
        return [0 if is_loopback(host) else config.slurm.nodes + i for i, host in enumerate(hosts)]
    if config.run.launcher == "local":
        return [0] * (section.count * section.ranks)
    by_role = placeholder_nodes(config)
    order = [node for nodes in by_role.values() for node in nodes]
    seats = server_placements(config, by_role[LEARNER], by_role.get("engines", ()))
    each = section.count * section.ranks // max(1, len(seats))
    return [order.index(seat.node) for seat in seats for _ in range(each)]


def _over(config: RunConfig, is_separate: bool, is_shared: bool = True) -> str:
    """Returns the links without a file, between processes of several nodes (``is_separate``), of one node, or both."""
    inside = "NVLink" if config.learner.device != "cpu" else "a node's loopback"
    return " and ".join([inside] * (is_shared or not is_separate) + ["the network"] * is_separate)


def _served_file(config: RunConfig) -> tuple[str, bool]:
    """Describes the files that servers read. Also returns whether several nodes share their file system."""
    folder, nodes = weights_folder(config), engine_nodes(config)
    if any(node >= config.slurm.nodes for node in nodes):
        return _file(config.weights.folder or "the run's folder", shared=True), True
    if folder is not None and folder.is_relative_to(NODE_MEMORY) and any(nodes):
        return f"a file in {folder} on each of {len(file_writer_ranks(config))} nodes", False
    return _file(folder or "the run's folder", shared=any(nodes)), any(nodes)


def _file(folder: Path | str, shared: bool) -> str:
    return f"a file in {folder}, " + ("on a shared file system" if shared else "on one node")
