"""Blocking scorers beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(call: Callable[[], T]) -> T:
    """What ``call`` returns or raises, run in a thread of its own.

    Cancelling stops the waiting, not the thread. It is a daemon, unlike those of ``asyncio.to_thread``: a scorer that
    never returns must not keep the process from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():  # cancelled meanwhile
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # T may be None itself

    def work() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = (call(), None)
        except Exception as error:  # noqa: BLE001  # raised again where it is awaited
            outcome = (None, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return await future
