"""Runs reward functions off the event loop: blocking ones in threads, the user's ``async`` ones on a separate loop.

Threads that compute in Python take turns with the event loop's, which so many of them would starve: beside 64 it gets
its turn every half second (bench/reward_threads.py). So few that compute run at once, and any number that wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from functools import cache
from typing import TypeVar
from weakref import WeakKeyDictionary

from rl_megatron.errors import RewardError
from rl_megatron.rewards.scoring import queued
from rl_megatron.user_code import describe_error

T = TypeVar("T")

MOST_COMPUTING = 2  # threads: one that computes without Python's lock leaves a place to one with it
_LOOK_SECONDS = 0.02
_COMPUTES = 0.1  # the share of a processor that a thread takes, or wants
_IDLE_LOOKS = 10  # after which a thread counts as waiting although another computes
_MOST_AT_ONCE = 64  # threads that are started between two looks, once all were seen to wait


async def in_daemon_thread(call: Callable[[], T]) -> T:
    """Run ``call`` in its own thread, once fewer than ``MOST_COMPUTING`` others compute. Exceptions that would end an
    event loop become a RewardError.

    Cancelling stops the waiting, not the thread, which no longer counts. It is a daemon, unlike the threads of
    ``asyncio.to_thread``: a reward that never returns must not keep the process alive.
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

    thread = threading.Thread(target=work, name="reward", daemon=True)
    places = _places.setdefault(loop, _Places())
    try:
        with queued():
            await places.enter(thread)
        return await future
    finally:
        places.leave(thread)


class _Places:
    """Admits threads of one event loop."""

    def __init__(self) -> None:
        self._running: dict[threading.Thread, _Use] = {}
        self._waiting: deque[tuple[threading.Thread, asyncio.Future[None]]] = deque()
        self._look: asyncio.TimerHandle | None = None
        self._places, self._enough = MOST_COMPUTING, 1

    async def enter(self, thread: threading.Thread) -> None:
        """Start the thread, after those that came before it."""
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.append((thread, admitted))
        self._admit()
        await admitted

    def leave(self, thread: threading.Thread) -> None:
        """It has ended, or nothing waits for it any longer."""
        self._running.pop(thread, None)
        self._admit()

    def _admit(self) -> None:
        computing = sum(use.idle < self._enough for use in self._running.values())
        while self._waiting and computing < self._places:
            thread, admitted = self._waiting.popleft()
            if admitted.done():  # cancelled
                continue
            thread.start()
            self._running[thread] = _Use(thread)
            admitted.set_result(None)
            computing += 1
        if self._waiting and self._look is None:
            self._look = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._measure)

    def _measure(self) -> None:
        self._look = None
        for use in self._running.values():
            use.look()
        active = any(not use.idle for use in self._running.values())
        self._enough = _IDLE_LOOKS if active else 1
        self._places = MOST_COMPUTING if active else min(2 * self._places, _MOST_AT_ONCE)
        self._admit()


class _Use:
    """Whether a thread computes. It does while it runs or waits for a processor, by the kernel's account.

    One that waits for Python's lock looks idle, too, but then another computes.
    """

    def __init__(self, thread: threading.Thread) -> None:
        self.idle = 0  # looks in a row
        self._file = f"/proc/self/task/{thread.native_id}/schedstat"
        self._at, self._used = time.monotonic_ns(), 0

    def look(self) -> None:
        """Count one more look in ``idle`` if the thread has not computed since the last, else set it to 0."""
        now = time.monotonic_ns()
        try:
            with open(self._file) as file:
                used = sum(map(int, file.read().split()[:2]))  # nanoseconds on a processor, and in its queue
        except OSError:  # it has ended, or this kernel does not say: then none counts
            used = self._used
        self.idle = 0 if used - self._used >= _COMPUTES * (now - self._at) else self.idle + 1
        self._at, self._used = now, used


_places: WeakKeyDictionary[asyncio.AbstractEventLoop, _Places] = WeakKeyDictionary()


async def on_loop_apart(call: Callable[[], Coroutine[None, None, T]]) -> T:
    """Run the coroutine of ``call`` on the event loop of a daemon thread that all ``async`` rewards share.

    Cancelling stops the waiting at once and cancels the coroutine without waiting for its end. A coroutine that blocks
    or exits delays only other ``async`` rewards.
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
