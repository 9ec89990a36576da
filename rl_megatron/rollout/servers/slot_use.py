"""Measures how servers are used: their slots, where each completion is a request of its own, and their draft layers."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator

from rl_megatron.rollout.servers.http import Server


class SlotUse:
    """Seconds in which slots were used, since the row before; ``slots`` are those of each server.

    A server's completions beyond its slots wait in it. The servers counted on are those that answered at the row
    before.
    """

    def __init__(self, slots: int) -> None:
        self._slots, self._servers = slots, 0
        self._running = Counter[Server]()
        self._in_flight = self._used = 0  # completions, and those that have a slot
        self._since: float | None = None
        self._whole = self._seconds = self._spare = 0.0  # of the clock, of used slots, and with a slot to spare

    @contextlib.contextmanager
    def busy(self, server: Server, completions: int) -> Iterator[None]:
        """Count these as in flight at ``server``."""
        self._change(server, completions)
        try:
            yield
        finally:
            self._change(server, -completions)

    def row(self, servers: int) -> dict[str, float]:
        """Metrics since the row before; none in the first. ``servers`` answer now."""
        self._advance()
        row = {}
        if self._servers and self._whole:
            row["idle/engine_fraction"] = max(0.0, 1 - self._seconds / (self._whole * self._slots * self._servers))
            row["wait/admission_seconds"] = self._spare
        self._servers, self._whole, self._seconds, self._spare = servers, 0.0, 0.0, 0.0
        return row

    def _change(self, server: Server, by: int) -> None:
        self._advance()
        before = self._running[server]
        self._running[server] = before + by
        if not before + by:
            del self._running[server]  # of servers that died, too
        self._in_flight += by
        self._used += min(self._slots, before + by) - min(self._slots, before)

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        seconds = 0.0 if self._since is None else now - self._since
        self._since = now
        self._whole += seconds
        self._seconds += seconds * self._used
        self._spare += seconds * (self._in_flight < self._slots * self._servers)


class DraftUse:
    """Counts what servers' draft layers proposed, and what was accepted, from one push to the next."""

    def __init__(self) -> None:
        self._last: weakref.WeakKeyDictionary[Server, tuple[float, float]] = weakref.WeakKeyDictionary()
        self._proposed = self._accepted = 0.0

    def counted(self, server: Server, proposed: float, accepted: float) -> None:
        """What the server has counted since its start, at a push. What it counted before its first one is left out."""
        before = self._last.get(server, (proposed, accepted))
        self._last[server] = proposed, accepted
        self._proposed += proposed - before[0]
        self._accepted += accepted - before[1]

    def row(self) -> dict[str, float]:
        """Metrics of what was counted since the row before; none where nothing was proposed."""
        row = {"draft/acceptance": self._accepted / self._proposed} if self._proposed else {}
        self._proposed = self._accepted = 0.0
        return row
