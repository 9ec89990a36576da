"""Ties a process to its parent by the kernel's prctl (Linux).

Programs that serve until a signal ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import AsyncIterator

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when ``parent``, its own, dies; if that is dead already, it ends at once."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents end."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


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
