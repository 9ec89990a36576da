"""Programs that serve until a signal ends them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def until_signalled() -> AsyncIterator[None]:
    """Enter at once; leave only after SIGINT or SIGTERM, also one that came while the body ran."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
            stack.callback(loop.remove_signal_handler, number)
        yield
        await ended.wait()
