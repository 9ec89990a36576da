"""Gives out the host's pinned memory in pieces of any size, and loses none of it to sizes that were there before.

torch's allocator of pinned memory rounds a request up to a power of two, and keeps it for requests of that class.
megatron-core's pool (fine_grained_activation_offload.py, GPUTensorPool) keeps a tensor for requests of its shape, so it
grows with every new length of a micro-batch. Here a request may be cut: what is pinned is the most that was taken at
once, rounded up to a slab.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNED = 512
"""Bytes: requests are rounded up to a multiple of it."""
Extent = tuple[int, int]
"""First byte and the byte after the last, counted over all slabs; no extent crosses from slab to slab."""


class Pinned:
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

    def take(self, num_bytes: int, stream: torch.cuda.Stream) -> list[Extent]:
        """Room for ``num_bytes``, which ``stream`` may write."""
        wanted = -(-num_bytes // ALIGNED) * ALIGNED
        while self._leaving and (self._leaving[0][0].query() or self._room < wanted):
            event, extents = self._leaving.popleft()
            stream.wait_event(event)  # of a copy from there, which costs less than to pin more
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

    def give(self, extents: Sequence[Extent], after: torch.cuda.Event) -> None:
        """Take back what `take` gave; others may write there once ``after`` has happened."""
        self._leaving.append((after, extents))

    def of(self, extent: Extent) -> Tensor:
        """The bytes [n] uint8 of an extent."""
        slab, first = divmod(extent[0], self._slab)
        return self._slabs[slab][first : first + extent[1] - extent[0]]

    def _add(self, extent: Extent) -> None:
        self._room += extent[1] - extent[0]
        insort(self._free, extent)
        at = self._free.index(extent)
        for left in (at, at - 1):  # the right neighbour first, so that the left one's place stays
            if 0 <= left < len(self._free) - 1:
                (start, middle), (same, end) = self._free[left : left + 2]
                if middle == same and middle % self._slab:
                    self._free[left : left + 2] = [(start, end)]
