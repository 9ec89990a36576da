"""Sends the columns of a step to the ranks of a group: once to each data-parallel rank, for all models there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launcher.controller.group import WorkerGroup
from rl_megatron.data.sent import Sent
from rl_megatron.data.shares import Share
from rl_megatron.interfaces import Pass, PassScores
from rl_megatron.types import Batch, ParallelDims, Scores, Want

if TYPE_CHECKING:
    from torch import Tensor


class Plane:
    """The calls of a group's ranks that take micro-batches.

    The first rank of each data-parallel rank's ranks gets that one's share, and passes it on to the others.
    """

    def __init__(self, group: WorkerGroup, dims: ParallelDims) -> None:
        self._group, self._dims, self._sent = group, dims, Sent(dims.dp)
        self._held = False  # whether ranks may hold rows, also of a step whose later shares could not be computed
        self._lock = asyncio.Lock()  # ranks hold what earlier calls brought
        self._bytes, self._seconds = 0, 0.0  # of shares since the last `row`, and to make them

    async def score(self, batch: Batch, passes: Sequence[Pass]) -> list[PassScores]:
        """What all passes over the batch say. Raises as `call`."""
        answers: list[list[tuple[dict[Want, list[Tensor]] | None, float]]]
        answers = await self.call("score", tuple(passes), batch, to_score=True)
        return [
            PassScores(
                scores=self._by_data_rank(one.want, [each[0] for each in said]), seconds=max(each[1] for each in said)
            )
            for one, said in zip(passes, zip(*answers, strict=True), strict=True)
        ]

    def _by_data_rank(
        self, want: frozenset[Want], answers: Sequence[dict[Want, list[Tensor]] | None]
    ) -> dict[Want, Scores]:
        """Scores [D][M], of those in rank order that the ranks tell."""
        rows = {self._dims.dp_rank(rank): answer for rank, answer in enumerate(answers) if answer is not None}
        return {what: [rows[d][what] for d in range(self._dims.dp)] for what in want}

    async def call(
        self, name: str, asked: str | tuple[Pass, ...], batch: Batch, *rest: Any, to_score: bool
    ) -> list[Any]:
        """Call every rank with its micro-batches of the batch and ``rest``. Returns answers in rank order.

        ``asked`` are the passes, or the role of the only one. ``to_score``: without the columns that a loss alone
        reads. Raises as `WorkerGroup.gather`.
        """
        async with self._lock:
            shares = await self._shares(batch, to_score=to_score)
            without = (asked, None, *rest)
            given = {
                w.rank: (asked, shares[w.rank], *rest) if w.rank in shares else without for w in self._group.workers
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
