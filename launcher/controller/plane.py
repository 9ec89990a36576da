"""Sends the columns of a step to the ranks of a group: once to each data-parallel rank, for all models there."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from launcher.controller.group import WorkerGroup
from rl_megatron.data.sent import Sent
from rl_megatron.data.shares import Share
from rl_megatron.types import Batch, ParallelDims


class Plane:
    """The calls of a group's ranks that take micro-batches.

    The first rank of each data-parallel rank's ranks gets that one's share, and passes it on to the others.
    """

    def __init__(self, group: WorkerGroup, dims: ParallelDims) -> None:
        self._group, self._dims, self._sent = group, dims, Sent(dims.dp)
        self._held = False  # whether ranks may hold rows, also of a step whose later shares could not be computed
        self._lock = asyncio.Lock()  # ranks hold what earlier calls brought
        self._bytes, self._seconds = 0, 0.0  # of shares since the last `row`, and to make them

    async def call(self, name: str, role: str, batch: Batch, *rest: Any, to_score: bool) -> list[Any]:
        """Call every rank with its micro-batches of the batch and ``rest``. Returns answers in rank order.

        ``to_score``: without the columns that a loss alone reads. Raises as `WorkerGroup.gather`.
        """
        async with self._lock:
            shares = await self._shares(batch, to_score=to_score)
            without = (role, None, *rest)
            given = {
                w.rank: (role, shares[w.rank], *rest) if w.rank in shares else without for w in self._group.workers
            }
            self._held = True
            answers = self._group.begin(name, given)
        return await self._group.gather(answers)

    async def forget(self) -> None:
        """Free what the ranks hold of a step."""
        async with self._lock:
            if not self._held:
                return
            self._held = False
            self._sent.forget()
            answers = self._group.begin("forget", dict.fromkeys((w.rank for w in self._group.workers), ()))
        await self._group.gather(answers)

    def row(self) -> dict[str, float]:
        """Metrics since the call before."""
        row: dict[str, float] = {"plane/bytes": self._bytes, "plane/seconds": self._seconds}
        self._bytes, self._seconds = 0, 0.0
        return row

    async def _shares(self, batch: Batch, *, to_score: bool) -> dict[int, Share]:
        """Each data-parallel rank's share, by the rank that gets it; computed beside the event loop."""
        began = time.perf_counter()
        sent, self._sent = self._sent, Sent(self._dims.dp, after=self._sent.step + 1)
        shares = await asyncio.to_thread(sent.shares, batch, to_score=to_score)
        self._sent = sent  # unless this was cancelled: what was not sent is held by nobody
        self._bytes += sum(share.nbytes for share in shares)
        self._seconds += time.perf_counter() - began
        return {d * self._dims.tp * self._dims.cp: share for d, share in enumerate(shares)}
