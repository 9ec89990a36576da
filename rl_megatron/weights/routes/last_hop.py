"""Executes a plan into engine ranks, over one process group and through memory that a learner rank and they map.

Each pair that maps has a ring of slots. On CPUs (Linux) a ring is an anonymous file, small enough to stay in the
cores' shared cache, so that main memory is only read at the source and written at the destination. A Unix socket
carries a byte for each slot filled or emptied. It wakes the other process, orders the accesses, and closes immediately
when a process dies.
Files pass through the socket (memfd_create, SCM_RIGHTS), and sockets have abstract names: none are in the file system,
and the kernel removes them with their processes. Every user of the node can read these names and connect, and is turned
away.

On GPUs (CUDA IPC) the rings are device memory, and the socket carries their handles. A slot is announced after the GPU
has finished its copies. Upstream: torch ``multiprocessing/reductions.py``, with its handles but without its pickles. A
handle holds the sender's number of the GPU, which may differ from the receiver's under another CUDA_VISIBLE_DEVICES, so
the GPU's UUID is sent too, and the receiver substitutes its own number.

An engine rank that is not a member of the process group has a learner rank as its relay (`receivers_of`). The relay
passes on, unopened, what others send it, through the ring that both share: it arrives in the ring's slot. So a learner
rank has two send buffers, and two slots for each engine rank that it relays to. It packs its own boxes into the slot.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import select
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from rl_megatron.errors import SyncError, WeightError
from rl_megatron.types import WeightUpdate
from rl_megatron.weights.plans.plan import Plan, Transfer
from rl_megatron.weights.routes.ends import BoundBucket, Bucket, PlanEndpoint, exchange_handshakes
from rl_megatron.weights.routes.group import Exchange, Key, Operation, Step, Transport
from rl_megatron.weights.routes.rendezvous import Peers, RendezvousMember, gpu_uuid

SLOTS = 2
_STEP, _GAVE_UP = b".", b"!"
_CLOSED = "its connection is closed"
_PAGE = 4096
_TURN_SECONDS = 0.05  # one wait for a connection
_HELLO = struct.Struct("=qqq")  # the sender's rank, bytes of a slot, bytes that follow
_CREDENTIALS = struct.Struct("=iii")  # pid, uid, gid (SO_PEERCRED)


class _LostError(Exception):
    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} was lost or is late: {why}")
        self.rank = rank


class Link:
    """This process's end of one pair: a socket, and parcels each bound to its slot of the ring."""

    def __init__(self, peer: int, connection: socket.socket, parcels: list[BoundBucket], *, leaving: bool) -> None:
        connection.setblocking(False)
        self.peer, self.connection, self.leaving = peer, connection, leaving
        self.parcels = parcels
        self.done = self.told = 0  # parcels packed or unpacked here; unpacked or packed there

    @property
    def ready(self) -> bool:
        """True if a slot can be filled, or emptied."""
        if self.leaving:
            return self.done < len(self.parcels) and self.done < self.told + SLOTS
        return self.done < self.told

    @property
    def finished(self) -> bool:
        """True if every parcel has been unpacked."""
        return (self.told if self.leaving else self.done) == len(self.parcels)

    def step(self, ends: PlanEndpoint, version: int) -> None:
        """Fills or empties one slot, and notifies the other end."""
        (ends.pack if self.leaving else ends.unpack)(self.parcels[self.done], version)
        self.announce(ends)

    def announce(self, ends: PlanEndpoint) -> None:
        """Notifies the other end of the slot that was filled or emptied."""
        ends.settle()
        self.done += 1
        with contextlib.suppress(OSError):  # gone: `listen` says so
            self.connection.send(_STEP)  # there is room: fewer are on the way than there are slots

    def listen(self) -> None:
        """Reads the other end's notifications. Raises _LostError if it is gone, or gave up because another is."""
        try:
            said = self.connection.recv(_PAGE)
        except OSError as error:
            raise _LostError(self.peer, str(error)) from error
        if not said:
            raise _LostError(self.peer, _CLOSED)
        steps, gave_up, lost = said.partition(_GAVE_UP)
        if gave_up:
            raise _LostError(int(lost), f"rank {self.peer} says so")
        self.told += len(steps)

    def give_up(self, lost: int) -> None:
        """Sends the lost rank to the other end, if that still runs, and closes."""
        with contextlib.suppress(OSError):
            self.connection.send(_GAVE_UP + str(lost).encode())
        self.connection.close()


