"""A stop that is asked where there is nothing to save yet: it is obeyed at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from rl_megatron.errors import Stopped

T = TypeVar("T")


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` gives. Raises Stopped once ``stop`` is set, after ``work`` was cancelled and ended."""
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
            task.exception()  # what it met at its end has no reader
