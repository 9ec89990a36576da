"""Has servers of evaluations serve the version that training's servers serve; later pushes pass them by."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rl_megatron.errors import ReplicasLost
from rl_megatron.weights.checks.reports import NO_KINDS, Kinds, Report
from rl_megatron.weights.servers.sync import ServedWeights
from rl_megatron.weights.servers.trust import Trust

logger = logging.getLogger(__name__)


class Holders(Protocol):
    """The servers of evaluations, which all serve the same version or none."""

    def names(self) -> Sequence[str]:
        """The servers that answer."""
        ...

    async def load(self, path: Path, version: int, *, private: Kinds = NO_KINDS) -> Mapping[str, Sequence[Report]]:
        """Have all load the file's weights without serving them. Raises SyncError; ReplicasLost if all died."""
        ...

    async def commit(self, version: int) -> None:
        """Serve the loaded weights. Raises SyncError; ReplicasLost if all died."""
        ...

    def refuse(self) -> None:
        """Serve nothing until other weights are loaded and committed."""
        ...


class PinnedWeights:
    """Loads versions of ``training`` from the mirror file at ``path``, and verifies them as a restarted server's."""

    def __init__(self, *, training: ServedWeights, path: Path, servers: Holders, trust: Trust) -> None:
        self._training, self._path, self._servers, self._trust = training, path, servers, trust

    async def pin(self, version: int, held: Callable[[], None]) -> bool:
        """As `interfaces.PinnedEngine.pin`."""
        async with self._training.held("an evaluation") as served:
            held()
            if served is None or served.version != version or not self._servers.names():
                return False
            try:
                reports = await self._servers.load(self._path, version, private=self._trust.private)
                for name, said in reports.items():
                    await self._trust.verify_one(version, name, said, served.checksums, served.verified)
                await self._servers.commit(version)
            except ReplicasLost as error:
                self._servers.refuse()
                logger.warning("%s", error)
                return False
            except BaseException:
                self._servers.refuse()
                raise
        return True
