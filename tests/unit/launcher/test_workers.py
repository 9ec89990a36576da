"""The controller's end of a rank: what it counts as silence."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, cast

from launcher import messages
from launcher.rank_models import Setup
from launcher.workers import Ending, Failure, WorkerHandle


class _Process:
    """A rank's process that is no more than its stream."""

    role, rank, where = "policy", 0, "pid 1"

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def ending(self, hung_up: threading.Event) -> Ending:
        hung_up.wait()
        return Ending(how="ended", expected=True, killed=False)

    def wake(self) -> None: ...

    def kill(self) -> None: ...

    def join(self, seconds: float) -> bool:
        return True


def _with_a_rank(check: Callable[[WorkerHandle, Connection], Coroutine[Any, Any, None]]) -> None:
    """Have ``check`` use both ends of a rank's stream."""

    async def main() -> None:
        ours, theirs = Pipe()
        handle = WorkerHandle(_Process(ours), Failure(), None)
        try:
            await check(handle, theirs)
        finally:
            theirs.close()
            handle.stop()

    asyncio.run(main())


async def _answered(answer: asyncio.Future[Any], rank: Connection) -> None:
    messages.receive(rank)
    messages.send(rank, messages.pack(("ok", None)))
    await answer


def test_only_a_rank_that_was_asked_can_make_no_progress() -> None:
    """A rollout by servers or a slow reward leaves the learner's ranks without work for as long as it takes."""

    async def check(handle: WorkerHandle, rank: Connection) -> None:
        await _answered(handle.prepare(cast(Setup, None)), rank)
        for _ in range(1000):
            handle.tick()
        assert handle.still == 0
        assert handle.quiet == 1000
        answer = handle.call("train_step")
        handle.tick()
        assert handle.still == 1
        await _answered(answer, rank)
        handle.tick()
        assert handle.still == 0

    _with_a_rank(check)
