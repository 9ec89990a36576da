"""Deliveries: each moves weight versions from learner ranks to engine servers, and verifies nothing.

`FileDelivery` goes through mirror files: learner ranks write one on each node, and engine servers there load it.
`DirectDelivery` pushes from learner ranks into engine ranks; if one end fails, it cancels the other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from typing_extensions import override

from rl_megatron.errors import AllReplicasLost, SyncError
from rl_megatron.types import WeightUpdate
from rl_megatron.weights.boxes import Shape
from rl_megatron.weights.checks.reports import (
    NO_KINDS,
    ChecksumReport,
    Kinds,
    largest_change,
    seal_from_reports,
    seconds_waited,
)
from rl_megatron.weights.layouts.recorded import Boxes, shared
from rl_megatron.weights.routes import mirror
from rl_megatron.weights.routes.mirror import VersionSeal
from rl_megatron.weights.routes.rendezvous import JOINING, Rendezvous, RendezvousStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredVersion:
    """A version that every server holds and none serves yet: the ranks' reports, and the checksums to compare with."""

    update: WeightUpdate
    reports: Mapping[str, Sequence[ChecksumReport]]  # one for each rank, by server
    seal: VersionSeal  # checksums of the learner's tensors, not of what arrived


def with_error(update: WeightUpdate, seal: VersionSeal) -> WeightUpdate:
    """The update with the seal's error of quantized weights, which it logs; as it is if none are."""
    if seal.error is None:
        return update
    error, tensor = seal.error
    logger.info("version %d is quantized: largest relative error of a tensor %.3g, %s", update.version, error, tensor)
    return replace(update, quantization_error=error)


class Deliver(Protocol):
    """Delivers a version. If all servers died it can be called again."""

    async def __call__(self, *, private: Kinds, meanwhile: Callable[[], None]) -> DeliveredVersion:
        """Ranks do not report parameters of ``private`` kinds. Calls ``meanwhile`` once all ranks have their orders.

        Raises SyncError; AllReplicasLost if all servers died.
        """
        ...


class Delivery(Protocol):
    """Delivers versions, one after the other. Controller process."""

    def sending(self, version: int) -> AbstractAsyncContextManager[Deliver]:
        """Yields a `Deliver` of ``version``, valid while the learner holds it. Raises SyncError."""
        ...

    async def filled(self, version: int) -> VersionSeal:
        """Ensures that the mirror file holds the delivered ``version``, from the learner's present weights.

        Raises SyncError.
        """
        ...

    async def load(self, version: int, name: str) -> Sequence[ChecksumReport]:
        """Loads the filled mirror file on the restarted server ``name``. Returns its ranks' reports.

        Raises SyncError; AllReplicasLost if it died.
        """
        ...


@runtime_checkable
class LearnerWeights(Protocol):
    """The weights of the learner's ranks, or of a folder."""

    async def push(self, version: int) -> WeightUpdate:
        """Writes all weights into the mirror files, as ``version``."""
        ...

    async def sums(self) -> Sequence[ChecksumReport]:
        """Each rank's checksums of its boxes, of the version pushed last."""
        ...


class Loaders(Protocol):
    """The engine servers, which load their node's mirror file."""

    async def load(
        self, path: Path, version: int, *, only: str | None = None, private: Kinds = NO_KINDS
    ) -> Mapping[str, Sequence[ChecksumReport]]:
        """Loads the file's weights on all servers or ``only`` one, without serving them. Returns reports by server.

        Ranks do not report parameters of ``private`` kinds. Raises SyncError; AllReplicasLost if all servers
        died.
        """
        ...