Bind = Callable[[int, Tensor, bool], list[BoundBucket]]
"""The parcels of a pair with a peer, in the order in which they use the slots [number, bytes] uint8 in turn; whether
they leave this process."""


class Rings:
    """The rings of one process; making them is collective over ``peers``.

    ``slots``: for each pair (sender, receiver) with this process, the bytes of a slot. After a process is lost the
    others need new rings. A process silent for ``timeout_seconds`` is lost, also while they are made: SyncError.
    """

    def __init__(
        self,
        ends: PlanEndpoint,
        slots: Mapping[tuple[int, int], int],
        bind: Bind,
        *,
        peers: Peers,
        timeout_seconds: float,
    ) -> None:
        self.ends, self._bind, self._timeout = ends, bind, timeout_seconds
        self.links = self._connect(slots, peers)

    def begin(self) -> None:
        """Starts a new version: every slot is empty."""
        for link in self.links:
            link.done = link.told = 0

    def run(self, version: int) -> None:
        """Fills and empties slots until every parcel has been unpacked. Raises SyncError."""
        try:
            unfinished = [link for link in self.links if not link.finished]
            while unfinished:
                ready = [link for link in unfinished if link.ready]
                for link in ready:
                    link.step(self.ends, version)
                unfinished = [link for link in unfinished if not link.finished]
                self._hear(unfinished, wait=not ready)
        except _LostError as error:
            raise self._failed(version, error) from error

    def wait_for_slot(self, link: Link, number: int, version: int) -> None:
        """Waits until the parcel before the last in the slot of parcel ``number`` is unpacked. Raises SyncError."""
        try:
            while number >= link.told + SLOTS:
                self._hear([link], wait=True)
        except _LostError as error:
            raise self._failed(version, error) from error

    def close(self) -> None:
        """Closes the connections, which the other ends see."""
        for link in self.links:
            link.connection.close()
        self.links = []

    def _hear(self, links: list[Link], *, wait: bool) -> None:
        """Reads all notifications; if there is nothing to do, sleeps until one arrives."""
        poll = select.poll()
        waiting = {link.connection.fileno(): link for link in links}
        for descriptor in waiting:
            poll.register(descriptor, select.POLLIN)
        heard = poll.poll(self._timeout * 1000 if wait and links else 0)
        if wait and links and not heard:
            raise _LostError(links[0].peer, f"it said nothing for {self._timeout:g} s")
        for descriptor, _ in heard:
            waiting[descriptor].listen()

    def _failed(self, version: int, error: _LostError) -> SyncError:
        """Gives up on every link, so that no process waits for this one."""
        waits = [link for link in self.links if not link.finished and not link.ready]
        told = []
        for link in sorted(waits, key=lambda link: link.peer != error.rank)[:3]:
            at = link.told if link.leaving else link.done
            part = link.parcels[at].bucket.parts[0]
            told.append(
                f"rank {link.peer} to {'empty' if link.leaving else 'fill'} slot {at} of {len(link.parcels)} "
                f"({part.dst_param} {part.dst_box})"
            )
        for link in self.links:
            link.give_up(error.rank)
        self.links = []
        return SyncError(
            f"version {version} is not served: {error}. Rank {self.ends.rank} waited for {', '.join(told)}. Start the "
            "lost process again, connect again and push"
        )

    def _connect(self, slots: Mapping[tuple[int, int], int], peers: Peers) -> list[Link]:
        """A link for every pair, sending links first. Raises SyncError."""
        rank = self.ends.rank
        with socket.socket(socket.AF_UNIX) as listener:
            listener.settimeout(_TURN_SECONDS)
            listener.bind(b"\0rl_megatron-" + secrets.token_hex(16).encode())
            listener.listen(peers.size)
            addresses = peers.gather(listener.getsockname().hex())
            receivers = [(to, bytes.fromhex(addresses[to]), slots[rank, to]) for frm, to in slots if frm == rank]
            return self._links(listener, receivers, [frm for frm, to in slots if to == rank])

    def _links(
        self, listener: socket.socket, receivers: Sequence[tuple[int, bytes, int]], senders: Sequence[int]
    ) -> list[Link]:
        """A link to each receiver (its rank, its socket's address, bytes of a slot), then from each sender."""
        links, missing = list[Link](), [*(to for to, _, _ in receivers), *senders]
        arrived: list[socket.socket] = []
        try:
            for to, address, num_bytes in receivers:
                links.append(self._offer(to, self._reach(address, listener, arrived), num_bytes))
                missing.remove(to)
            end = time.monotonic() + self._timeout
            while missing:
                if arrived:
                    links.append(self._taken(arrived.pop(0)))
                    missing.remove(links[-1].peer)
                elif time.monotonic() > end:
                    raise TimeoutError("timed out")
                else:
                    self._admit(listener, arrived)
        except (ConnectionError, TimeoutError) as error:
            for link in links:
                link.give_up(missing[0])
            offering = len(missing) > len(senders)
            awaited = f"{missing[0]} to take" if offering else f"{' or '.join(map(str, missing))} to offer"
            raise SyncError(
                f"not connected: rank {self.ends.rank} waited for rank {awaited} a ring of slots, and that is lost or "
                f"late: {error}. Start the lost process again and connect again"
            ) from error
        finally:
            for connection in arrived:
                connection.close()
        return links

    def _reach(self, address: bytes, listener: socket.socket, arrived: list[socket.socket]) -> socket.socket:
        """A connection to another process. While strangers fill its queue this process empties its own."""
        end = time.monotonic() + self._timeout
        while True:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(self._timeout)
            try:
                connection.connect(address)
                return connection
            except BlockingIOError as error:
                connection.close()
                if time.monotonic() > end:
                    raise TimeoutError("the queue of its socket stays full; see who connects to it (ss -xp)") from error
            self._admit(listener, arrived)

    def _admit(self, listener: socket.socket, arrived: list[socket.socket]) -> None:
        """Accepts a connection, if there is one soon; nothing is read from another user's."""
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            return
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] == os.getuid():
            connection.settimeout(self._timeout)
            arrived.append(connection)
        else:
            connection.close()

    def _offer(self, to: int, connection: socket.socket, num_bytes: int) -> Link:
        slot = -(-num_bytes // _PAGE) * _PAGE
        ring, told, handles = self._new_ring(slot * SLOTS)
        try:
            socket.send_fds(connection, [_HELLO.pack(self.ends.rank, slot, len(told)), told], handles)
            return Link(to, connection, self._bind(to, ring.view(SLOTS, -1), True), leaving=True)
        finally:
            for handle in handles:
                os.close(handle)

    def _taken(self, connection: socket.socket) -> Link:
        """Returns the link that another process offers."""
        hello, handles, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
        try:
            if len(hello) < _HELLO.size:
                raise ConnectionError(_CLOSED)
            frm, slot, length = _HELLO.unpack(hello)
            told = b""
            while len(told) < length:
                if not (part := connection.recv(length - len(told))):
                    raise ConnectionError(_CLOSED)
                told += part
            ring = self._open_ring(slot * SLOTS, told, handles)
            return Link(frm, connection, self._bind(frm, ring.view(SLOTS, -1), False), leaving=False)
        finally:
            for handle in handles:
                os.close(handle)

    def _new_ring(self, num_bytes: int) -> tuple[Tensor, bytes, list[int]]:
        """[num_bytes] uint8 that another process can map; what describes it there, and its file descriptors."""
        handle = os.memfd_create("weights", os.MFD_CLOEXEC)
        os.ftruncate(handle, num_bytes)
        return self._open_ring(num_bytes, b"", [handle]), b"", [handle]

    def _open_ring(self, num_bytes: int, handle: bytes, handles: list[int]) -> Tensor:
        """The other process's ring."""
        return torch.frombuffer(mmap.mmap(handles[0], num_bytes), dtype=torch.uint8)


class RingTransport(Transport):
    """Moves what is in ``rings`` each time ``move`` is called."""

    def __init__(self, ends: PlanEndpoint, rings: Rings) -> None:
        self.ends, self._rings = ends, rings

    @override
    def move(self, version: int) -> WeightUpdate:
        started = time.perf_counter()
        self.ends.begin()
        self._rings.begin()
        self._rings.run(version)
        verified = self.ends.finish(version)
        arrived = (parcel for link in self._rings.links if not link.leaving for parcel in link.parcels)
        num_bytes = sum(parcel.bucket.num_bytes for parcel in arrived)
        seconds = time.perf_counter() - started
        return WeightUpdate(version=version, num_bytes=num_bytes, seconds=seconds, verify_seconds=verified)

    @override
    def close(self) -> None:
        """Closes the connections, which the other ends see."""
        self._rings.close()


class CudaRings(Rings):
    """Rings between processes whose tensors are on one GPU."""

    def _new_ring(self, num_bytes: int) -> tuple[Tensor, bytes, list[int]]:
        ring = torch.empty(num_bytes, dtype=torch.uint8, device=self.ends.device)
        handle = ring.untyped_storage()._share_cuda_()
        told = [part.hex() if isinstance(part, bytes) else part for part in handle[1:]]
        return ring, json.dumps([gpu_uuid(handle[0]), *told]).encode(), []

    def _open_ring(self, num_bytes: int, handle: bytes, handles: list[int]) -> Tensor:
        uuid, *parts = json.loads(handle)
        raw = [bytes.fromhex(part) if isinstance(part, str) else part for part in parts]
        storage = torch.UntypedStorage._new_shared_cuda(_number(uuid), *raw)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:num_bytes]


