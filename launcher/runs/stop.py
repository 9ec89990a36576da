"""Turns Ctrl-C, SIGTERM and a scheduler's SIGUSR1 into a request to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator

from rl_megatron.observability.progress import Progress

_COME_BACK = signal.SIGUSR1
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal(asyncio.Event):
    """When set, the current step is the last; before the first step, none begins.

    ``comes_back``: the run will be resumed, as only this job's time is up. ``exports``: stopped, it exports its model.
    """

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self.comes_back, self.exports = False, True
        self._report: asyncio.Event | None = None

    @contextlib.contextmanager
    def reporting(self) -> Iterator[asyncio.Event]:
        """Yields an event that signals set while the context is open: no step is left to finish."""
        self._report = asyncio.Event()
        try:
            yield self._report
        finally:
            self._report = None

    def request(self, by: str) -> None:
        """Stops after this step, because of the signal ``by``."""
        if self._report is not None:
            self._report.set()
            return
        if not self.is_set():
            self._progress.note(f"{by}: finishing and saving the current step; press Ctrl-C again to stop immediately")
        if by == _COME_BACK.name:
            self.comes_back, self.exports = True, False
        self.set()

    def forward(self, by: str) -> None:
        """Stops because of a signal to a job's ranks. After SIGTERM, also at scancel, Slurm soon ends the job."""
        self.exports &= by != signal.SIGTERM.name
        self.request(by)


@contextlib.contextmanager
def stop_signals(progress: Progress) -> Iterator[StopSignal]:
    """Yields a StopSignal that Ctrl-C, SIGTERM and SIGUSR1 set. A second Ctrl-C interrupts immediately."""
    stop, loop, interrupted = StopSignal(progress), asyncio.get_running_loop(), asyncio.Event()

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def ask(name: str) -> Callable[[], None]:
        def handle() -> None:
            if interrupted.is_set():  # this one, while the loop was held up
                return
            if stop.is_set() and name == signal.SIGINT.name:  # both came while it was
                interrupt()
            stop.request(name)
            signal.signal(signal.SIGINT, interrupt)  # the next one does not wait for the loop

        return handle

    for signum in _SIGNALS:
        loop.add_signal_handler(signum, ask(signum.name))
    come_back = ask(_COME_BACK.name)
    signal.signal(_COME_BACK, lambda *_: loop.call_soon_threadsafe(come_back))
    try:
        yield stop
    finally:
        # A job's script sends it until the run has ended, and asyncio would let it kill a run that is at its end.
        signal.signal(_COME_BACK, signal.SIG_IGN)
        for signum in _SIGNALS:
            loop.remove_signal_handler(signum)
