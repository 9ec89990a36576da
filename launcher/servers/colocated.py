"""Learner and engine servers take turns on the same accelerators: before a model is loaded, trains or scores, the
servers release their memory. The next push of weights allocates it again (`ReplicaWeights.load`), for which the models
release theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from rl_megatron.engines.weights import ReplicaWeights
from rl_megatron.interfaces import FrozenModel, Roles, WeightSync
from rl_megatron.types import WeightUpdate

T = TypeVar("T")

COMPUTING = ("score", "start_from", "backward", "step", "drop", "reset_moments", "lead", "load")
"""The calls of models before which servers release their memory."""


def colocated(roles: Roles, servers: ReplicaWeights) -> Roles:
    """The roles, with models that make ``servers`` release their memory before they compute, and a push of weights
    that makes the models release theirs. Reward models score while servers sample, and take no turns with them."""

    def in_turn(model: T) -> T:
        return cast(T, _InTurn(model, servers))

    return replace(
        roles,
        weights=_Weights(inner=roles.weights, models=(*roles.learners.values(), *roles.frozen.values())),
        learners={role: in_turn(one) for role, one in roles.learners.items()},
        frozen={role: in_turn(one) for role, one in roles.frozen.items()},
        together=[in_turn(one) for one in roles.together],
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


class _InTurn:
    """A model, or models on the same ranks, whose `COMPUTING` calls first make the servers release their memory."""

    def __init__(self, inner: object, servers: ReplicaWeights) -> None:
        self._inner, self._servers = inner, servers

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return partial(self._released, found) if name in COMPUTING else found

    async def _released(self, call: Any, *given: Any, **named: Any) -> Any:
        await self._servers.release()
        return await call(*given, **named)
