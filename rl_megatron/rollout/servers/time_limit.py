"""Counts the seconds that a completion runs in servers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(slots=True)
class TimeLimit:
    """The time that a completion, or the completions of one request, may run; ``limit`` None: without end.

    It stands still between two attempts, and an attempt that failed takes no time: its tokens are lost.
    """

    limit: float | None = None
    spent: float = 0.0
    over: bool = False  # whether the last attempt ran until its time was over
    _began: float = 0.0

    @property
    def left(self) -> float:
        """Seconds until the limit."""
        assert self.limit is not None
        return max(0.0, self.limit - self.spent)

    def start(self) -> None:
        """An attempt begins."""
        self.over, self._began = False, asyncio.get_running_loop().time()

    def stop(self) -> None:
        """It was answered."""
        self.spent += asyncio.get_running_loop().time() - self._began

    def extend(self) -> None:
        """Where the time is over, begin again with twice as much."""
        if self.over and self.limit is not None:
            self.limit, self.spent = 2 * self.limit, 0.0