class FileDelivery(Delivery):
    """Delivers through the mirror files at ``path``, on each node that has one, which hold one version.

    The seal is next to the file of the controller's node. Each server reads the file on each of its ``nodes``.
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
        sealing: asyncio.Future[mirror.VersionSeal],
        *,
        private: Kinds,
        meanwhile: Callable[[], None],
    ) -> DeliveredVersion:
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
        return DeliveredVersion(update=with_error(update, seal), reports=reports, seal=seal)

    @override
    async def filled(self, version: int) -> mirror.VersionSeal:
        """The file already holds it."""
        return mirror.read_seal(self.path, version)

    async def fill(self, version: int) -> mirror.VersionSeal:
        """Makes the learner write the file, and seals it. Raises SyncError."""
        await self._learner.push(version)
        return await self._seal(version)

    @override
    async def load(self, version: int, name: str) -> Sequence[ChecksumReport]:
        return (await self._servers.load(self.path, version, only=name))[name]

    def checksums(self, reports: Sequence[ChecksumReport]) -> dict[str, int]:
        """Checksums of whole tensors, from the learner's ranks' reports. Raises CorruptionError if two ranks differ."""
        return seal_from_reports(reports, self._shapes)

    async def _seal(self, version: int) -> mirror.VersionSeal:
        """Seals with checksums of the learner's own tensors, not of what arrived in the file."""
        checksums = await asyncio.to_thread(self.checksums, await self._learner.sums())
        return mirror.seal(self.path, version, checksums)

    @cached_property
    def _shapes(self) -> dict[str, Shape]:
        return mirror.shapes(self.path)


_LOOK_SECONDS = 0.05
_GRACE_SECONDS = 2.0


@runtime_checkable
class LearnerRanks(Protocol):
    """The learner's ranks, which send their shards."""

    async def join_engines(self, rendezvous: Rendezvous, ranks: Sequence[Boxes]) -> None:
        """Joins the group at the rendezvous with engine ranks that hold ``ranks`` and follow the learner's in number.

        Collective with these.
        """
        ...

    async def send(self, version: int) -> tuple[WeightUpdate, Sequence[ChecksumReport]]:
        """Sends all shards. Returns each rank's checksums of its boxes. Raises SyncError."""
        ...


class Receivers(Protocol):
    """The engine servers, by name."""

    def names(self) -> Sequence[str]:
        """The servers that answer."""
        ...

    def stale(self, name: str) -> bool:
        """True if the server was restarted and has not joined a group yet."""
        ...

    async def boxes(self, path: Path) -> Mapping[str, Sequence[Boxes]]:
        """The boxes of the mirror file's tensors that each rank of each server holds."""
        ...

    async def join(self, path: Path, rendezvous: Mapping[str, object], first: Mapping[str, int]) -> None:
        """Joins each server's ranks to the group at ``rendezvous``, numbered from its ``first`` on."""
        ...

    async def load(
        self, path: Path, version: int, *, straight: Collection[str] = (), private: Kinds = NO_KINDS
    ) -> Mapping[str, Sequence[ChecksumReport]]:
        """Makes the servers in ``straight`` receive what is sent. Returns ranks' reports without ``private`` kinds.

        Raises SyncError.
        """
        ...


