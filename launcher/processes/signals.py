"""Programs that serve until a signal ends them."""

from __future__ import annotations

import asyncio
import contextlib
import signal


async def signalled() -> None:
    """Return at the first SIGINT or SIGTERM."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
            stack.callback(loop.remove_signal_handler, number)
        await ended.wait()
