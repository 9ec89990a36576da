"""The process-group transport sending only elements whose bits changed since the version before: lossless, bit for bit.

For networks that are slower than memory. A sender keeps a copy of what it sent last; a receiver uses its own weights as
the base. If the two ends of a pair have not finished the same version, as at first and after a failure, the whole
bucket is sent; so it is if its changes would not be smaller. Digests cover the whole boxes after the change.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from rl_megatron.config.sections.weights import WeightsSection
from rl_megatron.types import WeightUpdate
from rl_megatron.weights.plans.plan import Plan
from rl_megatron.weights.routes.ends import Parcel
from rl_megatron.weights.routes.group import Operation, ProcessGroupTransport, Step

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 2**16  # elements whose places differ in 16 bits
_WHOLE = -1


class DeltaTransport(ProcessGroupTransport):
    """As ProcessGroupTransport. Between moves nobody but this transport may write ``dst``."""

    def __init__(
        self,
        moves: Plan,
        *,
        src: Mapping[str, Tensor],
        dst: Mapping[str, Tensor],
        bucket_bytes: int = 64 * 2**20,
        verify: bool = True,
    ) -> None:
        super().__init__(moves, src=src, dst=dst, bucket_bytes=bucket_bytes, verify=verify)
        self._base = {id(s.send): torch.empty_like(s.send.payload) for s in self.steps if s.send is not None}
        self._frames: dict[int, Tensor] = {}  # of parcels that are arriving as changes
        self._finished = -1
        self._same: list[bool] = []
        self._received = 0

    @override
    def move(self, version: int) -> WeightUpdate:
        """``num_bytes`` are those of the changes and their places."""
        finished = torch.tensor([self._finished], device=self.ends.device)
        everyone = [torch.empty_like(finished) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(everyone, finished, group=self.group)
        self._same = [self._finished >= 0 and int(theirs) == self._finished for theirs in everyone]
        self._finished, self._received = -1, 0
        self._frames.clear()
        update = super().move(version)
        self._finished = version
        return WeightUpdate(
            version=version,
            num_bytes=self._received,
            seconds=update.seconds,
            verify_seconds=update.verify_seconds,
        )

    def post(self, step: Step, version: int) -> Step:
        """Start a step's parcels: their sizes first."""
        out = self._encode(step.send, version) if step.send is not None else None
        changed = torch.tensor([_WHOLE if out is None else out[0]], device=self.ends.device)
        coming = torch.tensor([_WHOLE], device=self.ends.device)
        sizes: list[Operation] = []
        if step.receive is not None and self._same[step.receive.peer]:
            sizes.append((dist.irecv, coming, step.receive.peer))
        if step.send is not None and self._same[step.send.peer]:
            sizes.append((dist.isend, changed, step.send.peer))
        self.wait(Step(send=step.send, receive=step.receive, works=self.start(sizes, version)), version)
        ops: list[Operation] = []
        if step.receive is not None:
            ops.append((dist.irecv, self._room(step.receive, int(coming)), step.receive.peer))
        if step.send is not None and out is not None:
            ops.append((dist.isend, out[1], step.send.peer))
        return Step(send=step.send, receive=step.receive, works=self.start(ops, version))

    def arrived(self, parcel: Parcel, version: int) -> None:
        """Change a copy of what is held here, and take that as the parcel."""
        frame = self._frames.pop(id(parcel), None)
        if frame is not None:
            torch._foreach_copy_(parcel.views, parcel.tensors)
            _decode(frame, parcel)
        super().arrived(parcel, version)

    def _encode(self, parcel: Parcel, version: int) -> tuple[int, Tensor]:
        """(elements that changed, bytes to send), or the whole parcel where that is not larger."""
        self.ends.pack(parcel, version)
        base, bits = self._base[id(parcel)], _BITS[parcel.bucket.dtype.itemsize]
        now = parcel.payload.view(bits)
        places = (now != base.view(bits)).nonzero().flatten() if self._same[parcel.peer] else None
        base.copy_(parcel.payload)
        if places is None or _frame_bytes(parcel, len(places)) >= len(parcel.buffer):
            return _WHOLE, parcel.buffer
        counts = torch.bincount(places // _BLOCK, minlength=_blocks(parcel)).to(torch.int32)
        low = (places % _BLOCK).to(torch.int32).to(torch.uint16)
        pieces = (parcel.trailer, counts, now[places], low)
        return len(places), torch.cat([_flat_bytes(piece) for piece in pieces])

    def _room(self, parcel: Parcel, changed: int) -> Tensor:
        """Where the bytes of ``changed`` elements arrive, or those of the whole parcel."""
        if changed == _WHOLE:
            self._received += parcel.bucket.num_bytes
            return parcel.buffer
        frame = torch.empty(_frame_bytes(parcel, changed), dtype=torch.uint8, device=self.ends.device)
        self._received += len(frame) - parcel.trailer.nbytes
        self._frames[id(parcel)] = frame
        return frame


def _blocks(parcel: Parcel) -> int:
    return -(-(parcel.bucket.num_bytes // parcel.bucket.dtype.itemsize) // _BLOCK)


def _frame_bytes(parcel: Parcel, changed: int) -> int:
    """Trailer, changes of each block of places, changed elements, low half of their places."""
    return parcel.trailer.nbytes + 4 * _blocks(parcel) + changed * (parcel.bucket.dtype.itemsize + 2)


def _decode(frame: Tensor, parcel: Parcel) -> None:
    size, blocks, trailer = parcel.bucket.dtype.itemsize, _blocks(parcel), parcel.trailer.nbytes
    changed = (len(frame) - trailer - 4 * blocks) // (size + 2)
    head, counts, values, low = frame.split([trailer, 4 * blocks, size * changed, 2 * changed])
    starts = torch.arange(blocks, device=frame.device) * _BLOCK
    block_of = torch.repeat_interleave(starts, _typed(counts, torch.int32).to(torch.int64))
    places = block_of + _typed(low, torch.uint16).to(torch.int64)
    parcel.payload.view(_BITS[size])[places] = _typed(values, _BITS[size])
    _flat_bytes(parcel.trailer).copy_(head)


def _flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _typed(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as elements; copied where they do not lie at one."""
    return (data if data.storage_offset() % dtype.itemsize == 0 else data.clone()).view(dtype)


def make_transport(
    moves: Plan, *, src: Mapping[str, Tensor], dst: Mapping[str, Tensor], section: WeightsSection, verify: bool = True
) -> ProcessGroupTransport:
    """The transport between the learner's ranks, into their engines or the servers' files, over the default group."""
    kind = DeltaTransport if section.delta else ProcessGroupTransport
    return kind(moves, src=src, dst=dst, bucket_bytes=section.bucket_mb * 2**20, verify=verify)
