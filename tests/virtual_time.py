"""An event loop whose clock jumps to the next timer, so that hours of waiting pass at once and the same each time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


_THREAD_SECONDS = 60.0


class NothingToWaitFor(Exception):
    """No task can go on, no timer runs, and no thread, or one for too long."""


class _Jumps(selectors.SelectSelector):
    now, threads = 0.0, 0

    def select(self, timeout: float | None = None) -> list[Any]:
        if self.threads and timeout != 0:  # a thread takes none of the loop's time
            if events := super().select(_THREAD_SECONDS):
                return events
            raise NothingToWaitFor
        if timeout is None:
            raise NothingToWaitFor
        self.now += timeout
        return []


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        self._jumps.threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _: object) -> None:
        self._jumps.threads -= 1


def run_at_once(main: Coroutine[Any, Any, T]) -> T:
    """The result of ``main``, none of whose waits takes time. Raises NothingToWaitFor where it would wait for ever."""
    loop = _Loop()
    try:
        return loop.run_until_complete(main)
    finally:
        for task in (left := asyncio.all_tasks(loop)):
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()
