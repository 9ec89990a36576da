"""Learner and engine servers take turns on the same accelerators: before a model trains or scores, the servers release
their memory. The next push of weights takes it back (`ServedEngine.load`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rl_megatron.digests import Digest
from rl_megatron.interfaces import Critic, Learner, Reference, Roles
from rl_megatron.rollout.servers.engine import ServedEngine
from rl_megatron.types import Batch, Loss, Scores, SkippedStep, StepResult


def colocated(roles: Roles, engine: ServedEngine) -> Roles:
    """The same roles, whose models make ``engine`` give its memory back before they compute."""
    return replace(
        roles,
        learner=_Learner(inner=roles.learner, engine=engine),
        critic=_Critic(inner=roles.critic, critic=roles.critic, engine=engine) if roles.critic else None,
        reference=_Reference(inner=roles.reference, engine=engine) if roles.reference else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Learner:
    """Has the servers give their memory back before ``inner`` scores or trains."""

    inner: Learner
    engine: ServedEngine

    async def score(self, batch: Batch) -> Scores:
        await self.engine.release()
        return await self.inner.score(batch)

    async def score_with_routes(self, batch: Batch) -> tuple[Scores, Scores]:
        await self.engine.release()
        return await self.inner.score_with_routes(batch)

    async def train_step(self, batch: Batch, loss: Loss, learning_rate: float) -> StepResult | SkippedStep:
        await self.engine.release()
        return await self.inner.train_step(batch, loss, learning_rate)

    async def save(self, folder: Path) -> Mapping[str, Digest]:
        return await self.inner.save(folder)

    async def load(self, folder: Path, files: Mapping[str, Digest]) -> None:
        await self.inner.load(folder, files)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Critic(_Learner):
    """As _Learner; ``critic`` is ``inner``."""

    critic: Critic

    async def start_from(self, folder: Path) -> None:
        await self.critic.start_from(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reference:
    """Has the servers give their memory back before ``inner`` scores."""

    inner: Reference
    engine: ServedEngine

    async def score(self, batch: Batch) -> Scores:
        await self.engine.release()
        return await self.inner.score(batch)

    async def start_from(self, folder: Path) -> None:
        await self.inner.start_from(folder)
