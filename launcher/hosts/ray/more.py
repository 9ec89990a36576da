"""Chooses where a server starts that joins a running job of Ray: on any node that the cluster has at that moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from typing_extensions import override

from launcher.hosts.ray.cluster import RayCluster
from launcher.servers.site import MoreSites, Site, Sites
from launcher.wire.greetings import this_node
from rl_megatron.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreOnRay(MoreSites):
    """On the nodes that ``known`` chooses from, if the cluster has them; on CPUs also on one that joined it later.

    A server there gets its weights if the node sees the folder that they are in.
    """

    cluster: RayCluster
    known: MoreSites

    @override
    async def __call__(self, node: str | None, living: Sequence[Sites], vacant: Sequence[Sites]) -> Sites:
        nodes = await self.cluster.nodes()
        free = [sites for sites in vacant if all(_name(site) in nodes for site in sites)]
        if node is None or node in self._own() or node not in nodes:
            sites = await self.known(node, living, free)
            if any(sites is one for one in free):
                return sites
            return [self._on_ray(one) for one in sites]
        if any(site.gpus for sites in (*living, *vacant) for site in sites):
            raise ConfigError(f"--node {node}: on GPUs servers join on the nodes that the run started with alone")
        address = nodes[node].address
        for sites in free:
            if all((site.node, site.host) == (node, address) for site in sites):
                return sites
        number, start = len(living), partial(self.cluster.start_on, node)
        return [Site(host=address, start=start, node=node, number=number, count=number + 1)]

    def _own(self) -> set[str]:
        """The nodes that the run started with."""
        allocation = self.cluster.allocation
        return {this_node()} if allocation is None else {one for of in allocation.by_role.values() for one in of}

    def _on_ray(self, site: Site) -> Site:
        """The site, started by an actor there instead of srun."""
        return replace(site, start=partial(self.cluster.start_on, _name(site)), before=())


def _name(site: Site) -> str:
    return this_node() if site.node == "here" else site.node
