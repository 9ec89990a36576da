"""Executes a plan over one torch.distributed group, gloo and NCCL alike: every process runs the same schedule.

In a round a process sends to one other and receives from one other, so no process has two senders at a time. All rounds
are gone through in each of the receivers' turns (`LayerOrder`), so each gets its layers one after the other. A pair's
transfers are packed into flat buckets. While one bucket is in flight the next is packed, so a process has two send and
two receive buffers, allocated once.

A version is committed in two phases: it is staged in place, and served once every process has staged it. Staging
overwrites the engine's only copy, so the engine serves nothing from then until the commit. The controller stages on all
processes, then commits on all or none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from rl_megatron.errors import SyncError
from rl_megatron.types import WeightUpdate
from rl_megatron.weights.plans.plan import Plan
from rl_megatron.weights.routes.ends import BoundBucket, Bucket, PlanEndpoint, exchange_handshakes
from rl_megatron.weights.routes.rendezvous import GroupPeers

if TYPE_CHECKING:
    from rl_megatron.feature import Compression

_WHOLE = -1  # stands for a size: the parcel is sent as it is


class Transport(Protocol):
    """Executes a plan. Every process of the plan has one, with its own ends of it."""

    def move(self, version: int) -> WeightUpdate:
        """Writes this process's destination tensors in place and verifies them. All processes call it together.

        Raises CorruptionError, after moving everything, if a box is not what was sent. Raises SyncError if a process
        was lost. Either way the destination is partly written.
        """
        ...

    def close(self) -> None:
        """Releases buffers and connections. Not collective."""
        ...


class ServableEngine(Protocol):
    """An engine that serves a version of the weights, or none."""

    def withdraw(self) -> None:
        """Serves nothing until `serve`."""
        ...

    def serve(self, version: int) -> None:
        """Serves the weights now in place as ``version``."""
        ...


class Staging:
    """The staging of one process's engine, which a transport fills. A process that only sends has no engine."""

    def __init__(self, transport: Transport, engine: ServableEngine | None) -> None:
        self._transport, self._engine = transport, engine
        self._staged: int | None = None

    def stage(self, version: int) -> WeightUpdate:
        """Phase one: withdraws the engine, moves and verifies. Collective; raises like `Transport.move`."""
        self._staged = None
        if self._engine is not None:
            self._engine.withdraw()
        update = self._transport.move(version)
        self._staged = version
        return update

    def commit(self, version: int) -> None:
        """Phase two: serves the staged version. Raises SyncError for any other version."""
        if self._staged != version:
            raise SyncError(
                f"version {version} cannot be committed, because what is staged here is "
                f"{'nothing' if self._staged is None else f'version {self._staged}'}; push it again"
            )
        self._staged = None
        if self._engine is not None:
            self._engine.serve(version)

    def close(self) -> None:
        """Closes the transport."""
        self._transport.close()


Operation = tuple[Callable[..., object], Tensor, int]
"""torch.distributed's isend or irecv, what is sent or where it arrives, and the peer."""

Key = tuple[int, ...]
"""The place of a parcel in the order of all that processes send each other, equal at both ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The concurrent sends and receives of a process."""

    send: BoundBucket | None
    receive: BoundBucket | None
    works: list[dist.Work] = field(default_factory=list)


