"""Finds the learner rank whose passes take longest, and names it with its node."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from statistics import median_low

from launcher.controller.handle import WorkerHandle

logger = logging.getLogger(__name__)

_SLOW = 1.5  # times the median rank's seconds


class SlowestRank:
    """Compares seconds of passes, in which a rank also waits for others: inside a layer all are as late as one."""

    def __init__(self, workers: Sequence[WorkerHandle]) -> None:
        self._workers = workers
        self._named: int | None = None  # the rank that was logged last

    def row(self) -> dict[str, float]:
        """Returns metrics of the passes since the last call. Returns none for one rank, or if a rank made no pass."""
        seconds = [worker.pass_seconds for worker in self._workers]
        for worker in self._workers:
            worker.pass_seconds = 0.0
        if len(seconds) < 2 or not all(seconds):
            return {}
        slowest, median = seconds.index(max(seconds)), median_low(seconds)  # of two ranks one can be slow
        if seconds[slowest] >= _SLOW * median and slowest != self._named:
            self._named = slowest
            who = self._workers[slowest].who
            logger.warning("%s took %.1f s for its passes, the median rank %.1f s", who, seconds[slowest], median)
        return {"ranks/slowest": slowest, "memory/peak": max(worker.peak for worker in self._workers)}