class DirectDelivery(Delivery):
    """Delivers from learner ranks into engine ranks. All ranks rendezvous again after a server is new or a push failed.

    The mirror file names the tensors; ``file`` fills it for an export and for a restarted server.
    ``backend`` is of the `Rendezvous` where ranks meet.
    """

    def __init__(
        self,
        *,
        file: FileDelivery,
        learner: LearnerRanks,
        servers: Receivers,
        keeper: RendezvousStore,
        learner_ranks: int,
        backend: str,
    ) -> None:
        self._file, self._learner, self._servers, self._keeper = file, learner, servers, keeper
        self._learner_ranks = learner_ranks
        self._new_rendezvous = partial(keeper.rendezvous, learners=learner_ranks, backend=backend)
        self._rendezvous: Rendezvous | None = None
        self._met: frozenset[str] = frozenset()

    @override
    @asynccontextmanager
    async def sending(self, version: int) -> AsyncIterator[Deliver]:
        """Every attempt sends all shards again, as no file holds them."""
        yield partial(self._deliver, version)

    async def _deliver(self, version: int, *, private: Kinds, meanwhile: Callable[[], None]) -> DeliveredVersion:
        names = self._servers.names()
        same = self._met == frozenset(names) and not any(map(self._servers.stale, names))
        rendezvous, self._rendezvous = self._rendezvous if same else None, None  # unset until this version has arrived
        rendezvous = rendezvous or await self._join_group()
        sending = asyncio.ensure_future(self._learner.send(version))
        loading = self._servers.load(self._file.path, version, straight=self._met, private=private)
        receiving = asyncio.ensure_future(loading)
        meanwhile()
        ended: dict[object, float] = {}
        for future in (sending, receiving):
            future.add_done_callback(lambda future: ended.update({future: time.perf_counter()}))
        await self._both(rendezvous, f"version {version}", sending, receiving)
        self._rendezvous = rendezvous
        (update, sent), reports = sending.result(), receiving.result()
        if not same and (most := max(report.window for said in reports.values() for report in said)):
            logger.info("a rank of the engines holds at most %.3g GB of a version beside its weights", most / 1e9)
        ours, theirs = update.verify_seconds, seconds_waited(reports)
        without = max(ended[sending] - ours, ended[receiving] - theirs)
        update = replace(update, verify_seconds=max(ended.values()) - without)
        checksums = await asyncio.to_thread(self._file.checksums, sent)
        seal = mirror.VersionSeal(checksums=checksums, error=largest_change(one.changes for one in sent))
        return DeliveredVersion(update=with_error(update, seal), reports=reports, seal=seal)

    @override
    async def filled(self, version: int) -> mirror.VersionSeal:
        """Makes the learner write the file from its present weights."""
        return await self._file.fill(version)

    @override
    async def load(self, version: int, name: str) -> Sequence[ChecksumReport]:
        """All ranks rendezvous again before the next version: a restarted server has not joined the group."""
        self._rendezvous = None
        return await self._file.load(version, name)

    async def _both(
        self, rendezvous: Rendezvous, what: str, sending: asyncio.Future[Any], receiving: asyncio.Future[Any]
    ) -> None:
        """Waits for both ends. If one fails, or a server dies, cancels the other.

        Raises the error of one end, or AllReplicasLost if a server died: the others can rendezvous again.
        """
        both, dead = asyncio.gather(sending, receiving), asyncio.ensure_future(self._cancel_on_death())
        both.add_done_callback(lambda done: done.cancelled() or done.exception())  # it is raised below
        try:
            await asyncio.wait((both, dead), return_when=asyncio.FIRST_COMPLETED)
            if not both.done() or both.exception() is not None:
                self._keeper.cancel(rendezvous, what, str(both.exception()) if both.done() else "a server died")
                await asyncio.wait((sending, receiving))
                await asyncio.wait([dead], timeout=_GRACE_SECONDS)  # an error may arrive before its cause, a death
                failed = sending.exception(), receiving.exception()
                if any(failed):
                    raise self._cause(rendezvous, what, *failed, died=dead.done())
            await both
            self._keeper.forget(rendezvous, what)
        finally:
            dead.cancel()

    def _cause(
        self,
        rendezvous: Rendezvous,
        what: str,
        sender: BaseException | None,
        receiver: BaseException | None,
        *,
        died: bool,
    ) -> BaseException:
        """The error of the end whose ranks did not arrive at ``what``, or of the death of a server.

        The other end arrived and was canceled. If both or neither arrived, the cause is a mismatch of their ranks, the
        learner's error if it is a refusal, or else the servers' error.
        """
        absent = self._keeper.missing_ranks(rendezvous, what)
        if not absent and (why := self._keeper.mismatch(rendezvous)):
            return SyncError(why)
        learner_alone = bool(absent) and absent[-1] < self._learner_ranks
        refused = not absent and not isinstance(sender, SyncError)
        cause = sender if receiver is None or (sender is not None and (learner_alone or refused)) else receiver
        assert cause is not None
        if died and isinstance(cause, SyncError):
            return AllReplicasLost(f"a server died while the learner joined its group or sent weights to it: {cause}")
        return cause

    async def _cancel_on_death(self) -> None:
        while self._met <= frozenset(self._servers.names()):
            await asyncio.sleep(_LOOK_SECONDS)

    async def _join_group(self) -> Rendezvous:
        """Makes all ranks of the learner and of every server join a new group."""
        boxes = await self._servers.boxes(self._file.path)
        first: dict[str, int] = {}
        ranks: list[Boxes] = []
        for name, said in boxes.items():
            first[name] = self._learner_ranks + len(ranks)
            ranks += said
        ranks = await asyncio.to_thread(shared, ranks)
        rendezvous = self._new_rendezvous(self._learner_ranks + len(ranks))
        self._met = frozenset(boxes)
        joining = asyncio.ensure_future(self._learner.join_engines(rendezvous, ranks))
        joined = asyncio.ensure_future(self._servers.join(self._file.path, asdict(rendezvous), first))
        await self._both(rendezvous, JOINING, joining, joined)
        return rendezvous
