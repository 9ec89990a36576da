"""Runs scorers off the event loop: blocking ones in threads, the user's ``async`` ones on a separate loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from functools import cache
from typing import TypeVar

from rl_megatron.errors import RewardError
from rl_megatron.user_code import describe_error

T = TypeVar("T")


async def in_daemon_thread(call: Callable[[], T]) -> T:
    """Run ``call`` in its own thread. Exceptions that would end an event loop become a RewardError.

    Cancelling stops the waiting, not the thread. It is a daemon, unlike the threads of ``asyncio.to_thread``: a scorer
    that never returns must not keep the process alive.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if future.done():  # cancelled meanwhile
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # T may be None itself

    def work() -> None:
        try:
            outcome: tuple[T | None, Exception | None] = (call(), None)
        except BaseException as error:  # noqa: BLE001  raised again where it is awaited
            outcome = (None, _passable(error))
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return await future


async def on_loop_apart(call: Callable[[], Coroutine[None, None, T]]) -> T:
    """Run the coroutine of ``call`` on the event loop of a daemon thread that all ``async`` scorers share.

    Cancelling stops the waiting at once and cancels the coroutine without waiting for its end. A coroutine that blocks
    or exits delays only other ``async`` scorers.
    """

    async def outcome() -> tuple[T | None, Exception | None]:
        try:
            return await call(), None
        except BaseException as error:  # noqa: BLE001  raised again where it is awaited
            return None, _passable(error)

    running = asyncio.run_coroutine_threadsafe(outcome(), _loop_apart())
    result, error = await asyncio.wrap_future(running)
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # T may be None itself


def _passable(error: BaseException) -> Exception:
    """The error, or a RewardError in place of one that a future cannot hold or that would end the awaiting task."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RewardError(describe_error(error))


@cache
def _loop_apart() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def turn() -> None:
        while not loop.is_closed():
            with contextlib.suppress(BaseException):  # the user's task may exit
                loop.run_forever()

    threading.Thread(target=turn, name="rewards' loop", daemon=True).start()
    return loop
