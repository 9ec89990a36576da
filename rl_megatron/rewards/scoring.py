"""Calls a reward function within a time limit, and returns its failures as results instead of raising.

The limit does not run while all parts of the call wait for resources that other groups use (`paused_while_queued`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from types import TracebackType
from typing import Self

from rl_megatron.interfaces import LARGEST_REWARD, RewardFunction
from rl_megatron.types import Completion, Prompt, RewardResult
from rl_megatron.user_code import describe_error

ABSTAINS = RewardResult(total=math.nan, abstains=True)
_MOST_NAMED = 3  # the most distinct errors that a message names


async def score(
    function: RewardFunction, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str], *, limit: float
) -> tuple[RewardResult, ...]:
    """Calls ``function``, and waits at most ``limit`` seconds (reward.timeout_seconds), without those in
    `paused_while_queued`.

    A completion without a finite reward gets the total NaN and an ``error`` with the reason. If ``function`` raises or
    is ``late``, all completions get the same error.
    """
    try:
        async with CallLimit(limit) as time:
            given = await function(prompt, completions, texts)
        return tuple(_finite(i, one) for i, (one, _) in enumerate(zip(given, completions, strict=True)))
    except Exception as error:  # noqa: BLE001  any exception is named and counted
        late = isinstance(error, TimeoutError) and time.expired()
        problem = f"no answer within reward.timeout_seconds={limit:g}" if late else describe_error(error)
        return (RewardResult(total=math.nan, error=problem, late=late),) * len(completions)


def distinct_errors(scored: Sequence[RewardResult]) -> list[str]:
    """Returns the first distinct errors of one prompt's completions, and the number of the others."""
    named = list(dict.fromkeys(one.error for one in scored if one.error is not None))
    more = [f"so did {len(named) - _MOST_NAMED} more"] if len(named) > _MOST_NAMED else []
    return named[:_MOST_NAMED] + more


def _finite(index: int, one: RewardResult) -> RewardResult:
    """Adds an error if the total of completion ``index`` is not finite, or too large; it names the parts that are not
    finite."""
    if abs(one.total) <= LARGEST_REWARD:
        return one
    if math.isfinite(one.total):
        said = f"completion {index} got {one.total}, which is beyond {LARGEST_REWARD:g}"
        return replace(one, total=math.nan, error=said)
    if one.abstains:
        return replace(
            one, total=math.nan, error=f"completion {index} got no reward: the function, or every part, abstains"
        )
    parts = [f"{name}: {value}" for name, value in one.parts.items() if not math.isfinite(value)]
    named = f" ({', '.join(parts)})" if parts else ""
    return replace(one, total=math.nan, error=f"completion {index} got {one.total}, which is not finite{named}")


class CallLimit:
    """A timeout of a reward's call, on one event loop, that runs while any part of the call does: not while all of them
    are `paused_while_queued`."""

    def __init__(self, seconds: float) -> None:
        self._timeout = asyncio.timeout(seconds)
        self._left, self._running, self._over = seconds, 1, False

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._before = _limit.set(self)
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        _limit.reset(self._before)
        await self._timeout.__aexit__(kind, error, trace)

    @property
    def runs(self) -> bool:
        """True if a part of the call does not wait."""
        return self._running > 0

    def expired(self) -> bool:
        """True if the limit has ended the call."""
        return self._timeout.expired()

    def count(self, parts: int) -> None:
        """Changes the number of running parts of the call by ``parts``. It has no effect after the call's end."""
        ran, self._running = self.runs, self._running + parts
        if ran == self.runs or self._over or self.expired():
            return
        if ran:
            self._left = (self._timeout.when() or 0.0) - self._loop.time()
        self._timeout.reschedule(None if ran else self._loop.time() + self._left)

    def counts_here(self) -> bool:
        """True on the call's event loop, not on another one that runs a part of it."""
        return asyncio.get_running_loop() is self._loop


_limit: ContextVar[CallLimit | None] = ContextVar("limit of the reward that is being called", default=None)


@contextlib.contextmanager
def paused_while_queued() -> Iterator[Callable[[], None]]:
    """Context in which the caller, a part of a reward's call, waits for others, until it exits or calls the value."""
    with _counted(-1) as begun:
        yield begun


@contextlib.contextmanager
def counted_call() -> Iterator[None]:
    """Makes the caller one more part of a reward's call, which may wait for it in `paused_while_queued`."""
    with _counted(1):
        yield


@contextlib.contextmanager
def _counted(parts: int) -> Iterator[Callable[[], None]]:
    limit = _limit.get()
    if limit is None or not limit.counts_here():
        yield lambda: None
        return
    limit.count(parts)
    counted = [limit]

    def back_from_queue() -> None:
        if counted:
            counted.pop().count(-parts)

    try:
        yield back_from_queue
    finally:
        back_from_queue()


@contextlib.asynccontextmanager
async def queued_slot(slots: asyncio.Semaphore | asyncio.Lock) -> AsyncIterator[None]:
    """Context like ``async with slots`` that waits for a slot in `paused_while_queued`."""
    with paused_while_queued() as begun:
        async with slots:
            begun()
            yield
