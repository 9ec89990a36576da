"""A RolloutEngine over engines that answer a list of requests at once: those made together are one batch of each."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from rl_megatron.interfaces import RolloutEngine
from rl_megatron.types import Completion, GenerationRequest

if TYPE_CHECKING:
    from rl_megatron.rollout.local.engine import LocalEngine


class Batched(RolloutEngine, ABC):
    """Distributes the requests of one turn of the event loop over ``replicas``."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._pending: list[tuple[GenerationRequest, asyncio.Future[Sequence[Completion]]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def batch(self, replica: int, requests: list[GenerationRequest]) -> list[list[Completion]]:
        """Completions of each request, in order. What it raises, every request of the batch raises."""

    @override
    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Sequence[Completion]] = loop.create_future()
        if not self._pending:
            loop.call_soon(self._dispatch)  # after all callers that are ready have asked
        self._pending.append((request, answer))
        return await answer

    @override
    def so_far(self, request_id: str) -> Completion | None:
        return None

    @override
    async def interrupt(self) -> None:
        pass

    def _dispatch(self) -> None:
        pending, self._pending = self._pending, []
        for replica in range(self._replicas):
            if share := pending[replica :: self._replicas]:
                task = asyncio.ensure_future(self._serve(replica, share))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _serve(
        self, replica: int, share: list[tuple[GenerationRequest, asyncio.Future[Sequence[Completion]]]]
    ) -> None:
        try:
            results = await self.batch(replica, [request for request, _ in share])
        except Exception as error:  # noqa: BLE001  the callers raise it
            for _, answer in share:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), completions in zip(share, results, strict=True):
            if not answer.done():
                answer.set_result(completions)


class InThisProcess(Batched):
    """One in-process engine, which decodes in a thread."""

    def __init__(self, engine: LocalEngine) -> None:
        super().__init__(1)
        self._engine, self._turn = engine, asyncio.Lock()

    @override
    async def batch(self, replica: int, requests: list[GenerationRequest]) -> list[list[Completion]]:
        async with self._turn:
            return await asyncio.to_thread(self._engine.generate, requests)
