"""A thread that makes all calls of one library, in order; the process does not wait for it to end."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def run_in_own_thread(name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Makes one call in a thread of its own. Neither a cancellation nor the end of the process waits for it, unlike for
    a thread of ``asyncio.to_thread``."""
    thread = DedicatedThread(name)
    try:
        return await thread(function, *args, **kwargs)
    finally:
        thread.close()


class DedicatedThread:
    """Makes calls in order. Unlike an executor's, a call that never returns does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs the function in the thread. Cancellation stops the waiting, not the call."""
        future: Future[T] = Future()
        self._calls.put((future, functools.partial(function, *args, **kwargs)))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Ends the thread after the calls already made."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001  it is the caller's
                future.set_exception(error)
