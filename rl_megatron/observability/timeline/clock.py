"""Estimates how far another process's clock is from this one's, from the times of its calls and answers.

As NTP does (RFC 5905, section 8), but without its assumption that both ways take equally long: a delay is positive, so
each message bounds the difference from one side, and the truth is inside all bounds, whatever the network does.
"""

from __future__ import annotations

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
