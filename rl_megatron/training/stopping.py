"""Ends work at once when a stop is requested before there is anything to save."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from rl_megatron.errors import Stopped

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
