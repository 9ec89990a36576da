"""Memory of the host: for tensors that leave the GPU, and for copies of a state until they are written.

Tensors are taken out of a GPU's memory and put back by their storages, so that all views of them stay valid. A storage
is resized to 0 bytes, and later to what it was. megatron-core's own ``offload_to_cpu`` instead gives weights other
memory, which its optimizers do not let a checkpoint read, and pages of the host that are not pinned.

The host's pinned memory is given out in pieces of any size. torch's allocator of pinned memory rounds a request up to a
power of two, and keeps it for requests of that class. megatron-core's pool (fine_grained_activation_offload.py,
GPUTensorPool) keeps a tensor for requests of its shape, so it grows with every new length of a micro-batch. Here a
request may be cut: the pinned memory is the most that was taken at one time, rounded up to a slab.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

ALIGNED = 512
"""Bytes: requests are rounded up to a multiple of it."""
Extent = tuple[int, int]
"""First byte and the byte after the last, counted over all slabs; no extent crosses from slab to slab."""


class PinnedPool:
    """Slabs of ``slab`` bytes each, pinned when there is no other room and kept until the process ends."""

    def __init__(self, slab: int) -> None:
        """``slab``: a power of two, so that torch rounds nothing up."""
        self._slab = slab
        self._slabs: list[Tensor] = []
        self._free: list[Extent] = []  # sorted, and no two of a slab touch
        self._room = 0  # bytes of the above
        self._leaving: deque[tuple[torch.cuda.Event, Sequence[Extent]]] = deque()

    @property
    def num_bytes(self) -> int:
        """Bytes that are pinned."""
        return len(self._slabs) * self._slab

    def allocate(self, num_bytes: int, stream: torch.cuda.Stream) -> list[Extent]:
        """Room for ``num_bytes``, which ``stream`` may write."""
        wanted = -(-num_bytes // ALIGNED) * ALIGNED
        while self._leaving and (self._leaving[0][0].query() or self._room < wanted):
            event, extents = self._leaving.popleft()
            stream.wait_event(event)  # a copy from there, which costs less than to pin more
            for extent in extents:
                self._add(extent)
        while self._room < wanted:
            start = self.num_bytes
            self._slabs.append(torch.empty(self._slab, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))
            self._add((start, start + self._slab))
        taken = []
        self._room -= wanted
        while wanted:
            start, end = self._free.pop(0)
            middle = min(end, start + wanted)
            if middle < end:
                self._free.insert(0, (middle, end))
            taken.append((start, middle))
            wanted -= middle - start
        return taken

    def free(self, extents: Sequence[Extent], after: torch.cuda.Event) -> None:
        """Takes back what `allocate` gave; others may write there once ``after`` has happened."""
        self._leaving.append((after, extents))

    def view(self, extent: Extent) -> Tensor:
        """The bytes [n] uint8 of an extent."""
        slab, first = divmod(extent[0], self._slab)
        return self._slabs[slab][first : first + extent[1] - extent[0]]

    def _add(self, extent: Extent) -> None:
        self._room += extent[1] - extent[0]
        insort(self._free, extent)
        at = self._free.index(extent)
        for left in (at, at - 1):  # the right neighbor first, so that the left one's place stays
            if 0 <= left < len(self._free) - 1:
                (start, middle), (same, end) = self._free[left : left + 2]
                if middle == same and middle % self._slab:
                    self._free[left : left + 2] = [(start, end)]


_ALIGNED = 256
_LEAST = 512  # bytes that are moved: a GPU's allocator gives no less


@dataclass(slots=True)
class _Slabs:
    """Pinned memory of the host, kept for the next time: to pin it takes longer than to copy."""

    size: int  # bytes that are pinned in one call
    slabs: list[Tensor] = field(default_factory=list)
    at: int = 0  # the slab that is being filled
    used: int = 0  # its bytes

    def take(self, num_bytes: int, wanted: int) -> list[Tensor]:
        """``num_bytes`` in pieces, which slabs' ends cut; ``wanted`` more will follow, these included."""
        taken = []
        while num_bytes:
            if self.at == len(self.slabs):
                size = min(wanted, self.size)
                self.slabs.append(torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))
            size = min(num_bytes, self.slabs[self.at].numel() - self.used)
            if size:
                taken.append(self.slabs[self.at][self.used : self.used + size])
            self.used += _aligned(size)
            num_bytes, wanted = num_bytes - size, wanted - _aligned(size)
            if self.used == self.slabs[self.at].numel():
                self.at, self.used = self.at + 1, 0
        return taken

    def clear(self) -> None:
        """Frees all of it."""
        self.at = self.used = 0


@dataclass(frozen=True, slots=True)
class _Released:
    storage: torch.UntypedStorage
    num_bytes: int
    device: torch.device
    copy: Sequence[Tensor] | None  # it is in the host's memory

    def pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes of the copy, if there is one, and those of the GPU's memory that they are of."""
        whole, at = _bytes_of(self.storage, self.device), 0
        for piece in self.copy or ():
            yield piece, whole[at : at + len(piece)]
            at += len(piece)


