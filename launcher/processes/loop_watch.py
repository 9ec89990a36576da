"""Watches the controller's own event loop from a thread, and times its turns."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from typing_extensions import override

from launcher.processes import stacks
from launcher.processes.stacks import Stack
from rl_megatron.config.run import RunConfig
from rl_megatron.durable import InHand, in_hand

logger = logging.getLogger(__name__)

LONG_SECONDS = 0.2
_LOOK_SECONDS = 0.05
_LOOKS = 20  # between two messages to the loop. They are counted: a run that is suspended as a whole does not hang
_LAST_SECONDS = 5.0  # for the stacks and the reason, before the process ends
_FRAMES = 8  # of a stack that is logged
_GROWN = 2.0  # a place that has been reported is reported again once it takes so many times as long


class TimedLoop(asyncio.SelectorEventLoop):
    """An event loop that knows how long its turns take, in which nothing else is served."""

    def __init__(self) -> None:
        self.turns = _Turns()
        super().__init__(self.turns)


class _Turns(selectors.DefaultSelector):
    """A turn is the time between two looks at the streams."""

    longest = 0.0  # seconds
    began: float | None = None  # of the turn under way; None while the loop waits
    long: Callable[[float, float], None] | None = None  # called with the beginning and the seconds of a long one

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        began, self.began = self.began, None
        if began is not None:
            seconds = time.monotonic() - began
            self.longest = max(self.longest, seconds)
            if seconds > LONG_SECONDS and self.long is not None:
                self.long(began, seconds)
        found = super().select(timeout)
        self.began = time.monotonic()
        return found


class LoopWatch:
    """Watches the `TimedLoop` that runs it from a thread, because a call that blocks it stops everything.

    From `begin` on, what blocks it for more than ``LONG_SECONDS`` is logged with its stack. What blocks it for
    ``run.watchdog_seconds`` may never return, so this then ends the process, and with it the children; where it waits
    for a file (`in_hand`), after ``run.watchdog_disk_seconds``, and so where another thread does: the loop turns, but
    the run may wait for it. A call that holds Python's lock keeps the thread from running, too: after so much of its
    processor time the kernel sends SIGPROF, at which C code writes the stacks and the process ends.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self._limit, self._disk_limit = config.watchdog_seconds, config.run.watchdog_disk_seconds
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        self._stacks = (folder / "controller.txt").open("a")  # now, as C code can open none
        faulthandler.register(signal.SIGPROF, file=self._stacks, all_threads=True, chain=True)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, TimedLoop)
        self._loop, self._turns, self._of_loop = loop, loop.turns, threading.get_ident()
        self._held = 0.0  # seconds: the longest that no thread could run
        self._seen: tuple[float, Stack] | None = None  # a long turn's beginning, and where it was
        self._spent = _spent()
        self._said: dict[str, float] = {}  # seconds by place, of what was logged
        self._beat, self._over = threading.Event(), threading.Event()
        self._begun = False
        self._watching = threading.Thread(target=self._watch, name="loop watch", daemon=True)
        self._watching.start()

    def begin(self) -> None:
        """Measure from here on. Before, imports in threads hold Python's lock, and nothing waits for the loop.

        What is there by now, modules and data, stays: left out of garbage collections, of which a full one over some
        200,000 objects holds the loop for 0.1 s.
        """
        gc.freeze()
        self._begun, self._turns.long = True, self._long
        self._turns.longest = self._held = 0.0

    def stop(self) -> None:
        """Stop watching, before the loop ends."""
        self._turns.long = None
        self._over.set()
        self._watching.join()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        faulthandler.unregister(signal.SIGPROF)
        self._stacks.close()
        stacks.tidy(self._folder)
        gc.unfreeze()

    def row(self) -> dict[str, float]:
        """The metric of the time since the last call. Called in the loop."""
        assert self._turns.began is not None
        longest = max(self._turns.longest, self._held, time.monotonic() - self._turns.began)
        self._turns.longest = self._held = 0.0
        return {"loop/longest_ms": longest * 1e3}

    def _watch(self) -> None:
        still = stalled = looks = 0
        waits: dict[InHand, int] = {}  # seconds, of other threads than the loop's
        while still <= self._limit and max((stalled, *waits.values())) <= self._disk_limit:
            if looks % _LOOKS == 0:
                signal.setitimer(signal.ITIMER_PROF, self._limit)
            looked = time.monotonic()
            if self._over.wait(_LOOK_SECONDS):
                return
            self._look(time.monotonic() - looked - _LOOK_SECONDS)
            looks += 1
            if looks % _LOOKS == 0:
                self._spent = _spent()
                if self._beat.is_set():
                    still = stalled = 0
                elif self._of_loop in in_hand():
                    stalled += 1
                else:
                    still += 1
                waits = {one: waits.get(one, 0) + 1 for thread, one in in_hand().items() if thread != self._of_loop}
                self._beat.clear()
                with contextlib.suppress(RuntimeError):  # it is closed, and `stop` follows
                    self._loop.call_soon_threadsafe(self._beat.set)
        if of_loop := still > self._limit or stalled > self._disk_limit:
            file = in_hand().get(self._of_loop) if stalled > self._disk_limit else None
        else:
            file = max(waits, key=lambda one: waits[one])
        self._end(file, of_loop=of_loop)

    def _look(self, late: float) -> None:
        """Remember where a long turn is. ``late``: seconds that this thread could not run, nor could the loop's."""
        began = self._turns.began
        self._held = max(self._held, late)
        if began is not None and time.monotonic() - began > LONG_SECONDS:
            self._seen = (began, stacks.of_thread(self._of_loop))
        elif late > LONG_SECONDS and self._begun:
            spent = _spent()
            busiest = max(spent, key=lambda ident: spent[ident] - self._spent.get(ident, 0.0))
            self._report(late, stacks.of_thread(busiest))

    def _long(self, began: float, seconds: float) -> None:
        self._report(seconds, self._seen[1] if self._seen is not None and self._seen[0] == began else None)

    def _report(self, seconds: float, stack: Stack | None) -> None:
        """Log a place when it is new, or takes much longer than what was logged."""
        place = "a call that held Python's lock, or the machine did not run it" if stack is None else stack.place
        if seconds < _GROWN * self._said.get(place, 0.0):
            return
        self._said[place] = seconds
        frames = "" if stack is None else "".join(f"\n  {frame}" for frame in stack.frames[:_FRAMES])
        logger.warning("the event loop was blocked for %.1f s, and everything waited: %s%s", seconds, place, frames)

    def _end(self, file: InHand | None, *, of_loop: bool) -> NoReturn:
        """``file``: what the loop waits for, if that took its time; or else another thread."""
        last = threading.Thread(target=self._last_words, args=(file, of_loop), daemon=True)
        last.start()
        last.join(_LAST_SECONDS)
        os._exit(1)

    def _last_words(self, file: InHand | None, of_loop: bool) -> None:
        """May take for ever, on the disk that the loop waits for. Python's lock is free meanwhile."""
        with open(os.memfd_create("stacks"), "w+") as memory:
            faulthandler.dump_traceback(memory, all_threads=True)
            memory.seek(0)
            written = memory.read()
        key, limit, why = "run.watchdog_seconds", self._limit, "no code on the event loop may block"
        if file is not None:
            key, limit = "run.watchdog_disk_seconds", self._disk_limit
            why = f"the file system does not answer for {file.path}"
        what = f"event loop has been blocked for {limit:g} s ({key}): it is at {stacks.of_thread(self._of_loop).place}"
        if not of_loop:
            what = f"thread has waited for a file for {limit:g} s ({key})"
        text = f"the controller's {what}\n  {why}\n  stacks: {self._folder / 'controller.txt'}"
        print(f"error: {text}", file=sys.stderr, flush=True)
        self._stacks.write(written)
        self._stacks.flush()
        logger.error("the run ends: %s", text)


def _spent() -> dict[int, float]:
    """CPU seconds of each of Python's threads, by its identifier."""
    spent = {}
    for thread in threading.enumerate():
        with contextlib.suppress(OSError):  # it has just ended
            clock = (~(thread.native_id or 0) << 3) | 6  # Linux: of a thread by its number, also where that has ended
            spent[thread.ident or 0] = time.clock_gettime(clock)
    return spent
