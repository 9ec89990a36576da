"""One version from the learner's ranks straight into those of engine servers; where one fails, all are sent home."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from rl_megatron.errors import SyncError
from rl_megatron.types import WeightUpdate
from rl_megatron.weights import held, mirror
from rl_megatron.weights.engine_layout import Boxes
from rl_megatron.weights.transports.joined import Keeper, Place


class Senders(Protocol):
    """The learner's ranks."""

    async def join_engines(self, place: Place, ranks: Sequence[Boxes]) -> None:
        """Meet engine ranks that hold ``ranks``, behind the learner's own in number. Collective with them."""
        ...

    async def send(self, version: int) -> tuple[WeightUpdate, Sequence[held.Report]]:
        """Send all shards; the checksums of what each rank answers for. Raises SyncError."""
        ...


class Receivers(Protocol):
    """The engine servers, by name."""

    def names(self) -> Sequence[str]:
        """Those that answer."""
        ...

    async def boxes(self, path: Path) -> Mapping[str, Sequence[Boxes]]:
        """What each rank of each holds of the mirror file's tensors."""
        ...

    async def join(self, path: Path, place: Mapping[str, object], first: Mapping[str, int]) -> None:
        """Make the ranks of each members of the group at ``place``, numbered from its ``first`` on."""
        ...

    async def load(self, path: Path, version: int, *, straight: bool = False) -> Mapping[str, Sequence[held.Report]]:
        """Take what is sent; what each rank holds then. Raises SyncError."""
        ...


class Direct:
    """The way of all versions. A server that comes anew, or a version that failed, makes all meet again."""

    def __init__(
        self, *, senders: Senders, receivers: Receivers, keeper: Keeper, path: Path, learner_ranks: int, backend: str
    ) -> None:
        self._senders, self._receivers, self._keeper, self._path = senders, receivers, keeper, path
        self._learner_ranks, self._backend = learner_ranks, backend
        self._place: Place | None = None
        self._met: frozenset[str] = frozenset()

    async def push(self, version: int) -> tuple[WeightUpdate, Mapping[str, Sequence[held.Report]], mirror.Seal]:
        """What moved, what each rank of each replica holds, and the learner's checksums. Raises SyncError."""
        place = self._place if self._met == frozenset(self._receivers.names()) else None
        self._place = None  # until this version has arrived
        place = place or await self._meet()
        sending = asyncio.ensure_future(self._senders.send(version))
        receiving = asyncio.ensure_future(self._receivers.load(self._path, version, straight=True))
        done, _ = await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_EXCEPTION)
        failed = next((task.exception() for task in done if task.exception() is not None), None)
        if failed is not None:
            self._keeper.call_off(place, version, str(failed))
            await asyncio.wait((sending, receiving))
            raise _cause(sending.exception(), receiving.exception())
        update, reports = sending.result()
        shapes = mirror.shapes(self._path)
        self._place = place
        return update, receiving.result(), mirror.Seal(checksums=held.sealed_by(reports, shapes))

    async def _meet(self) -> Place:
        boxes = await self._receivers.boxes(self._path)
        first: dict[str, int] = {}
        ranks: list[Boxes] = []
        for name, said in boxes.items():
            first[name] = self._learner_ranks + len(ranks)
            ranks += said
        place = self._keeper.place(self._learner_ranks + len(ranks), self._backend)
        await asyncio.gather(
            self._senders.join_engines(place, ranks), self._receivers.join(self._path, asdict(place), first)
        )
        self._met = frozenset(boxes)
        return place


def _cause(sender: BaseException | None, receiver: BaseException | None) -> BaseException:
    """Of two that failed, the one that was not merely called off by the other."""
    if receiver is not None and not (isinstance(sender, SyncError) and "called off" in str(receiver)):
        return receiver
    assert sender is not None
    return sender
