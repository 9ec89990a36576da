"""Learner and engine servers take turns on the same accelerators: before a model is loaded, trains or scores, the
servers release their memory. The next push of weights allocates it again (`ReplicaWeights.load`), for which the models
release theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rl_megatron.digests import Digest
from rl_megatron.engines.weights import ReplicaWeights
from rl_megatron.interfaces import FrozenModel, Learner, Pass, PassScores, Roles, Saving, Together, WeightSync
from rl_megatron.types import Batch, Counts, Loss, Metric, Scores, SkippedStep, StepResult, Want, WeightUpdate


def colocated(roles: Roles, servers: ReplicaWeights) -> Roles:
    """The roles, with models that make ``servers`` release their memory before they compute, and a push of weights
    that makes the models release theirs. Reward models score while servers sample, and take no turns with them."""
    return replace(
        roles,
        weights=_Weights(inner=roles.weights, models=(*roles.learners.values(), *roles.frozen.values())),
        learners={role: _Learner(inner=one, learner=one, servers=servers) for role, one in roles.learners.items()},
        frozen={role: _Frozen(inner=one, servers=servers) for role, one in roles.frozen.items()},
        together=[_Together(inner=one, servers=servers) for one in roles.together],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Has the ``models`` release their memory before a push, in which servers take theirs."""

    inner: WeightSync
    models: Sequence[FrozenModel]

    async def push(self, version: int) -> WeightUpdate:
        for model in self.models:
            await model.release()
        return await self.inner.push(version)

    async def export(self, folder: Path) -> None:
        await self.inner.export(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Together:
    """Has the servers release their memory before the models of ``inner`` score."""

    inner: Together
    servers: ReplicaWeights

    @property
    def roles(self) -> Collection[str]:
        return self.inner.roles

    async def score(self, batch: Batch, passes: Sequence[Pass]) -> Sequence[PassScores]:
        await self.servers.release()
        return await self.inner.score(batch, passes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frozen:
    """Has the servers release their memory before ``inner`` scores, and before its weights are loaded."""

    inner: FrozenModel
    servers: ReplicaWeights

    async def score(self, batch: Batch, want: frozenset[Want]) -> Mapping[Want, Scores]:
        await self.servers.release()
        return await self.inner.score(batch, want)

    async def forget(self) -> None:
        await self.inner.forget()

    async def start_from(self, folder: Path) -> None:
        await self.servers.release()
        await self.inner.start_from(folder)

    async def release(self) -> None:
        await self.inner.release()


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

    async def drop(self) -> None:
        await self.servers.release()
        await self.learner.drop()

    async def reset_moments(self) -> None:
        await self.servers.release()
        await self.learner.reset_moments()

    async def lead(self, rate: float) -> None:
        await self.servers.release()
        await self.learner.lead(rate)

    async def save(self, folder: Path) -> Saving:
        return await self.learner.save(folder)

    async def load(self, folder: Path, files: Mapping[str, Digest]) -> None:
        await self.servers.release()
        await self.learner.load(folder, files)