class OffloadedTensors:
    """The parts of a model that are out of the GPU's memory, by kind."""

    def __init__(self, slab: int) -> None:
        """``slab``: bytes that one call pins on the host, a power of two, to which torch would round them up."""
        self._slab = slab
        self._gone: dict[str, dict[int, _Released]] = {}
        self._slabs: dict[str, _Slabs] = {}

    def offload(
        self, kind: str, tensors: Iterable[Tensor], *, besides: Iterable[Tensor] = (), kept: bool = True
    ) -> None:
        """Frees the GPU's memory of ``tensors`` until ``back(kind)``, but for storages of ``besides``.

        Their values are undefined after that, unless they are ``kept``, in the host's pinned memory. Tensors stay as
        they are if they have left already, are in the host's memory, or are smaller than the GPU's allocator gives.
        """
        gone = self._gone.setdefault(kind, {})
        stay = {tensor.untyped_storage()._cdata for tensor in besides}
        leaving: dict[int, tuple[torch.UntypedStorage, torch.device]] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type != "cpu" and storage._cdata not in stay and storage.nbytes() >= _LEAST:
                leaving[storage._cdata] = storage, tensor.device
        slabs = self._slabs.setdefault(kind, _Slabs(self._slab))
        wanted = sum(_aligned(storage.nbytes()) for storage, _ in leaving.values())
        for key, (storage, device) in leaving.items():
            size, copy = storage.nbytes(), None
            if kept:
                copy = slabs.take(size, wanted)
            wanted -= _aligned(size)
            gone[key] = one = _Released(storage, size, device, copy)
            for on_host, there in one.pieces():
                on_host.copy_(there, non_blocking=True)
        if leaving:
            torch.cuda.synchronize()  # the copies are whole before their sources are others' memory
        for storage, _ in leaving.values():
            storage.resize_(0)

    def onload(self, *kinds: str) -> None:
        """Takes the GPU's memory again for what left of ``kinds``, and for every kind if none is named."""
        for kind in kinds or tuple(self._gone):
            gone = self._gone.pop(kind, {})
            for one in gone.values():
                one.storage.resize_(one.num_bytes)
                for on_host, there in one.pieces():
                    there.copy_(on_host, non_blocking=True)
            if gone:
                torch.cuda.synchronize()  # the next to leave writes over the copies
                self._slabs[kind].clear()

    def host_copy(self, tensor: Tensor) -> Tensor:
        """``tensor``, or its copy in the host's memory if it has left: joined, if it is cut there."""
        key = tensor.untyped_storage()._cdata
        copy = next((gone[key].copy for gone in self._gone.values() if key in gone), None)
        if copy is None:
            return tensor
        span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True))
        first, last = (tensor.itemsize * (tensor.storage_offset() + n) for n in (0, span if tensor.numel() else 0))
        parts, at = [], 0
        for piece in copy:
            parts.append(piece[max(first - at, 0) : max(last - at, 0)])
            at += len(piece)
        parts = [part for part in parts if len(part)] or [copy[0][:0]]
        flat = (torch.cat(parts) if len(parts) > 1 else parts[0]).view(tensor.dtype)
        return flat.as_strided(tensor.size(), tensor.stride(), flat.storage_offset())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class StagingPool:
    """Blocks of exactly as many bytes as were asked for, which each round of `allocate` gives out again.

    They are pinned where there is CUDA, by registering them: torch's own pinned memory is rounded up to powers of two.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._given = 0
        weakref.finalize(self, _drop, self._blocks, 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self._blocks)

    def begin(self) -> None:
        """Begins a round: all blocks are free again, and what they hold is written over."""
        self._given = 0

    def allocate(self, num_bytes: int) -> Tensor:
        """The next block [num_bytes], uint8: that of the round before, if it asked for as many bytes here.

        Raises RuntimeError with CUDA's error where memory cannot be pinned.
        """
        at = self._given
        if at == len(self._blocks) or self._blocks[at].nbytes != num_bytes:
            _drop(self._blocks, at)  # another state than before: nothing after it fits
            self._blocks.append(_block(num_bytes))
        self._given += 1
        return self._blocks[at]


def _block(num_bytes: int) -> Tensor:
    block = torch.empty(num_bytes, dtype=torch.uint8)
    if num_bytes and torch.cuda.is_available():
        error = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), num_bytes, 0))
        if error:
            raise RuntimeError(f"CUDA cannot pin {num_bytes} bytes of the host's memory: error {error}")
    return block


def _drop(blocks: list[Tensor], first: int) -> None:
    for block in blocks[first:] if torch.cuda.is_available() else ():
        if block.nbytes:
            torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
    del blocks[first:]
