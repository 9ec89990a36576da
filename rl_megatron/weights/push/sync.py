"""WeightSyncs into engine servers: deliver a version to all, verify it on all, and only then commit it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from rl_megatron.errors import AllReplicasLost
from rl_megatron.interfaces import WeightSync
from rl_megatron.observability import timeline
from rl_megatron.types import WeightUpdate
from rl_megatron.weights.push.trust import PushVerifier, VerifiedProbe
from rl_megatron.weights.routes.delivery import Deliver, Delivery

logger = logging.getLogger(__name__)


class Committers(Protocol):
    """The engine servers, which all serve the same version or none."""

    def stale(self, name: str) -> bool:
        """True if the server answers but does not serve."""
        ...

    async def commit(self, version: int, *, only: str | None = None) -> None:
        """Serves the loaded weights, on all or on ``only``. Raises SyncError; AllReplicasLost if all servers died."""
        ...

    def refuse(self) -> None:
        """Serves nothing until other weights are loaded and committed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVersion:
    """The served version, and what another server with it is compared with."""

    version: int
    checksums: Mapping[str, int]  # the learner's, by tensor
    verified: VerifiedProbe | None


class ServedSync(WeightSync, Protocol):
    """A WeightSync into engine servers, which may be restarted."""

    async def refit(self, name: str) -> None:
        """Makes a stale server serve the version that the others serve or served. Raises SyncError if it is wrong."""
        ...


class ServedWeights(ServedSync):
    """Serves versions that ``delivery`` moved and ``trust`` verified; neither knows the other.

    ``learner`` writes exports. It pushes one version at a time.
    """

    def __init__(self, *, learner: WeightSync, delivery: Delivery, trust: PushVerifier, servers: Committers) -> None:
        self._learner, self._delivery, self._trust, self._servers = learner, delivery, trust, servers
        self._lock = asyncio.Lock()  # the mirror file holds one version
        self._served: ServedVersion | None = None

    @override
    async def push(self, version: int) -> WeightUpdate:
        """Raises SyncError if a server does not hold the learner's weights."""
        started = time.perf_counter()
        async with self._lock:
            self._served = None
            try:
                with timeline.during(timeline.PUSHES, "push", version=version):
                    update, self._served = await self._serve(version)
            except BaseException:
                self._servers.refuse()
                raise
        return replace(update, seconds=time.perf_counter() - started)

    async def _serve(self, version: int) -> tuple[WeightUpdate, ServedVersion]:
        """Delivers, verifies and commits; tries again if all servers died meanwhile."""
        try:
            async with self._delivery.sending(version) as deliver:
                while True:
                    try:
                        return await self._attempt(version, deliver)
                    except AllReplicasLost as error:
                        logger.warning("%s\nit is loaded again as soon as a server is back", error)
        finally:
            await self._trust.end()

    async def _attempt(self, version: int, deliver: Deliver) -> tuple[WeightUpdate, ServedVersion]:
        with timeline.during(timeline.PUSHES, "deliver"):
            delivered = await deliver(private=self._trust.private, meanwhile=partial(self._trust.begin, version))
        update, checksums = delivered.update, delivered.seal.checksums
        started = time.perf_counter()
        with timeline.during(timeline.PUSHES, "verify"):
            verified = await self._trust.verify(version, delivered.reports, checksums)
        update = replace(update, verify_seconds=update.verify_seconds + time.perf_counter() - started)
        with timeline.during(timeline.PUSHES, "commit"):
            await self._servers.commit(version)
        return update, ServedVersion(version=version, checksums=checksums, verified=verified)

    @override
    async def refit(self, name: str) -> None:
        """Besides its checksums, its scores must equal those of a server that was compared with the learner, which may
        have trained on. Does nothing if no version is served, or a push came first.
        """
        async with self._lock:
            if not self._servers.stale(name) or (served := await self._filled(name)) is None:
                return
            reports = await self._delivery.load(served.version, name)
            await self._trust.verify_one(served.version, name, reports, served.checksums, served.verified)
            await self._servers.commit(served.version, only=name)

    async def _filled(self, name: str) -> ServedVersion | None:
        """The served version, once the mirror file has it, with checksums of all of the file's tensors."""
        served = self._served
        if served is None:
            return None
        checksums = (await self._delivery.filled(served.version)).checksums
        if any(checksums.get(tensor) != before for tensor, before in served.checksums.items()):
            logger.info(
                "%s will be updated at the next push, because the learner no longer has version %d",
                name,
                served.version,
            )
            return None
        return replace(served, checksums=checksums)

    @override
    async def export(self, folder: Path) -> None:
        """Raises CorruptionError if the mirror file does not hold the learner's weights."""
        async with self._lock:  # a server that comes back has the file filled too
            if self._served is not None:
                await self._delivery.filled(self._served.version)
                await self._trust.verify_file(self._served.version)
            await self._learner.export(folder)
