"""Watches the controller's own event loop from a thread."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import sys
import threading
from pathlib import Path
from typing import NoReturn

from launcher.processes import stacks
from rl_megatron.config.run import RunConfig

logger = logging.getLogger(__name__)


class LoopWatch:
    """Watches the controller's own event loop from a thread, because a call that blocks it stops everything.

    Such a call may never return, so this ends the process, and with it the children.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self._limit, self._folder = config.watchdog_seconds, folder
        self._loop, self._beat, self._over = asyncio.get_running_loop(), threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="loop watch", daemon=True).start()

    def stop(self) -> None:
        """Stop watching, before the loop ends."""
        self._over.set()

    def _watch(self) -> None:
        still = 0
        while still <= self._limit and not self._over.wait(1.0):
            still = 0 if self._beat.is_set() else still + 1
            self._beat.clear()
            with contextlib.suppress(RuntimeError):  # it is closed, and `stop` follows
                self._loop.call_soon_threadsafe(self._beat.set)
        if not self._over.is_set():
            self._end()

    def _end(self) -> NoReturn:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / "controller.txt"
        with path.open("a") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        stack = stacks.read(path.read_text())
        where = "" if stack is None else f": it is at {stack.place}"
        text = (
            f"the controller's event loop has been blocked for {self._limit:g} s (run.watchdog_seconds){where}\n"
            f"  no code on the event loop may block\n  stacks: {path}"
        )
        logger.error("the run ends: %s", text)
        print(f"error: {text}", file=sys.stderr, flush=True)
        os._exit(1)
