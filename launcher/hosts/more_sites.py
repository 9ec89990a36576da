"""Chooses where a server starts that joins a running job: where another has left, or at a new place."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from launcher.hosts.sites import site_at, visible_gpus
from launcher.hosts.slurm.allocation import Allocation
from launcher.servers.site import MoreSites, Site, Sites, vacated
from launcher.wire.greetings import this_node
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.placement.ranks import ranks_by_role
from rl_megatron.placement.seats import Seat


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreHere(MoreSites):
    """On this machine. On GPUs a server gets those that neither ranks nor other servers have."""

    config: RunConfig

    @override
    async def __call__(self, node: str | None, living: Sequence[Sites], vacant: Sequence[Sites]) -> Sites:
        if node not in (None, "here", this_node()):
            raise ConfigError(f"--node {node}: this run is on one machine, {this_node()}; leave it out")
        if vacant:
            return await vacated(None, living, vacant)
        number = len(living)
        if self.config.learner.device == "cpu":
            return [Site(number=number, count=number + 1)]
        there, ranks = len(visible_gpus()), sum(ranks_by_role(self.config).values())
        gpus = _free(range(ranks, there), living, self.config.rollout.server.ranks, f"this machine's {there}")
        return [Site(number=number, count=number + 1, gpus=gpus)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreOnNodes(MoreSites):
    """On the nodes of a Slurm allocation that it still has: those for servers alone, if there are such.

    A server over several nodes, or on GPUs that the learner has too, takes the place of one that left. On the learner's
    nodes weights are only where servers were at the start.
    """

    config: RunConfig
    allocation: Allocation

    @override
    async def __call__(self, node: str | None, living: Sequence[Sites], vacant: Sequence[Sites]) -> Sites:
        there = await asyncio.to_thread(self.allocation.nodes_left)
        alone = self.allocation.engine_nodes
        nodes = [one for one in alone or self.allocation.nodes if one in there]
        if node is not None and node not in nodes:
            raise ConfigError(f"--node {node}: servers of this run can be on {', '.join(nodes) or 'no node any more'}")
        free = [sites for sites in vacant if {site.node for site in sites} <= there]
        here = [sites for sites in free if node in (None, *(site.node for site in sites))]
        if here:
            return here[0]
        if any(len(sites) > 1 for sites in (*living, *vacant)):
            raise ConfigError("a server over several nodes can only take the place of one that left, on nodes that run")
        if not alone:
            had = {site.node for sites in (*living, *vacant) for site in sites}
            nodes = [one for one in nodes if one in had]
        seat = self._seat([node] if node in nodes else [] if node else nodes, living)
        number = len(living)
        return [await asyncio.to_thread(site_at, seat, self.config, self.allocation, number=number, count=number + 1)]

    def _seat(self, nodes: Sequence[str], living: Sequence[Sites]) -> Seat:
        """On the node with the fewest servers. Raises ConfigError."""
        busy = Counter(site.node for sites in living for site in sites)
        slurm, why = self.config.slurm, "none of the nodes that the job has now gets weights for servers"
        for node in sorted(nodes, key=lambda one: busy[one]):
            if self.config.learner.device == "cpu":
                return Seat(node=node, gpus=())
            if not self.allocation.engine_nodes:
                why = "on the learner's GPUs a server can only take the place of one that left; drop one first"
                continue
            there = [sites for sites in living if any(site.node == node for site in sites)]
            try:
                gpus = _free(range(slurm.engine_gpus), there, self.config.rollout.server.ranks, f"the GPUs of {node}")
            except ConfigError as error:
                why = str(error)
                continue
            return Seat(node=node, gpus=gpus)
        raise ConfigError(why)


def _free(gpus: range, living: Sequence[Sites], wanted: int, where: str) -> tuple[int, ...]:
    """The first ``wanted`` of ``gpus`` that no server has. Raises ConfigError."""
    used = {gpu for sites in living for site in sites for gpu in site.gpus}
    free = [gpu for gpu in gpus if gpu not in used]
    if len(free) < wanted:
        raise ConfigError(
            f"a server needs {wanted} GPUs, but {len(free)} of {where} are free of ranks and other servers; drop a "
            "server first"
        )
    return tuple(free[:wanted])
