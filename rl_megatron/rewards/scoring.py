"""Calls a reward function within a time limit, and returns its failures as results instead of raising.

The limit does not run while the call waits behind other groups for what they share (`queued`).
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
from rl_megatron.types import Completion, Prompt, Scored
from rl_megatron.user_code import describe_error

_MOST_NAMED = 3  # completions without a finite reward that a message names


async def score(
    function: RewardFunction,
    prompt: Prompt,
    completions: Sequence[Completion],
    texts: Sequence[str],
    *,
    limit: float,
) -> tuple[Scored, ...]:
    """Call ``function``, and wait at most ``limit`` seconds (reward.timeout_seconds), beside those in `queued`.

    A completion without a finite reward gets the total NaN and an ``error`` that says why. If ``function`` raises or is
    ``late``, all completions get the same error.
    """
    try:
        async with CallLimit(limit) as time:
            given = await function(prompt, completions, texts)
        return tuple(_finite(i, one) for i, (one, _) in enumerate(zip(given, completions, strict=True)))
    except Exception as error:  # noqa: BLE001  any exception is named and counted
        late = isinstance(error, TimeoutError) and time.expired()
        problem = f"no answer within reward.timeout_seconds={limit:g}" if late else describe_error(error)
        return (Scored(total=math.nan, error=problem, late=late),) * len(completions)


def errors_of(scored: Sequence[Scored]) -> list[str]:
    """The distinct errors of one prompt's completions, and how many more there are than are shown."""
    named = list(dict.fromkeys(one.error for one in scored if one.error is not None))
    more = [f"so did {len(named) - _MOST_NAMED} more"] if len(named) > _MOST_NAMED else []
    return named[:_MOST_NAMED] + more


def _finite(index: int, one: Scored) -> Scored:
    """Add an error if the total of completion ``index`` is not finite, or too large; it names the parts that are not
    finite."""
    if abs(one.total) <= LARGEST_REWARD:
        return one
    if math.isfinite(one.total):
        said = f"completion {index} got {one.total}, which is beyond {LARGEST_REWARD:g}"
        return replace(one, total=math.nan, error=said)
    parts = [f"{name}: {value}" for name, value in one.parts.items() if not math.isfinite(value)]
    named = f" ({', '.join(parts)})" if parts else ""
    return replace(one, total=math.nan, error=f"completion {index} got {one.total}, which is not finite{named}")


class CallLimit:
    """``asyncio.timeout(seconds)`` that leaves out the time in `queued`. Of one event loop."""

    def __init__(self, seconds: float) -> None:
        self._timeout = asyncio.timeout(seconds)
        self._left, self._queued = seconds, 0

    async def __aenter__(self) -> Self:
        self._before = _limit.set(self)
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _limit.reset(self._before)
        await self._timeout.__aexit__(kind, error, trace)

    @property
    def runs(self) -> bool:
        """Whether no part of the call waits."""
        return not self._queued

    def expired(self) -> bool:
        """Whether the limit has ended the call."""
        return self._timeout.expired()

    def stop(self) -> None:
        """A part of the call begins to wait."""
        if not self._queued and not self.expired():
            self._left = (self._timeout.when() or 0.0) - asyncio.get_running_loop().time()
            self._timeout.reschedule(None)
        self._queued += 1

    def go_on(self) -> None:
        """A part has its turn; the limit goes on once none waits."""
        self._queued -= 1
        if not self._queued and not self.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._left)


_limit: ContextVar[CallLimit | None] = ContextVar("limit of the reward that is being called", default=None)


@contextlib.contextmanager
def queued() -> Iterator[Callable[[], None]]:
    """The caller waits until it calls what it gets, or leaves: the limit of the reward's call that it belongs to, if
    any, does not run. From that call's event loop alone."""
    limit = _limit.get()
    if limit is None:
        yield lambda: None
        return
    limit.stop()
    waits = [limit]

    def begun() -> None:
        if waits:
            waits.pop().go_on()

    try:
        yield begun
    finally:
        begun()


@contextlib.asynccontextmanager
async def turn_of(slots: asyncio.Semaphore | asyncio.Lock) -> AsyncIterator[None]:
    """``async with slots``, which it waits for as `queued`."""
    with queued():
        await slots.acquire()
    try:
        yield
    finally:
        slots.release()