class Exchange(Transport):
    """Sends and receives over a group, in ``steps`` whose order is the same on all processes."""

    def __init__(self, ends: PlanEndpoint, group: dist.ProcessGroup | None) -> None:
        self.ends, self.group = ends, group
        self.steps: list[Step] = []

    @override
    def move(self, version: int) -> WeightUpdate:
        """A lost process shows when its connection breaks or the group's timeout ends."""
        started = time.perf_counter()
        self.ends.begin()
        under_way = Step(send=None, receive=None)
        for step in self.steps:
            posted = self.post(step, version)
            self._finish(under_way, version)
            under_way = posted
        self._finish(under_way, version)
        self.ends.settle()
        verified = self.ends.finish(version)
        num_bytes = sum(step.receive.bucket.num_bytes for step in self.steps if step.receive)
        seconds = time.perf_counter() - started
        return WeightUpdate(version=version, num_bytes=num_bytes, seconds=seconds, verify_seconds=verified)

    @override
    def close(self) -> None:
        self.steps, self.group = [], None

    def ordered_steps(self, sends: Mapping[Key, tuple[int, Bucket]], receives: Mapping[Key, BoundBucket]) -> list[Step]:
        """The steps in the order of the keys, which is the same on all processes; what is sent has two buffers."""
        outgoing = self._two_buffers([bucket for _, bucket in sends.values()])
        return [
            Step(
                send=self.ends.bind(*sends[key], outgoing[i % 2], leaving=True) if key in sends else None,
                receive=receives.get(key),
            )
            for i, key in enumerate(sorted(sends.keys() | receives.keys()))
        ]

    def arriving(self, receives: Mapping[Key, tuple[int, Bucket]]) -> dict[Key, BoundBucket]:
        """The parcels that arrive from other processes, in two buffers."""
        incoming = self._two_buffers([bucket for _, bucket in receives.values()])
        return {
            key: self.ends.bind(*receives[key], incoming[i % 2], leaving=False)
            for i, key in enumerate(sorted(receives))
        }

    def _two_buffers(self, buckets: Sequence[Bucket]) -> list[Tensor]:
        """Two buffers, used in turn: a step's buffer is free again two steps later."""
        largest = max((self.ends.wire_bytes(bucket) for bucket in buckets), default=0)
        return [torch.empty(largest, dtype=torch.uint8, device=self.ends.device) for _ in range(2)]

    def post(self, step: Step, version: int) -> Step:
        """Starts a step's parcels."""
        ops: list[Operation] = []
        if step.receive is not None:
            ops.append((dist.irecv, step.receive.buffer, step.receive.peer))
        if step.send is not None:
            self.ends.pack(step.send, version)
            ops.append((dist.isend, step.send.buffer, step.send.peer))
        return Step(send=step.send, receive=step.receive, works=self.start(ops, version))

    def start(self, ops: Sequence[Operation], version: int) -> list[dist.Work]:
        """Starts sends and receives together. Raises SyncError for a lost process."""
        made = [dist.P2POp(op, buffer, group=self.group, group_peer=peer) for op, buffer, peer in ops]
        try:
            return list(dist.batch_isend_irecv(made)) if made else []
        except RuntimeError as error:
            peers = ", ".join(f"rank {peer}" for _, _, peer in ops)
            raise SyncError(
                f"version {version} is not served: rank {self.ends.rank} cannot reach {peers} ({error}). Start the "
                "lost process again, connect again and push"
            ) from error

    def _finish(self, step: Step, version: int) -> None:
        self.wait(step, version)
        if step.receive is not None:
            self.arrived(step.receive, version)

    def wait(self, step: Step, version: int) -> None:
        """Waits for a step's parcels. Raises SyncError for a lost process."""
        try:
            for work in step.works:
                work.wait()
        except RuntimeError as error:
            raise SyncError(_awaited(step, version, self.ends.rank, error)) from error

    def arrived(self, parcel: BoundBucket, version: int) -> None:
        """Unpacks a parcel after its bytes have arrived."""
        self.ends.unpack(parcel, version)


