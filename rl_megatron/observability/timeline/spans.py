"""Keeps what this process did, as spans of time, until they are taken: the controller writes them into the run's
folder, a rank sends them with its answers. It is always on; bench/timeline.py measures what a span costs.

Times are nanoseconds of ``now``, this machine's monotonic clock. Any thread may keep a span.

Estimates how far another process's clock is from this one's, from the times of its calls and answers.

As NTP does (RFC 5905, section 8), but without its assumption that both ways take equally long: a delay is positive, so
each message bounds the difference from one side, and the truth is inside all bounds, whatever the network does.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Self

DRIFT = 1e-4  # seconds a second between two machines' clocks: twice 50 ppm, what a computer's quartz keeps


class Clock:
    """The other clock's difference to ours, in nanoseconds: ours = theirs + ``offset``.

    When the latest answer was here, that is at most ``bound`` wrong.
    """

    def __init__(self) -> None:
        self._low: float | None = None
        self._high, self._at = 0.0, 0

    @property
    def offset(self) -> int:
        """The middle of the bounds; 0 before the first exchange."""
        return 0 if self._low is None else round((self._low + self._high) / 2)

    @property
    def bound(self) -> int | None:
        """Half of what is between the bounds; None before the first exchange."""
        return None if self._low is None else round((self._high - self._low) / 2)

    def exchanged(self, *, asked: int, arrived: int, answered: int, heard: int) -> None:
        """A call left here at ``asked`` and was there at ``arrived``; its answer left at ``answered`` and was here at
        ``heard``. The first and the last are of our clock, the others of theirs.

        Bounds that are older widen by what two clocks drift. If new ones contradict them, a clock was set: these count.
        """
        low, high = asked - arrived - DRIFT * (heard - asked), float(heard - answered)
        if self._low is not None:
            drift = DRIFT * max(0, heard - self._at)
            old_low, old_high = self._low - drift, self._high + drift
            if max(low, old_low) <= min(high, old_high):
                low, high = max(low, old_low), min(high, old_high)
        self._low, self._high, self._at = low, high, heard


MOST = 200_000  # spans in memory; the oldest go first
now = time.perf_counter_ns
SpanDetails = Mapping[str, str | int | float]


class Lane:
    """A row of the timeline: a thread of a process, by the names that are shown, and its clock if that is another's.

    Without a thread it is for values of the process (`gauge`).
    """

    __slots__ = ("clock", "process", "thread")

    def __init__(self, process: str, thread: str, clock: Clock | None = None) -> None:
        self.process, self.thread, self.clock = process, thread, clock


KeptSpan = tuple[Lane, str, int, int, SpanDetails | None]
"""Lane, name, begin and end, and what else is said of it. Those of a lane are nested or apart.

Of values: their lane has no thread, begin and end are equal, and ``said`` has them by name."""

STEPS, PHASES, PUSHES, SAVES = (Lane("controller", thread) for thread in ("steps", "phases", "pushes", "saves"))
_kept: deque[KeptSpan] = deque(maxlen=MOST)
_lost = 0


def keep(lane: Lane, name: str, begin: int, end: int, said: SpanDetails | None = None) -> None:
    """Keep a span that has ended."""
    global _lost
    if len(_kept) == MOST:
        _lost += 1
    _kept.append((lane, name, begin, end, said))


def gauge(process: Lane, name: str, **values: int | float) -> None:
    """Keep what ``values`` are now, of a lane without a thread: each is drawn as a line, ``name`` before its own."""
    at = now()
    keep(process, name, at, at, values)


def taken() -> tuple[list[KeptSpan], int]:
    """The spans since the last call, in the order of their ends, and how many were lost as memory holds ``MOST``."""
    global _lost
    lost, _lost = _lost, 0
    return [_kept.popleft() for _ in range(len(_kept))], lost


class during:  # noqa: N801  used as a function
    """Keeps the time inside as a span: ``with spans.during(lane, "push", version=3): …``. An error ends it, too."""

    __slots__ = ("_begin", "_lane", "_name", "_said")

    def __init__(self, lane: Lane, name: str, **said: str | int | float) -> None:
        self._lane, self._name, self._said = lane, name, said

    def say(self, **said: str | int | float) -> None:
        """Add what is known only at the end."""
        self._said |= said

    def __enter__(self) -> Self:
        self._begin = now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._said["error"] = kind.__name__
        keep(self._lane, self._name, self._begin, now(), self._said or None)


class FreeLanes:
    """Lanes of a process for what overlaps, as generations do: each takes the lowest free lane, so there are as many as
    ran at once. The event loop's thread alone uses it."""

    def __init__(self, process: str, thread: str) -> None:
        self._process, self._thread = process, thread
        self._free: list[int] = []
        self._lanes: list[Lane] = []

    def during(self, name: str, **said: str | int | float) -> _InSlot:
        """As ``during``, in a lane of its own."""
        return _InSlot(self, name, said)

    def take(self) -> int:
        """The number of a lane that is free from now on to `give`."""
        if self._free:
            return heapq.heappop(self._free)
        self._lanes.append(Lane(self._process, f"{self._thread} {len(self._lanes)}"))
        return len(self._lanes) - 1

    def give(self, number: int) -> Lane:
        """Free a lane, which is returned."""
        heapq.heappush(self._free, number)
        return self._lanes[number]


class _InSlot:
    __slots__ = ("_begin", "_name", "_number", "_said", "_slots")

    def __init__(self, slots: FreeLanes, name: str, said: dict[str, str | int | float]) -> None:
        self._slots, self._name, self._said = slots, name, said

    def say(self, **said: str | int | float) -> None:
        """Add what is known only at the end."""
        self._said |= said

    def __enter__(self) -> Self:
        self._number, self._begin = self._slots.take(), now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._said["error"] = kind.__name__
        end = now()
        keep(self._slots.give(self._number), self._name, self._begin, end, self._said or None)
