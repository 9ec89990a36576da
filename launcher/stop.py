"""Ctrl-C and SIGTERM, as the trainer sees them: a request to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator

from rl_megatron.observability.progress import Progress


@contextlib.contextmanager
def stop_signals(progress: Progress) -> Iterator[asyncio.Event]:
    """The event that Ctrl-C and SIGTERM set: the step in hand is the last. The next Ctrl-C interrupts at once."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def ask(name: str) -> Callable[[], None]:
        def handle() -> None:
            progress.note(f"{name}: finishing this step and saving; press Ctrl-C again to stop at once")
            stop.set()
            loop.remove_signal_handler(signal.SIGINT)

        return handle

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, ask(signal.Signals(signum).name))
    try:
        yield stop
    finally:
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(signum)