def _number(uuid: str) -> int:
    """This process's number of the GPU. Raises WeightError if it does not see the GPU."""
    seen = [gpu_uuid(number) for number in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise WeightError(
            f"CUDA IPC maps memory of GPU {uuid}, and this process sees {', '.join(seen) or 'none'} "
            "(CUDA_VISIBLE_DEVICES); set weights.transport=file"
        )
    return seen.index(uuid)


_RINGS: Mapping[str, type[Rings]] = {"cpu": Rings, "cuda": CudaRings}


class LearnerEnd(Exchange):
    """A learner rank's end. The constructor is collective over ``member``'s ranks; errors are those of `PlanEndpoint`.

    ``bytes_into`` gives the most bytes of a bucket into an engine rank's process. Parcels from others to the engine
    ranks that this one relays to arrive here, and are passed on.
    """

    def __init__(
        self, moves: Plan, *, src: Mapping[str, Tensor], member: RendezvousMember, bytes_into: Callable[[int], int]
    ) -> None:
        ends = PlanEndpoint(
            moves, rank=member.rank, src=src, dst={}, exchange=exchange_handshakes(member), verify=False
        )
        super().__init__(ends, member.group)
        self._member = member
        handed = {
            to: self._into(moves.receives(to), to, bytes_into(to)) for to in member.relayed_processes(member.rank)
        }
        self._handed = {to: turns for to, turns in handed.items() if turns}
        self._rings = _RINGS[ends.device.type](
            ends,
            {(ends.rank, to): max(b.num_bytes for _, _, b in turns) for to, turns in self._handed.items()},
            self._bound,
            peers=member,
            timeout_seconds=member.rendezvous.seconds,
        )
        self._slots = {id(p): (link, i) for link in self._rings.links for i, p in enumerate(link.parcels)}
        self.steps = self._schedule(ends.buckets(bytes_into))

    @override
    def move(self, version: int) -> WeightUpdate:
        """Returns when the engine ranks that this one relays to have unpacked everything."""
        self._rings.begin()
        update = super().move(version)
        self._rings.run(version)
        return update

    @override
    def close(self) -> None:
        self._rings.close()
        super().close()

    @override
    def post(self, step: Step, version: int) -> Step:
        """Starts a step's parcels, or packs this rank's own, once the slot is empty."""
        ops: list[Operation] = []
        if (into := step.receive) is not None:
            link, number = self._slots[id(into)]
            self._rings.wait_for_slot(link, number, version)
            if into.is_outgoing:
                self.ends.pack(into, version)
            else:
                ops.append((dist.irecv, into.buffer, into.peer))
        if step.send is not None:
            self.ends.pack(step.send, version)
            ops.append((dist.isend, step.send.buffer, self._member.receiver_number(step.send.peer)))
        return Step(send=step.send, receive=step.receive, works=self.start(ops, version))

    @override
    def arrived(self, parcel: BoundBucket, version: int) -> None:
        """Hands a parcel on."""
        link, _ = self._slots[id(parcel)]
        link.announce(self.ends)

    def _into(self, moved: Iterable[Transfer], to: int, bucket_bytes: int) -> list[tuple[Key, int, Bucket]]:
        pairs: defaultdict[int, list[Transfer]] = defaultdict(list)
        for transfer in moved:
            pairs[transfer.src_rank].append(transfer)
        return run_rounds(
            {frm: self.ends.split_buckets(to, some, bucket_bytes) for frm, some in pairs.items()}, to, self._member
        )

    def _bound(self, to: int, slots: Tensor, _leaving: bool) -> list[BoundBucket]:
        """Parcels that lie in the slots: this rank's own boxes, or what others send."""
        out = []
        for i, (_, frm, bucket) in enumerate(self._handed[to]):
            slot = slots[i % SLOTS][: self.ends.wire_bytes(bucket)]
            own = frm == self.ends.rank
            out.append(self.ends.bind(to, bucket, slot, leaving=True) if own else _unopened(frm, bucket, slot))
        return out

    def _schedule(self, buckets: Mapping[tuple[int, int], list[Bucket]]) -> list[Step]:
        """The steps of what goes over the group, and of this rank's own boxes for engine ranks that it relays to."""
        sends: dict[Key, tuple[int, Bucket]] = {}
        for (frm, to), parts in buckets.items():
            if self._member.receiver_number(to) != frm:
                sends |= {key: (to, bucket) for key, _, bucket in run_rounds({frm: parts}, to, self._member)}
        receives: dict[Key, BoundBucket] = {}
        for link in self._rings.links:
            turns = self._handed[link.peer]
            receives |= {key: parcel for (key, _, _), parcel in zip(turns, link.parcels, strict=True)}
        return self.ordered_steps(sends, receives)


class MemberEnd(Exchange):
    """The end of an engine rank that is a member of the group; as `LearnerEnd`."""

    def __init__(
        self, moves: Plan, *, dst: Mapping[str, Tensor], member: RendezvousMember, bytes_into: Callable[[int], int]
    ) -> None:
        exchange = exchange_handshakes(member)
        super().__init__(
            PlanEndpoint(moves, rank=member.rank, src={}, dst=dst, exchange=exchange, verify=False), member.group
        )
        buckets = {frm: parts for (frm, _), parts in self.ends.buckets(bytes_into).items()}
        turns = run_rounds(buckets, member.rank, member)
        member.gather("")  # other ranks say the addresses of their sockets
        self.steps = self.ordered_steps({}, self.arriving({key: (frm, bucket) for key, frm, bucket in turns}))


def make_local_end(
    moves: Plan, *, dst: Mapping[str, Tensor], member: RendezvousMember, bytes_into: Callable[[int], int]
) -> RingTransport:
    """The end of an engine rank that gets everything from its relay; like `LearnerEnd`."""
    ends = PlanEndpoint(moves, rank=member.rank, src={}, dst=dst, exchange=exchange_handshakes(member), verify=False)
    turns = run_rounds({frm: parts for (frm, _), parts in ends.buckets(bytes_into).items()}, ends.rank, member)

    def bind(_peer: int, slots: Tensor, _leaving: bool) -> list[BoundBucket]:
        return [ends.bind(frm, b, slots[i % SLOTS], leaving=False) for i, (_, frm, b) in enumerate(turns)]

    pair = member.receiver_number(ends.rank), ends.rank
    slots = {pair: max(bucket.num_bytes for _, _, bucket in turns)} if turns else {}
    rings = _RINGS[ends.device.type](ends, slots, bind, peers=member, timeout_seconds=member.rendezvous.seconds)
    return RingTransport(ends, rings)


def run_rounds(
    buckets: Mapping[int, Sequence[Bucket]], to: int, member: RendezvousMember
) -> list[tuple[Key, int, Bucket]]:
    """The buckets into an engine rank's process, by sender, in the order in which it gets them, with their keys.

    A key is (turn, number, which of its receiver's engine ranks, distance). For each, a process of the group sends to
    the process at that distance after it, and receives from the one at that distance before it.
    """
    receiver, lane, size = member.receiver_number(to), member.receiver_lane(to), len(member.grouped)
    turns = [
        ((bucket.layer_position, bucket.number, lane, (receiver - frm) % size), frm, bucket)
        for frm, parts in buckets.items()
        for bucket in parts
    ]
    return sorted(turns, key=lambda turn: turn[0])


def _unopened(frm: int, bucket: Bucket, slot: Tensor) -> BoundBucket:
    return BoundBucket(
        peer=frm,
        bucket=bucket,
        is_outgoing=False,
        buffer=slot,
        payload=slot[: bucket.num_bytes],
        trailer=slot[:0].view(torch.int64),
        views=[],
        local_tensors={},
    )
