"""Times the controller's event loop, and ends a run whose loop, or a thread that waits for a file, stands still."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

from launcher.processes import stacks
from rl_megatron.config.run import RunConfig
from rl_megatron.files import InHand, in_hand

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.02
_LAST_SECONDS = 5.0  # for the stacks and the reason, before the process ends


class LoopWatch:
    """Watches the event loop that makes it from a thread, because a call that blocks it stops everything.

    It ends the process, and with it the children, if the loop is blocked for ``run.watchdog_seconds``, or if any thread
    waits for a file (`in_hand`) for ``run.watchdog_disk_seconds``. A call that holds Python's lock keeps the thread
    from running, too: after so much processor time the kernel sends SIGPROF, at which C code writes the stacks.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self._limit, self._disk_limit = config.watchdog_seconds, config.run.watchdog_disk_seconds
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder
        self._stacks = (folder / "controller.txt").open("a")  # now, as C code can open none
        faulthandler.register(signal.SIGPROF, file=self._stacks, all_threads=True, chain=True)
        self._loop, self._thread_of_loop = asyncio.get_running_loop(), threading.get_ident()
        self._ticked, self._over = threading.Event(), threading.Event()
        self._tick()
        self._watching = threading.Thread(target=self._watch, name="loop watch", daemon=True)
        self._watching.start()

    def begin(self) -> None:
        """Leaves the modules and data that are there out of garbage collections.

        A full collection over some 200,000 objects holds the loop for 0.1 s.
        """
        gc.freeze()

    def stop(self) -> None:
        """Stops watching, before the loop ends."""
        self._timer.cancel()
        self._over.set()
        self._watching.join()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        faulthandler.unregister(signal.SIGPROF)
        self._stacks.close()
        stacks.tidy(self._folder)
        gc.unfreeze()

    def _tick(self) -> None:
        self._ticked.set()
        self._timer = self._loop.call_later(_TICK_SECONDS, self._tick)

    def _watch(self) -> None:
        """Counts seconds instead of reading a clock, so that a run that is suspended as a whole does not hang."""
        still, waits = 0, dict[InHand, int]()
        while max(waits.values(), default=0) <= self._disk_limit and still <= self._limit:
            signal.setitimer(signal.ITIMER_PROF, self._limit)
            if self._over.wait(1.0):
                return
            waiting = in_hand()
            waits = {file: waits.get(file, 0) + 1 for file in waiting.values()}
            still = 0 if self._ticked.is_set() or self._thread_of_loop in waiting else still + 1
            self._ticked.clear()
        self._end(None if still > self._limit else max(waits, key=lambda file: waits[file]))

    def _end(self, file: InHand | None) -> NoReturn:
        last = threading.Thread(target=self._write_end, args=(file,), daemon=True)  # its disk may never answer
        last.start()
        last.join(_LAST_SECONDS)
        os._exit(1)

    def _write_end(self, file: InHand | None) -> None:
        """Python's lock is free while a write waits for a disk, unlike in C code that writes stacks."""
        with open(os.memfd_create("stacks"), "w+") as memory:
            faulthandler.dump_traceback(memory, all_threads=True)
            memory.seek(0)
            written = memory.read()
        text = (
            f"the controller's event loop has been blocked for {self._limit:g} s (run.watchdog_seconds): it is at "
            f"{stacks.of_thread(self._thread_of_loop).place}\n  no code on the event loop may block"
            if file is None
            else f"the controller has waited for a file for {self._disk_limit:g} s (run.watchdog_disk_seconds)\n  the "
            f"file system does not answer for {file.path}"
        )
        text += f"\n  stacks: {self._folder / 'controller.txt'}"
        print(f"error: {text}", file=sys.stderr, flush=True)
        self._stacks.write(written)
        self._stacks.flush()
        logger.error("the run ends: %s", text)
