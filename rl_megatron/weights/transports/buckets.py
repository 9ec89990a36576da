"""Divides a pair's transfers into flat buckets of bounded size, which a transport packs and sends as a unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch

from rl_megatron.weights.boxes import Box, Shape, shift, volume, whole_box
from rl_megatron.weights.plans.transfers import Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPart:
    """A box small enough for a bucket, in both processes' tensors."""

    src_param: str
    src_box: Box
    dst_param: str
    dst_box: Box

    @property
    def num_elements(self) -> int:
        """The number of elements of either box."""
        return volume(self.dst_box)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parts of one pair of processes and one dtype (the destination's), laid one after the other.

    They arrive in ``turn`` of the receiver; ``number`` counts the pair's buckets in it.
    """

    dtype: torch.dtype
    turn: int
    number: int
    parts: list[BucketPart]

    @property
    def num_bytes(self) -> int:
        """The size of all parts."""
        return self.dtype.itemsize * sum(part.num_elements for part in self.parts)


def cut_into_buckets(
    transfers: Iterable[Transfer],
    dtype_of: Callable[[str], torch.dtype],
    bucket_bytes: int,
    part_bytes: int | None = None,
    turn_of: Callable[[Transfer], int] = lambda moved: 0,
) -> list[Bucket]:
    """Buckets of one pair's transfers, of at most ``bucket_bytes`` or one element; equal for sender and receiver.

    ``dtype_of`` gives the dtype of a destination tensor. ``part_bytes`` bounds a part (None: like a bucket).
    ``turn_of`` gives the receiver's turn; they are in the order of turns.
    """
    largest = min(bucket_bytes, part_bytes or bucket_bytes)
    out: list[Bucket] = []
    free = 0
    for t in sorted(transfers, key=lambda t: (turn_of(t), str(dtype_of(t.dst_param)))):
        dtype, turn = dtype_of(t.dst_param), turn_of(t)
        sizes = tuple(stop - start for start, stop in t.dst_box)
        own = whole_box(sizes)
        for cut in _split(sizes, max(1, largest // dtype.itemsize)):
            num_bytes = volume(cut) * dtype.itemsize
            last = out[-1] if out and out[-1].turn == turn else None
            if last is None or last.dtype != dtype or num_bytes > free:
                out.append(Bucket(dtype=dtype, turn=turn, number=last.number + 1 if last else 0, parts=[]))
                free = bucket_bytes
            free -= num_bytes
            src_box, dst_box = shift(cut, own, t.src_box), shift(cut, own, t.dst_box)
            out[-1].parts.append(
                BucketPart(src_param=t.src_param, src_box=src_box, dst_param=t.dst_param, dst_box=dst_box)
            )
    return out


def _split(sizes: Shape, limit: int) -> Iterator[Box]:
    """Boxes of at most ``limit`` elements that tile ``sizes``: runs of whole rows where one row fits."""
    row = prod(sizes[1:])
    if row * sizes[0] <= limit:
        yield whole_box(sizes)
    elif row <= limit:
        for start in range(0, sizes[0], limit // row):
            yield ((start, min(start + limit // row, sizes[0])), *((0, size) for size in sizes[1:]))
    else:
        for start in range(sizes[0]):
            for rest in _split(sizes[1:], limit):
                yield ((start, start + 1), *rest)
