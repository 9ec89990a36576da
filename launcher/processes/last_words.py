"""Forwards a child process's stderr, and keeps the last lines to explain why the process died."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

from rl_megatron.observability.files import text_at_end

_LINES = 8
_LONGEST = 4096  # characters of a line
_DRAIN_SECONDS = 1.0  # its own children may hold the pipe open


class LastWords:
    """The controller's end. The child gets ``theirs``, and makes it its stderr."""

    def __init__(self, who: str) -> None:
        self._ours, self.theirs = multiprocessing.Pipe(duplex=False)
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._heard: Future[None] = Future()  # done once all of it is read
        self._hearing = threading.Thread(target=self._hear, name=f"stderr of {who}", daemon=True)

    def listen(self) -> None:
        """Start reading, after the child was given its end."""
        self.theirs.close()
        self._hearing.start()

    def _hear(self) -> None:
        self._heard.set_running_or_notify_cancel()  # who stops waiting for it must not cancel it
        with os.fdopen(os.dup(self._ours.fileno()), errors="replace") as stream:
            while line := stream.readline(_LONGEST):
                self._lines.append(line)
                with contextlib.suppress(OSError, ValueError):  # our own stderr is closed
                    print(line, end="", file=sys.stderr, flush=True)
        self._ours.close()
        self._heard.set_result(None)

    async def tail(self) -> str:
        """The last lines of an ended child; empty if it wrote none."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(self._heard), _DRAIN_SECONDS)
        return _indented(tuple(self._lines))


def end_of(log: Path, *, lines: int = _LINES) -> str:
    """The last lines of a process's output file, as `text_at_end`; empty if it cannot be read."""
    try:
        return _indented(text_at_end(log).splitlines()[-lines:])
    except OSError:
        return ""


def _indented(lines: Iterable[str]) -> str:
    return "".join(f"\n  {line.rstrip()[:_LONGEST]}" for line in lines if line.strip())
