"""Delivers weights through mirror files: learner ranks write one on each node, and engine servers there load it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol, runtime_checkable

from typing_extensions import override

from rl_megatron.types import WeightUpdate
from rl_megatron.weights.boxes import Shape
from rl_megatron.weights.checks.reports import NO_KINDS, Kinds, Report, sealed_by, seconds_waited
from rl_megatron.weights.routes import mirror
from rl_megatron.weights.routes.delivery import Deliver, Delivered, Delivery, with_error


@runtime_checkable
class LearnerWeights(Protocol):
    """The weights of the learner's ranks, or of a folder."""

    async def push(self, version: int) -> WeightUpdate:
        """Write all weights into the mirror files, as ``version``."""
        ...

    async def sums(self) -> Sequence[Report]:
        """Each rank's checksums of its boxes, of the version pushed last."""
        ...


class Loaders(Protocol):
    """The engine servers, which load their node's mirror file."""

    async def load(
        self, path: Path, version: int, *, only: str | None = None, private: Kinds = NO_KINDS
    ) -> Mapping[str, Sequence[Report]]:
        """Have all servers, or ``only`` one, load the file's weights without serving them. Returns reports by server.

        Ranks do not report parameters of ``private`` kinds. Raises SyncError; ReplicasLost if all servers
        died.
        """
        ...


class FileDelivery(Delivery):
    """Delivers through the mirror files at ``path``, on each node that has one, which hold one version.

    The seal is beside that of the controller's node. Each server reads the file on each of its ``nodes``.
    """

    def __init__(self, *, learner: LearnerWeights, path: Path, servers: Loaders, nodes: int = 1) -> None:
        self.path, self._nodes = path, nodes
        self._learner, self._servers = learner, servers

    @override
    @asynccontextmanager
    async def sending(self, version: int) -> AsyncIterator[Deliver]:
        """The learner pushes once; its ranks compute their checksums while servers load."""
        update = await self._learner.push(version)
        sealing = asyncio.ensure_future(self._seal(version))
        try:
            yield partial(self._deliver, version, update, sealing)
        finally:  # `_deliver` raises its error
            await asyncio.gather(sealing, return_exceptions=True)

    async def _deliver(
        self,
        version: int,
        update: WeightUpdate,
        sealing: asyncio.Future[mirror.Seal],
        *,
        private: Kinds,
        meanwhile: Callable[[], None],
    ) -> Delivered:
        meanwhile()
        reports = await self._servers.load(self.path, version, private=private)
        loaded = time.perf_counter()
        seal = await asyncio.shield(sealing)
        waited = time.perf_counter() - loaded + seconds_waited(reports)
        update = replace(
            update,
            num_bytes=update.num_bytes + len(reports) * self._nodes * self.path.stat().st_size,
            verify_seconds=update.verify_seconds + waited,
        )
        return Delivered(update=with_error(update, seal), reports=reports, seal=seal)

    @override
    async def filled(self, version: int) -> mirror.Seal:
        """The file already holds it."""
        return mirror.seal_of(self.path, version)

    async def fill(self, version: int) -> mirror.Seal:
        """Have the learner write the file and seal it. Raises SyncError."""
        await self._learner.push(version)
        return await self._seal(version)

    @override
    async def load(self, version: int, name: str) -> Sequence[Report]:
        return (await self._servers.load(self.path, version, only=name))[name]

    def checksums(self, reports: Sequence[Report]) -> dict[str, int]:
        """Checksums of whole tensors, from the learner's ranks' reports. Raises CorruptionError if two ranks differ."""
        return sealed_by(reports, self._shapes)

    async def _seal(self, version: int) -> mirror.Seal:
        """Seal with checksums of the learner's own tensors, not of what arrived in the file."""
        checksums = await asyncio.to_thread(self.checksums, await self._learner.sums())
        return mirror.seal(self.path, version, checksums)

    @cached_property
    def _shapes(self) -> dict[str, Shape]:
        return mirror.shapes(self.path)
