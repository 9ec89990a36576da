"""Learner and engine servers take turns on the same accelerators: before a model trains or scores, the servers release
their memory. The next push of weights allocates it again (`ReplicaWeights.load`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rl_megatron.digests import Digest
from rl_megatron.interfaces import FrozenModel, Learner, Roles
from rl_megatron.rollout.servers.weights import ReplicaWeights
from rl_megatron.types import Batch, Counts, Loss, Metric, Scores, SkippedStep, StepResult, Want


def colocated(roles: Roles, servers: ReplicaWeights) -> Roles:
    """The roles, with models that make ``servers`` release their memory before they compute."""
    return replace(
        roles,
        learners={role: _Learner(inner=one, learner=one, servers=servers) for role, one in roles.learners.items()},
        frozen={role: _Frozen(inner=one, servers=servers) for role, one in roles.frozen.items()},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frozen:
    """Has the servers release their memory before ``inner`` scores."""

    inner: FrozenModel
    servers: ReplicaWeights

    async def score(self, batch: Batch, want: frozenset[Want]) -> Mapping[Want, Scores]:
        await self.servers.release()
        return await self.inner.score(batch, want)

    async def start_from(self, folder: Path) -> None:
        await self.inner.start_from(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Learner(_Frozen):
    """As _Frozen, and also before it trains; ``learner`` is ``inner``."""

    learner: Learner

    async def backward(self, batch: Batch, loss: Loss) -> Mapping[str, Metric[float | Counts]]:
        await self.servers.release()
        return await self.learner.backward(batch, loss)

    async def step(self, learning_rate: float) -> StepResult | SkippedStep:
        await self.servers.release()
        return await self.learner.step(learning_rate)

    async def save(self, folder: Path) -> Mapping[str, Digest]:
        return await self.learner.save(folder)

    async def load(self, folder: Path, files: Mapping[str, Digest]) -> None:
        await self.learner.load(folder, files)
