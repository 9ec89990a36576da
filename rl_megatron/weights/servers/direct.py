"""Pushes one weight version from learner ranks directly into engine ranks; where one end fails, cancels the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rl_megatron.errors import ReplicasLost, SyncError
from rl_megatron.types import WeightUpdate
from rl_megatron.weights.checks.compare import sealed_by
from rl_megatron.weights.checks.reports import NO_KINDS, Kinds, Report, seconds_waited
from rl_megatron.weights.layouts.recorded import Boxes
from rl_megatron.weights.servers import mirror
from rl_megatron.weights.transports.joined import JOINING, Keeper, Place

_LOOK_SECONDS = 0.05
_GRACE_SECONDS = 2.0


class Senders(Protocol):
    """The learner's ranks."""

    async def join_engines(self, place: Place, ranks: Sequence[Boxes]) -> None:
        """Meet engine ranks that hold ``ranks``, behind the learner's own in number. Collective with them."""
        ...

    async def send(self, version: int) -> tuple[WeightUpdate, Sequence[Report]]:
        """Send all shards; the checksums of what each rank answers for. Raises SyncError."""
        ...


class Receivers(Protocol):
    """The engine servers, by name."""

    def names(self) -> Sequence[str]:
        """Those that answer."""
        ...

    def stale(self, name: str) -> bool:
        """Whether it came back, and has met nobody yet."""
        ...

    async def boxes(self, path: Path) -> Mapping[str, Sequence[Boxes]]:
        """What each rank of each holds of the mirror file's tensors."""
        ...

    async def join(self, path: Path, place: Mapping[str, object], first: Mapping[str, int]) -> None:
        """Make the ranks of each members of the group at ``place``, numbered from its ``first`` on."""
        ...

    async def load(
        self, path: Path, version: int, *, straight: Collection[str] = (), private: Kinds = NO_KINDS
    ) -> Mapping[str, Sequence[Report]]:
        """Those in ``straight`` take what is sent; what each rank holds then, but for ``private`` kinds.

        Raises SyncError.
        """
        ...


class Direct:
    """The way of all versions. After a server came back, or a version failed, all meet again.

    ``transport``, ``backend`` and ``turns``: see joined.Place.
    """

    def __init__(
        self,
        *,
        senders: Senders,
        receivers: Receivers,
        keeper: Keeper,
        path: Path,
        learner_ranks: int,
        transport: str,
        backend: str,
        turns: bool = False,
    ) -> None:
        self._senders, self._receivers, self._keeper, self._path = senders, receivers, keeper, path
        self._learner_ranks = learner_ranks
        self._new_place = partial(keeper.place, transport=transport, backend=backend, turns=turns)
        self._place: Place | None = None
        self._met: frozenset[str] = frozenset()

    def meet_again(self) -> None:
        """Next time: a server that was brought back may stand at the same address, and has not met the others."""
        self._place = None

    async def push(
        self, version: int, *, private: Kinds, behind: Callable[[], None]
    ) -> tuple[WeightUpdate, Mapping[str, Sequence[Report]], mirror.Seal]:
        """What moved, what each rank of each replica holds, and the learner's checksums. Raises SyncError.

        Parameters of ``private`` kinds have no checksums. ``behind`` is called once all is under way.
        """
        names = self._receivers.names()
        same = self._met == frozenset(names) and not any(map(self._receivers.stale, names))
        place, self._place = self._place if same else None, None  # until this version has arrived
        place = place or await self._meet()
        sending = asyncio.ensure_future(self._senders.send(version))
        loading = self._receivers.load(self._path, version, straight=self._met, private=private)
        receiving = asyncio.ensure_future(loading)
        behind()
        ended: dict[object, float] = {}
        for future in (sending, receiving):
            future.add_done_callback(lambda future: ended.update({future: time.perf_counter()}))
        await self._both(place, f"version {version}", sending, receiving)
        self._place = place
        (update, reports), said = sending.result(), receiving.result()
        ours, theirs = update.verify_seconds, seconds_waited(said)
        without = max(ended[sending] - ours, ended[receiving] - theirs)
        update = replace(update, verify_seconds=max(ended.values()) - without)
        return update, said, mirror.Seal(checksums=sealed_by(reports, mirror.shapes(self._path)))

    async def _both(
        self, place: Place, what: str, sending: asyncio.Future[Any], receiving: asyncio.Future[Any]
    ) -> None:
        """Wait for both ends; where one fails, or a server dies, the other is cancelled.

        Raises what one of them raised, or ReplicasLost where a server died: the others can be met again.
        """
        both, dead = asyncio.gather(sending, receiving), asyncio.ensure_future(self._one_dies())
        both.add_done_callback(lambda done: done.cancelled() or done.exception())  # which is raised below
        try:
            await asyncio.wait((both, dead), return_when=asyncio.FIRST_COMPLETED)
            if not both.done() or both.exception() is not None:
                self._keeper.cancel(place, what, str(both.exception()) if both.done() else "a server died")
                await asyncio.wait((sending, receiving))
                await asyncio.wait([dead], timeout=_GRACE_SECONDS)  # what a death breaks may be heard before
                failed = sending.exception(), receiving.exception()
                if any(failed):
                    raise self._cause(place, what, *failed, died=dead.done())
            await both
        finally:
            dead.cancel()

    def _cause(
        self, place: Place, what: str, sender: BaseException | None, receiver: BaseException | None, *, died: bool
    ) -> BaseException:
        """The error of the end whose ranks did not come to ``what``, or that a server died.

        The other end came and was cancelled. The servers' error is the cause where both came, or both did not.
        """
        absent = self._keeper.absent(place, what)
        learner_alone = bool(absent) and absent[-1] < self._learner_ranks
        cause = sender if receiver is None or (sender is not None and learner_alone) else receiver
        assert cause is not None
        if died and isinstance(cause, SyncError):
            return ReplicasLost(f"a server died while the learner met it, or sent to it: {cause}")
        return cause

    async def _one_dies(self) -> None:
        while self._met <= frozenset(self._receivers.names()):
            await asyncio.sleep(_LOOK_SECONDS)

    async def _meet(self) -> Place:
        boxes = await self._receivers.boxes(self._path)
        first: dict[str, int] = {}
        ranks: list[Boxes] = []
        for name, said in boxes.items():
            first[name] = self._learner_ranks + len(ranks)
            ranks += said
        place = self._new_place(self._learner_ranks + len(ranks))
        self._met = frozenset(boxes)
        joining = asyncio.ensure_future(self._senders.join_engines(place, ranks))
        joined = asyncio.ensure_future(self._receivers.join(self._path, asdict(place), first))
        await self._both(place, JOINING, joining, joined)
        return place
