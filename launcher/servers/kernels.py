"""Has engine servers record their kernels."""

from __future__ import annotations

import asyncio
import gzip
import logging
import time
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path

from typing_extensions import override

from rl_megatron.durable import make_inside
from rl_megatron.errors import EngineError
from rl_megatron.interfaces import Profiled
from rl_megatron.observability.timeline.kernels import FOLDER, RankKernels
from rl_megatron.rollout.servers.adapter import Adapter
from rl_megatron.rollout.servers.http import AttemptFailed
from rl_megatron.rollout.servers.replicas import Replica, ReplicaSet

logger = logging.getLogger(__name__)

_LIMIT_SECONDS = 60.0  # for a server's files to be whole
_LOOK_SECONDS = 0.2


def folder_of_server(run: Path, number: int) -> Path:
    """Where the server of a replica writes what it recorded."""
    return run.resolve() / FOLDER / f"server_{number}"


class ServerKernels(Profiled):
    """The servers of a run that serve when a recording begins, whatever ranks are asked for.

    A server that cannot record, or ends meanwhile, is left out with a warning. Clocks of other nodes are taken as they
    are.
    """

    def __init__(self, adapter: Adapter, replicas: ReplicaSet, run: Path) -> None:
        self._adapter, self._replicas, self._run = adapter, replicas, run
        self._recording: list[Replica] = []

    @override
    async def begin(self, ranks: Collection[int]) -> None:
        replicas = self._replicas.healthy()
        begun = await asyncio.gather(*(self._begun(replica) for replica in replicas))
        self._recording = [replica for replica, is_begun in zip(replicas, begun, strict=True) if is_begun]

    @override
    async def end(self, folder: Path) -> Sequence[RankKernels]:
        written = await asyncio.gather(*(self._written(replica, folder) for replica in self._recording))
        return [one for files in written for one in files]

    async def _begun(self, replica: Replica) -> bool:
        try:
            for left in folder_of_server(self._run, replica.number).glob("*.gz"):
                left.unlink()
            await self._adapter.begin_profile(replica.server)
        except (AttemptFailed, EngineError, OSError) as error:
            logger.warning("replica %d does not record its kernels: %s", replica.number, error)
            return False
        return True

    async def _written(self, replica: Replica, folder: Path) -> list[RankKernels]:
        server = replica.server
        server.writing = True
        try:
            await self._adapter.end_profile(server)
        except (AttemptFailed, EngineError) as error:
            logger.warning("kernels of replica %d were not written: %s", replica.number, error)
            return []
        finally:
            server.writing = False
        return await asyncio.to_thread(self._taken, replica.number, folder)

    def _taken(self, number: int, folder: Path) -> list[RankKernels]:
        """Moves a server's files into ``folder`` once they are whole."""
        place, began = folder_of_server(self._run, number), time.monotonic()
        while not (files := sorted(place.glob("*.gz"))) or not all(_is_whole(file) for file in files):
            if time.monotonic() - began > _LIMIT_SECONDS:
                logger.warning("%s has no whole file of replica %d after %g s", place, number, _LIMIT_SECONDS)
                return []
            time.sleep(_LOOK_SECONDS)
        make_inside(folder, mode=0o700)
        taken = []
        for count, file in enumerate(files):
            moved = file.rename(folder / f"server-{number}-{count}.json.gz")
            taken.append(RankKernels(file=moved, process=f"server {number}, process {count}", shift=0))
        return taken


def _is_whole(file: Path) -> bool:
    try:
        with gzip.open(file) as opened:
            while opened.read(1 << 20):
                pass
    except (OSError, EOFError, zlib.error):
        return False
    return True
