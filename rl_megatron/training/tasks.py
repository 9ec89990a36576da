"""Asks several models at once, and ends work when a stop is requested before there is anything to save."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Self, TypeVar

from rl_megatron.errors import Stopped
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.observability.timeline import spans

T = TypeVar("T")


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``. If ``stop`` is set first, cancels ``work``, waits for its end and raises Stopped."""
    task, asked = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            raise Stopped("stopped before the first step")
        return task.result()
    finally:
        asked.cancel()
        task.cancel()
        await asyncio.wait({task, asked})
        if not task.cancelled():
            task.exception()  # nothing reads an error of the cancelled work


async def uncut(work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``. A cancellation is raised once it has ended: in it, processes wait for each other."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    finally:
        await asyncio.wait({task})


class AtOnce:
    """Asks several models concurrently; models that share processes answer one after the other, in the order asked.

    A phase counts only the seconds spent waiting for it, so that phases add up to the time that passed.
    """

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> Self:
        return self

    def begin(self, phase: str, question: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start ``question`` after the questions already begun."""
        task = asyncio.create_task(question, name=phase)
        self._tasks.append(task)
        return task

    async def end(self, task: asyncio.Task[T]) -> T:
        """Wait for the answer, and count the wait for its phase."""
        with self._watch(task.get_name()):
            return await task

    async def end_shared(self, task: asyncio.Task[T], seconds: Callable[[T], Mapping[str, float]]) -> T:
        """Wait for the answer, and count the wait for the phases of which it tells the ``seconds``, in proportion."""
        began = spans.now()
        said = await task
        self._watch.share(began, seconds(said))
        return said

    async def __aexit__(self, *_: object) -> None:
        """Cancel what is not finished; errors of other models would have the same cause."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