class ProcessGroupTransport(Exchange):
    """Moves the plan's weights each time ``move`` is called. Every process of ``group`` makes one and calls it alike.

    Processes of ``moves`` are ranks of ``group`` (None: the default group). ``src`` and ``dst`` are this process's
    tensors by local name: all that the plan reads or writes here, and in ``dst`` nothing else (see `PlanEndpoint`, also
    for what is raised). No buffer is larger than ``bucket_bytes`` and its digests. With a ``compression``, which every
    process has of its own, parcels travel as it writes them: their sizes first. Making one is collective."""

    def __init__(
        self,
        moves: Plan,
        *,
        src: Mapping[str, Tensor],
        dst: Mapping[str, Tensor],
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = 64 * 2**20,
        verify: bool = True,
        compression: Compression | None = None,
    ) -> None:
        peers = GroupPeers(group)
        exchange = exchange_handshakes(peers)
        super().__init__(
            PlanEndpoint(moves, rank=peers.rank, src=src, dst=dst, exchange=exchange, verify=verify), group
        )
        rounds, rank = moves.rounds(), self.ends.rank
        sends: dict[Key, tuple[int, Bucket]] = {}
        receives: dict[Key, tuple[int, Bucket]] = {}
        for (frm, to), parts in self.ends.buckets(lambda receiver: bucket_bytes).items():
            mine, peer = (sends, to) if frm == rank else (receives, frm)
            mine |= {
                (bucket.layer_position, rounds.pair_round(frm, to), bucket.number): (peer, bucket) for bucket in parts
            }
        self.steps = self.ordered_steps(sends, self.arriving(receives))
        self._compression = compression
        self._frames: dict[int, Tensor] = {}  # memory of parcels that arrive compressed
        self._received = 0

    @override
    def move(self, version: int) -> WeightUpdate:
        """Moves as the base class does; with a compression ``num_bytes`` are those that arrive, without digests."""
        if self._compression is None:
            return super().move(version)
        self._compression.begin(self._numbers_of_all)
        self._frames, self._received = {}, 0
        update = super().move(version)
        self._compression.finished(version)
        return replace(update, num_bytes=self._received)

    @override
    def post(self, step: Step, version: int) -> Step:
        if (compression := self._compression) is None:
            return super().post(step, version)
        frame = None
        if step.send is not None:
            self.ends.pack(step.send, version)
            frame = compression.pack(step.send)
        size = _WHOLE if frame is None else len(frame)
        leaving, coming = (torch.tensor([n], device=self.ends.device) for n in (size, _WHOLE))
        sizes: list[Operation] = []
        if step.receive is not None and compression.compresses(step.receive.peer):
            sizes.append((dist.irecv, coming, step.receive.peer))
        if step.send is not None and compression.compresses(step.send.peer):
            sizes.append((dist.isend, leaving, step.send.peer))
        self.wait(Step(send=step.send, receive=step.receive, works=self.start(sizes, version)), version)
        ops: list[Operation] = []
        if step.receive is not None:
            ops.append((dist.irecv, self._room(step.receive, int(coming)), step.receive.peer))
        if step.send is not None:
            ops.append((dist.isend, step.send.buffer if frame is None else frame, step.send.peer))
        return Step(send=step.send, receive=step.receive, works=self.start(ops, version))

    @override
    def arrived(self, parcel: BoundBucket, version: int) -> None:
        frame = self._frames.pop(id(parcel), None)
        if frame is not None and self._compression is not None:
            self._compression.unpack(frame, parcel)
        super().arrived(parcel, version)

    def _room(self, parcel: BoundBucket, size: int) -> Tensor:
        """The memory in which ``size`` compressed bytes arrive, or those of the whole parcel."""
        if size == _WHOLE:
            self._received += parcel.bucket.num_bytes
            return parcel.buffer
        self._frames[id(parcel)] = frame = torch.empty(size, dtype=torch.uint8, device=self.ends.device)
        self._received += size - parcel.trailer.nbytes
        return frame

    def _numbers_of_all(self, number: int) -> list[int]:
        """A number of each process, by rank. Collective."""
        mine = torch.tensor([number], device=self.ends.device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(everyone, mine, group=self.group)
        return [int(theirs) for theirs in everyone]


def _awaited(step: Step, version: int, rank: int, error: Exception) -> str:
    """Describes what a process waited for when another was lost."""
    waits = []
    for parcel, verb in ((step.receive, "from"), (step.send, "to")):
        if parcel is not None:
            first = parcel.bucket.parts[0]
            waits.append(
                f"{parcel.bucket.num_bytes} bytes {verb} rank {parcel.peer}, which begin with "
                f"{first.dst_param} {first.dst_box}"
            )
    return (
        f"version {version} is not served: rank {rank} waited for {' and '.join(waits)}; a process was lost or is "
        f"late ({error}). Start the lost process again, connect again and push"
    )
