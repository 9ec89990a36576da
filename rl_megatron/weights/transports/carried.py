"""Executes a plan into engine ranks through a learner rank beside each, its *carrier*: no engine joins a process group.

Learner ranks send each other boxes over a group of their own, gloo or NCCL, and each carrier hands what arrives on,
unopened, through the ring that it shares with its engine rank: it arrives in the ring's slot. So a carrier has two send
buffers, and two slots for each engine rank that it carries: on GPUs one rank, four buckets. What a carrier holds itself
it packs into the slot.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from rl_megatron.types import WeightUpdate
from rl_megatron.weights.plans.plan import Place, Plan
from rl_megatron.weights.plans.transfers import Transfer
from rl_megatron.weights.transports.buckets import Bucket
from rl_megatron.weights.transports.cuda_ipc import CudaRings, uuid_of
from rl_megatron.weights.transports.ends import Parcel, PlanEnds, handshakes_of
from rl_megatron.weights.transports.joined import Member
from rl_megatron.weights.transports.process_group import Exchange, Operation, Step
from rl_megatron.weights.transports.shared_memory import SLOTS, Rings, RingTransport

_RINGS: Mapping[str, type[Rings]] = {"cpu": Rings, "cuda": CudaRings}
_Turn = tuple[int, int, int]  # the turn of a bucket, its number there, and how far its sender is from the carrier


def own_place(tensors: Iterable[Tensor]) -> Place:
    """Where this process is: its node, and the GPU of its first tensor on one, empty if there is none."""
    gpu = next((uuid_of(t.device.index) for t in tensors if t.device.type == "cuda"), "")
    return Place(node=Path("/proc/sys/kernel/random/boot_id").read_text(), name=socket.gethostname(), gpu=gpu)


class Carrier(Exchange):
    """A learner rank's end. The constructor is collective over ``member``'s ranks; errors are those of `PlanEnds`.

    ``carriers[r]`` is the carrier of engine rank r, which `moves` numbers after the learner's.
    """

    def __init__(
        self, moves: Plan, carriers: Sequence[int], *, src: Mapping[str, Tensor], member: Member, bucket_bytes: int
    ) -> None:
        ends = PlanEnds(moves, rank=member.rank, src=src, dst={}, exchange=handshakes_of(member), verify=False)
        super().__init__(ends, member.group)
        self._carriers, self._learners = carriers, member.rendezvous.learners
        mine = [self._learners + rank for rank, carrier in enumerate(carriers) if carrier == member.rank]
        handed = {to: self._in_turn(moves.receives(to), to, bucket_bytes) for to in mine}
        self._handed = {to: turns for to, turns in handed.items() if turns}
        self._rings = _RINGS[ends.device.type](
            ends,
            {(ends.rank, to): max(b.num_bytes for _, _, b in turns) for to, turns in self._handed.items()},
            self._bound,
            peers=member,
            timeout_seconds=member.rendezvous.seconds,
        )
        self._slots = {id(p): (link, i) for link in self._rings.links for i, p in enumerate(link.parcels)}
        self.steps = self._schedule(ends.buckets(bucket_bytes))

    @override
    def move(self, version: int) -> WeightUpdate:
        """Returns when the engine ranks that this one carries have unpacked everything."""
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
        """Start a step's parcels, or pack what is this rank's own, once the slot is empty."""
        ops: list[Operation] = []
        if (into := step.receive) is not None:
            link, number = self._slots[id(into)]
            self._rings.wait_for_slot(link, number, version)
            if into.leaving:
                self.ends.pack(into, version)
            else:
                ops.append((dist.irecv, into.buffer, into.peer))
        if step.send is not None:
            self.ends.pack(step.send, version)
            ops.append((dist.isend, step.send.buffer, self._carriers[step.send.peer - self._learners]))
        return Step(send=step.send, receive=step.receive, works=self.start(ops, version))

    @override
    def arrived(self, parcel: Parcel, version: int) -> None:
        """Hand a parcel on."""
        link, _ = self._slots[id(parcel)]
        link.announce(self.ends)

    def _in_turn(self, moved: Iterable[Transfer], to: int, bucket_bytes: int) -> list[tuple[_Turn, int, Bucket]]:
        pairs: defaultdict[int, list[Transfer]] = defaultdict(list)
        for transfer in moved:
            pairs[transfer.src_rank].append(transfer)
        buckets = {frm: self.ends.cut(to, transfers, bucket_bytes) for frm, transfers in pairs.items()}
        return in_turn(buckets, self.ends.rank, self._learners)

    def _bound(self, to: int, slots: Tensor, _leaving: bool) -> list[Parcel]:
        """Parcels that lie in the slots: this rank's own boxes, or what others send."""
        out = []
        for i, (_, frm, bucket) in enumerate(self._handed[to]):
            slot = slots[i % SLOTS][: bucket.num_bytes]
            own = frm == self.ends.rank
            out.append(self.ends.bind(to, bucket, slot, leaving=True) if own else _unopened(frm, bucket, slot))
        return out

    def _schedule(self, buckets: Mapping[tuple[int, int], list[Bucket]]) -> list[Step]:
        """The steps in the order (turn, bucket, which of a carrier's engine ranks, distance), the same on all ranks.

        In each a rank sends to the one at that distance, and receives from the one at that distance behind it.
        """
        rank, lanes = self.ends.rank, [self._carriers[:i].count(c) for i, c in enumerate(self._carriers)]
        sends: dict[tuple[int, int, int, int], tuple[int, Bucket]] = {}
        for (_, to), parts in buckets.items():
            engine = to - self._learners
            distance = (self._carriers[engine] - rank) % self._learners
            if distance:
                sends |= {(bucket.turn, bucket.number, lanes[engine], distance): (to, bucket) for bucket in parts}
        receives: dict[tuple[int, int, int, int], Parcel] = {}
        for link in self._rings.links:
            turns = self._handed[link.peer]
            for ((turn, number, distance), _, _), parcel in zip(turns, link.parcels, strict=True):
                receives[turn, number, lanes[link.peer - self._learners], distance] = parcel
        outgoing = self.two_buffers([bucket for _, bucket in sends.values()])
        return [
            Step(
                send=self.ends.bind(*sends[key], outgoing[i % 2], leaving=True) if key in sends else None,
                receive=receives.get(key),
            )
            for i, key in enumerate(sorted(sends.keys() | receives.keys()))
        ]


