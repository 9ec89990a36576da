"""Sends only elements with bits that changed since the version before: lossless, bit for bit.

For networks that are slower than memory. A sender keeps a copy of the values it sent last; a receiver uses its own
weights as the base. The whole bucket is sent if its changes are not smaller. It is also sent if the two ends of a pair
have not finished the same version: at first and after a failure. Digests cover the whole boxes after the change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from rl_megatron.feature import Compression
from rl_megatron.weights.routes.ends import BoundBucket

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 2**16  # elements with places that differ in 16 bits


class Changes(Compression):
    """The changes of one process's parcels. Between moves only the transport may write its destination."""

    def __init__(self) -> None:
        self._base: dict[int, Tensor] = {}  # id of a parcel -> the values sent last
        self._finished = -1
        self._same: list[bool] = []

    @override
    def begin(self, gather: Callable[[int], Sequence[int]]) -> None:
        self._same = [self._finished >= 0 and theirs == self._finished for theirs in gather(self._finished)]
        self._finished = -1

    @override
    def finished(self, version: int) -> None:
        self._finished = version

    @override
    def compresses(self, peer: int) -> bool:
        return self._same[peer]

    @override
    def pack(self, parcel: BoundBucket) -> Tensor | None:
        bits = _BITS[parcel.bucket.dtype.itemsize]
        now = parcel.payload.view(bits)
        places = None
        if self._same[parcel.peer]:
            places = (now != self._base[id(parcel)].view(bits)).nonzero().flatten()
        self._keep(parcel)
        if places is None or _frame_bytes(parcel, len(places)) >= len(parcel.buffer):
            return None
        counts = torch.bincount(places // _BLOCK, minlength=_blocks(parcel)).to(torch.int32)
        low = (places % _BLOCK).to(torch.int32).to(torch.uint16)
        return torch.cat([_flat_bytes(piece) for piece in (parcel.trailer, counts, now[places], low)])

    def _keep(self, parcel: BoundBucket) -> None:
        base = self._base.get(id(parcel))
        self._base[id(parcel)] = parcel.payload.clone() if base is None else base.copy_(parcel.payload)

    @override
    def unpack(self, frame: Tensor, parcel: BoundBucket) -> None:
        """Changes a copy of the values held here."""
        torch._foreach_copy_(parcel.views, parcel.tensors)
        size, blocks, trailer = parcel.bucket.dtype.itemsize, _blocks(parcel), parcel.trailer.nbytes
        changed = (len(frame) - trailer - 4 * blocks) // (size + 2)
        head, counts, values, low = frame.split([trailer, 4 * blocks, size * changed, 2 * changed])
        starts = torch.arange(blocks, device=frame.device) * _BLOCK
        block_of = torch.repeat_interleave(starts, _typed(counts, torch.int32).to(torch.int64))
        places = block_of + _typed(low, torch.uint16).to(torch.int64)
        parcel.payload.view(_BITS[size])[places] = _typed(values, _BITS[size])
        _flat_bytes(parcel.trailer).copy_(head)


def compression(config: RunConfig) -> Compression | None:
    """Returns the compression of one plan's parcels."""
    return Changes() if config.weights.delta else None


def _blocks(parcel: BoundBucket) -> int:
    return -(-(parcel.bucket.num_bytes // parcel.bucket.dtype.itemsize) // _BLOCK)


def _frame_bytes(parcel: BoundBucket, changed: int) -> int:
    """Returns the bytes of trailer, changes of each block of places, changed elements, low half of their places."""
    return parcel.trailer.nbytes + 4 * _blocks(parcel) + changed * (parcel.bucket.dtype.itemsize + 2)


def _flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _typed(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Views bytes as elements of a dtype, and copies them if they are not aligned to it."""
    return (data if data.storage_offset() % dtype.itemsize == 0 else data.clone()).view(dtype)
