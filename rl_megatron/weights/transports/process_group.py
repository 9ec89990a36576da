"""Executes a plan over one torch.distributed group, gloo and NCCL alike: every process runs the same schedule.

In a round a process sends to one other and receives from one other, so no process has two senders at once. A pair's
transfers are packed into flat buckets; while one bucket is in flight the next is packed, so a process has two send and
two receive buffers, allocated once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from rl_megatron.errors import SyncError
from rl_megatron.types import WeightUpdate
from rl_megatron.weights.plans.plan import Plan, Rounds
from rl_megatron.weights.transports.buckets import Bucket
from rl_megatron.weights.transports.commit import Transport
from rl_megatron.weights.transports.ends import Parcel, PlanEnds, handshakes_of

Operation = tuple[Callable[..., object], Tensor, int]
"""torch.distributed's isend or irecv, what is sent or where it arrives, and the peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The concurrent sends and receives of a process."""

    send: Parcel | None
    receive: Parcel | None
    works: list[dist.Work] = field(default_factory=list)


class ProcessGroupTransport(Transport):
    """Moves the plan's weights each time ``move`` is called. Every process of ``group`` makes one and calls it alike.

    Processes of ``moves`` are ranks of ``group`` (None: the default group). ``src`` and ``dst`` are this process's
    tensors by local name: all that the plan reads or writes here, and in ``dst`` nothing else (see `PlanEnds`, also for
    what is raised). No buffer is larger than ``bucket_bytes`` and its digests. Making one is collective.
    """

    def __init__(
        self,
        moves: Plan,
        *,
        src: Mapping[str, Tensor],
        dst: Mapping[str, Tensor],
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = 64 * 2**20,
        verify: bool = True,
    ) -> None:
        self.group = group
        rank = dist.get_rank() if group is None else group.rank()
        self.ends = PlanEnds(moves, rank=rank, src=src, dst=dst, exchange=handshakes_of(group), verify=verify)
        self.steps = self._schedule(self.ends.buckets(bucket_bytes), moves.rounds())
        self._num_bytes = sum(step.receive.bucket.num_bytes for step in self.steps if step.receive)

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
        if self.ends.device.type == "cuda":
            torch.cuda.current_stream(self.ends.device).synchronize()
        verified = self.ends.finish(version)
        seconds = time.perf_counter() - started
        return WeightUpdate(version=version, num_bytes=self._num_bytes, seconds=seconds, verify_seconds=verified)

    @override
    def close(self) -> None:
        self.steps, self.group = [], None

    def _schedule(self, buckets: Mapping[tuple[int, int], list[Bucket]], rounds: Rounds) -> list[Step]:
        """The steps in the order (round, bucket), the same on all processes."""
        rank = self.ends.rank
        steps: list[tuple[tuple[int, Bucket] | None, tuple[int, Bucket] | None]] = []
        for to, frm in rounds.of_process(rank):
            sends = [(to, out) for out in buckets.get((rank, to), [])] if to is not None else []
            receives = [(frm, into) for into in buckets.get((frm, rank), [])] if frm is not None else []
            steps.extend(zip_longest(sends, receives))
        outgoing = self._two_buffers([send[1] for send, _ in steps if send])
        incoming = self._two_buffers([receive[1] for _, receive in steps if receive])
        return [
            Step(
                send=self.ends.bind(*send, outgoing[i % 2], leaving=True) if send else None,
                receive=self.ends.bind(*receive, incoming[i % 2], leaving=False) if receive else None,
            )
            for i, (send, receive) in enumerate(steps)
        ]

    def _two_buffers(self, buckets: Sequence[Bucket]) -> list[Tensor]:
        """Two buffers, used in turn: a step's buffer is free again two steps later."""
        largest = max((self.ends.wire_bytes(bucket) for bucket in buckets), default=0)
        return [torch.empty(largest, dtype=torch.uint8, device=self.ends.device) for _ in range(2)]

    def post(self, step: Step, version: int) -> Step:
        """Start a step's parcels."""
        ops: list[Operation] = []
        if step.receive is not None:
            ops.append((dist.irecv, step.receive.buffer, step.receive.peer))
        if step.send is not None:
            self.ends.pack(step.send, version)
            ops.append((dist.isend, step.send.buffer, step.send.peer))
        return Step(send=step.send, receive=step.receive, works=self.start(ops, version))

    def start(self, ops: Sequence[Operation], version: int) -> list[dist.Work]:
        """Start sends and receives together. Raises SyncError for a lost process."""
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
        """Wait for a step's parcels. Raises SyncError for a lost process."""
        try:
            for work in step.works:
                work.wait()
        except RuntimeError as error:
            raise SyncError(_awaited(step, version, self.ends.rank, error)) from error

    def arrived(self, parcel: Parcel, version: int) -> None:
        """Take a parcel whose bytes are there."""
        self.ends.unpack(parcel, version)


def _awaited(step: Step, version: int, rank: int, error: Exception) -> str:
    """What a process waited for when another was lost."""
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
