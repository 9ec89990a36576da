"""Lets a node of the user's own join the Ray cluster of a running job, for engine servers (``rl-megatron engines RUN
join``): the run tells its user where the head is, with the cluster's token, over its control socket.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol

from launcher.control.listener import Control
from launcher.hosts.ray.node import NodeCall, resource
from launcher.hosts.slurm.allocation import Allocation
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError, EngineError

_LOOK_SECONDS = 0.5


class Cluster(Protocol):
    """A running Ray cluster; ``allocation`` is None on one machine."""

    allocation: Allocation | None

    @property
    def call(self) -> NodeCall:
        """The message to the nodes of a job's cluster."""
        ...

    async def nodes(self) -> Collection[str]:
        """Those that it has now, by name."""
        ...


def why_refused(config: RunConfig, allocation: Allocation | None, node: str, nodes: Collection[str]) -> str | None:
    """Why ``node`` cannot join a run's cluster, which has ``nodes``, and what to do; None if it can."""
    if allocation is None:
        return (
            "this run's Ray is on one machine and listens on loopback alone, so no other node can join it; servers "
            "join here by `rl-megatron engines RUN add`, and on other nodes in a job of rl-megatron submit"
        )
    if config.learner.device != "cpu":
        return (
            f"learner.device={config.learner.device}: on GPUs servers are on the nodes that the job started with alone"
        )
    if not allocation.engine_nodes:
        return (
            "slurm.engines.nodes=0: this job's weights for servers are in the memory of the learner's nodes, where no "
            "other node can read them; submit it with nodes for servers"
        )
    if node in nodes:
        return f"{node} is in this run's cluster; `rl-megatron engines RUN add --node {node}` starts a server on it"
    return None


class Guests:
    """Answers the two requests of a node that joins ``cluster``: for its place, and for the moment when it has it."""

    def __init__(self, cluster: Cluster, config: RunConfig) -> None:
        self._cluster, self._config = cluster, config

    @contextlib.asynccontextmanager
    async def welcome(self, control: Control) -> AsyncIterator[None]:
        """Answer ``join`` and ``joined``, both with ``node``, while the context is open."""
        async with control.offering("join", self.invited), control.offering("joined", self.joined):
            yield

    async def invited(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        """The line that launcher/hosts/ray/node.py reads there, and the file for its output. Raises ConfigError."""
        node, allocation = str(arguments["node"]), self._cluster.allocation
        if said := why_refused(self._config, allocation, node, await self._cluster.nodes()):
            raise ConfigError(said)
        assert allocation is not None
        line = replace(self._cluster.call, head=None, resources={node: {resource("engine", node): 1.0}}).line()
        return {"line": line.decode(), "log": str(allocation.folder.resolve() / f"ray-joined-{node}.txt")}

    async def joined(self, arguments: Mapping[str, Any]) -> None:
        """Wait until the cluster has the node. Raises EngineError after ``learner.timeout_seconds``."""
        node, limit = str(arguments["node"]), self._config.learner.timeout_seconds
        try:
            async with asyncio.timeout(limit):
                while node not in await self._cluster.nodes():
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError as error:
            raise EngineError(f"Ray has no node {node} after learner.timeout_seconds={limit:g}") from error
