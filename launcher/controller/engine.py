"""The engines of all learner ranks as one RolloutEngine."""

from __future__ import annotations

from typing_extensions import override

from launcher.controller.group import WorkerGroup
from rl_megatron.rollout.local.batched import Batched
from rl_megatron.types import Completion, GenerationRequest


class EngineGroup(Batched):
    """A RolloutEngine over the replicas: each replica serves requests that are made together as one batch."""

    def __init__(self, group: WorkerGroup) -> None:
        super().__init__(len(group.workers))
        self._group = group

    @override
    async def batch(self, replica: int, requests: list[GenerationRequest]) -> list[list[Completion]]:
        results: list[list[Completion]]
        (results,) = await self._group.ask("generate", {self._group.workers[replica].rank: (requests,)})
        return results
