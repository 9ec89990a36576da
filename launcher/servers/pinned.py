"""The servers that evaluate alone, with ``eval.mode=pinned``: as many engines of their own, which pushes pass by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from typing_extensions import override

from rl_megatron.config.run import RunConfig
from rl_megatron.interfaces import PinnedEngine, RolloutEngine
from rl_megatron.rollout.servers.engine import ServedEngine
from rl_megatron.weights.servers.pinned import PinnedWeights


def evaluating(config: RunConfig) -> RunConfig:
    """The configuration of these servers alone."""
    server = config.rollout.server.model_copy(update={"replicas": config.eval.servers, "least_replicas": 1})
    rollout = config.rollout.model_copy(update={"server": server})
    profile = config.profile.model_copy(update={"engines": False})
    return config.model_copy(update={"rollout": rollout, "profile": profile})


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedServers(PinnedEngine):
    """``served`` by ``weights``."""

    served: ServedEngine
    weights: PinnedWeights

    @property
    @override
    def engine(self) -> RolloutEngine:
        return self.served

    @override
    async def pin(self, version: int, held: Callable[[], None]) -> bool:
        return await self.weights.pin(version, held)

    @property
    @override
    def serving(self) -> int:
        return len(self.served.replicas.healthy())

    @override
    async def lost(self) -> None:
        await self.served.replicas.none_is_healthy()
