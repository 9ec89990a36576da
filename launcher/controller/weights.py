"""What all learner ranks do to move their weights, as one WeightSync."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

from typing_extensions import override

from launcher.controller.group import WorkerGroup
from rl_megatron.errors import CorruptionError, SyncError
from rl_megatron.interfaces import WeightSync
from rl_megatron.observability.timeline import spans
from rl_megatron.types import LoadedAdapters, WeightUpdate
from rl_megatron.weights.checks.reports import Report
from rl_megatron.weights.layouts.recorded import Boxes
from rl_megatron.weights.transports.joined import Rendezvous

logger = logging.getLogger(__name__)


class WeightGroup(WeightSync):
    """A WeightSync in which every learner rank moves its shards to every replica."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    @override
    async def push(self, version: int) -> WeightUpdate:
        """Serves ``version`` once all replicas have staged and verified it; tries twice.

        Raises CorruptionError if boxes arrived corrupted twice.
        """
        with spans.during(spans.PUSHES, "push", version=version):
            return await self._twice(version, "stage", "commit")

    async def write_adapters(self, adapters: LoadedAdapters, keep: Collection[LoadedAdapters]) -> WeightUpdate:
        """Have the adapters written for servers. Raises as `push`."""
        await self._group.each("name_adapters", adapters.name, tuple(one.name for one in keep))
        return await self._twice(adapters.version, "stage_adapters", "commit_adapters")

    async def merge(self, *, adapters: bool) -> None:
        """Whether ranks merge adapters into what they push from now on."""
        await self._group.each("merge", adapters)

    async def _twice(self, version: int, stage: str, commit: str) -> WeightUpdate:
        """Stage and commit by these calls; stage again what was corrupted on the way, once."""
        updates, failures = await self._stage(version, stage)
        if failures:
            logger.warning("weights were corrupted in transfer and are sent again: %s", failures[0])
            again, failures = await self._stage(version, stage)
            updates += again
        if failures:
            raise failures[0]
        with spans.during(spans.PUSHES, "commit"):
            await self._group.each(commit, version)
        return _one_update(version, updates)

    async def held(self) -> list[dict[str, int]]:
        """The checksum of each tensor that each rank holds for its engine."""
        held: list[dict[str, int]] = await self._group.each("checksums")
        return held

    async def _stage(self, version: int, call: str) -> tuple[list[WeightUpdate], list[CorruptionError]]:
        with spans.during(spans.PUSHES, "stage"):
            answers: list[WeightUpdate | CorruptionError] = await self._group.each(call, version)
        return (
            [answer for answer in answers if isinstance(answer, WeightUpdate)],
            [answer for answer in answers if isinstance(answer, CorruptionError)],
        )

    async def sums(self) -> list[Report]:
        """Each rank's checksums of its boxes, of the version pushed last."""
        reports: list[Report] = await self._group.each("sums")
        return reports

    async def join_engines(self, rendezvous: Rendezvous, ranks: Sequence[Boxes]) -> None:
        """Have every rank join the group at ``rendezvous`` with engine ranks that hold ``ranks``. Raises SyncError."""
        for answer in await self._group.each("join_engines", rendezvous, ranks):
            if answer is not None:
                raise answer

    async def send(self, version: int) -> tuple[WeightUpdate, list[Report]]:
        """Have every rank send its shards to the engine ranks. Returns each one's checksums too. Raises SyncError."""
        answers: list[tuple[WeightUpdate, Report] | SyncError] = await self._group.each("send", version)
        for answer in answers:
            if isinstance(answer, SyncError):
                raise answer
        said = [answer for answer in answers if not isinstance(answer, SyncError)]
        return _one_update(version, [update for update, _ in said]), [report for _, report in said]

    @override
    async def export(self, folder: Path) -> None:
        """Have rank 0 write the version pushed last."""
        await self._group.ask("export", {0: (folder,)})


def _one_update(version: int, updates: Sequence[WeightUpdate]) -> WeightUpdate:
    return WeightUpdate(
        version=version,
        num_bytes=sum(u.num_bytes for u in updates),
        seconds=max(u.seconds for u in updates),
        verify_seconds=max(u.verify_seconds for u in updates),
    )
