"""An event loop whose clock jumps to the next timer, so that hours of waiting pass at once and the same each time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NothingToWaitFor(Exception):
    """No task can go on, and no timer runs."""


class _Jumps(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise NothingToWaitFor
        self.now += timeout
        return []


class _Loop(asyncio.SelectorEventLoop):
    """What is for a thread is called at once: it takes none of the loop's time."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  the future raises it
            future.set_exception(error)
        return future


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
