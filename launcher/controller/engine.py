"""The engines of all learner ranks as one RolloutEngine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from typing_extensions import override

from launcher.controller.group import WorkerGroup
from launcher.controller.handle import WorkerHandle
from rl_megatron.interfaces import RolloutEngine
from rl_megatron.types import Completion, GenerationRequest


class EngineGroup(RolloutEngine):
    """A RolloutEngine over the replicas: each replica serves requests that are made together as one batch."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._pending: list[tuple[GenerationRequest, asyncio.Future[Sequence[Completion]]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @override
    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        """Distributes the requests of one turn of the event loop over the replicas."""
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
        count = len(self._group.workers)
        for replica, handle in enumerate(self._group.workers):
            if share := pending[replica::count]:
                task = asyncio.ensure_future(self._serve(handle, share))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _serve(
        self, handle: WorkerHandle, share: list[tuple[GenerationRequest, asyncio.Future[Sequence[Completion]]]]
    ) -> None:
        try:
            (results,) = await self._group.ask("generate", {handle.rank: ([request for request, _ in share],)})
        except Exception as error:  # noqa: BLE001  the callers raise it
            for _, answer in share:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), completions in zip(share, results, strict=True):
            if not answer.done():
                answer.set_result(completions)
