"""Times a Stream: when something is sampled, for how long the learner waits, and how old groups become.

Seconds are those of the event loop's clock, and count since the row before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class StreamTimes:
    """``apart``: whether sampling goes on while the learner trains. Controller process only."""

    def __init__(self, *, apart: bool) -> None:
        self._apart = apart
        self._described: float | None = None  # the time of the row before; there is none before the first
        self._busy, self._began = 0.0, 0.0  # seconds in which something was sampled, and since when it is
        self._idle = self._idle_due = 0.0  # seconds for which the learner waited, and those for groups that are due
        self._sent: dict[int, float] = {}  # when each prompt was sent that no step has taken
        self._ages: list[float] = []  # of the groups that steps took

    def sent(self, ordinals: Iterable[int], *, first: bool) -> None:
        """Prompts are sampled from now on; ``first``: none was until now."""
        now = asyncio.get_running_loop().time()
        self._began = now if first else self._began
        self._sent |= dict.fromkeys(ordinals, now)

    def ended(self) -> None:
        """Nothing is sampled any more."""
        self._busy += asyncio.get_running_loop().time() - self._began

    def left(self, ordinal: int, *, trained: bool) -> None:
        """A step took the prompt's group (``trained``), or it was left out."""
        sent = self._sent.pop(ordinal, None)
        if trained and sent is not None:
            self._ages.append(asyncio.get_running_loop().time() - sent)

    def waited(self, seconds: float, *, for_due: bool) -> None:
        """The learner waited; ``for_due``: a batch of groups that were not due was finished."""
        self._idle += seconds
        self._idle_due += seconds * for_due

    def row(self, *, sampling: bool) -> dict[str, float]:
        """Metrics since the row before; those that are shares of this time are not in the first. ``sampling``: whether
        something is being sampled now."""
        now = asyncio.get_running_loop().time()
        if sampling:
            self._busy, self._began = self._busy + now - self._began, now
        row = {"wait/due_seconds": self._idle_due}
        if self._ages:
            row["age/seconds_mean"] = sum(self._ages) / len(self._ages)
        if self._described is not None and (whole := now - self._described):
            work = self._busy + whole - self._idle
            row["overlap/fraction"] = 1 - whole / work if work else 0.0
            if self._apart:
                row["idle/learner_fraction"] = self._idle / whole
        self._described, self._busy, self._idle, self._idle_due, self._ages = now, 0.0, 0.0, 0.0, []
        return row