def carried(
    moves: Plan, carriers: Sequence[int], *, dst: Mapping[str, Tensor], member: Member, bucket_bytes: int
) -> RingTransport:
    """An engine rank's end; as `Carrier`."""
    exchange, learners = handshakes_of(member), member.rendezvous.learners
    ends = PlanEnds(moves, rank=member.rank, src={}, dst=dst, exchange=exchange, verify=False)
    carrier = carriers[ends.rank - learners]
    turns = in_turn({frm: parts for (frm, _), parts in ends.buckets(bucket_bytes).items()}, carrier, learners)

    def bind(_peer: int, slots: Tensor, _leaving: bool) -> list[Parcel]:
        return [ends.bind(frm, b, slots[i % SLOTS], leaving=False) for i, (_, frm, b) in enumerate(turns)]

    slots = {(carrier, ends.rank): max(bucket.num_bytes for _, _, bucket in turns)} if turns else {}
    rings = _RINGS[ends.device.type](ends, slots, bind, peers=member, timeout_seconds=member.rendezvous.seconds)
    return RingTransport(ends, rings)


def in_turn(buckets: Mapping[int, Sequence[Bucket]], carrier: int, learners: int) -> list[tuple[_Turn, int, Bucket]]:
    """The buckets into an engine rank, by sender, in the order in which they go through its ring."""
    turns = [
        ((bucket.turn, bucket.number, (carrier - frm) % learners), frm, bucket)
        for frm, parts in buckets.items()
        for bucket in parts
    ]
    return sorted(turns, key=lambda turn: turn[0])


def _unopened(frm: int, bucket: Bucket, slot: Tensor) -> Parcel:
    return Parcel(
        peer=frm,
        bucket=bucket,
        leaving=False,
        buffer=slot,
        payload=slot,
        trailer=slot[:0].view(torch.int64),
        views=[],
        held={},
    )
