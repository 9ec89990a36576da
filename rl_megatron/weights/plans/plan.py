"""Plans which rank sends each box to which: integer arithmetic over two layouts, no torch, equal on every process.

A plan is symbolic. One `Stretch` stands for all layers and experts of a table's row that have the same holders and the
same destinations; a process expands only what it sends and receives itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rl_megatron.errors import WeightError
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.plans.groups import stretches_between
from rl_megatron.weights.plans.transfers import Stretch, Transfer

_LARGEST_SHARE = 32  # a transfer that has a choice of senders is at most this part of a sender's mean load,
SMALLEST_CUT = 256  # or this many elements: cutting smaller boxes costs more than it evens


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """In round k the i-th sender sends to receiver i + k modulo their number: all are busy from round 0 on."""

    senders: tuple[int, ...]
    receivers: tuple[int, ...]

    def __len__(self) -> int:
        return max(len(self.senders), len(self.receivers))

    def of_pair(self, sender: int, receiver: int) -> int:
        """The round of a sender and a receiver."""
        return (bisect_left(self.receivers, receiver) - bisect_left(self.senders, sender)) % len(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every transfer between two layouts, in the destination's table order; equal on every process."""

    stretches: tuple[Stretch, ...]

    def receives(self, process: int) -> Iterator[Transfer]:
        """The transfers that ``process`` writes, each element once; local copies have ``src_rank == dst_rank``."""
        for stretch in self.stretches:
            yield from stretch.into(process)

    def sends(self, process: int) -> Iterator[Transfer]:
        """The transfers that ``process`` sends to others, for each receiver in the order in which it receives them."""
        for stretch in self.stretches:
            yield from stretch.out_of(process)

    def traffic(self, bytes_of: Callable[[str], int] = lambda hf: 1) -> dict[tuple[int, int], int]:
        """Number of elements for every pair (sender, receiver) of different processes that have transfers.

        With ``bytes_of`` an element of a Hugging Face pattern, their bytes.
        """
        out: Counter[tuple[int, int]] = Counter()
        for stretch in self.stretches:
            each = bytes_of(stretch.wanted.hf)
            for sender, receiver, elements in stretch.flows():
                out[sender, receiver] += elements * each
        return dict(out)

    def rounds(self) -> Rounds:
        """Rounds of all pairs, in which each process sends to and receives from at most one other at a time."""
        moved = [stretch for stretch in self.stretches if stretch.remote]
        sending = {
            holder
            for stretch in moved
            for holder, (low, high) in zip(stretch.holders, pairwise(stretch.bounds), strict=True)
            if low < high
        }
        receiving = set[int]().union(*(stretch.remote for stretch in moved))
        return Rounds(senders=tuple(sorted(sending)), receivers=tuple(sorted(receiving)))

    def num_transfers(self) -> int:
        """Number of transfers of all processes, including local copies."""
        return sum(stretch.count * (len(stretch.local) + len(stretch.remote)) for stretch in self.stretches)


def plan(src: Layout, dst: Layout, *, placement: Mapping[int, int] | None = None) -> Plan:
    """The plan with the fewest elements between processes that writes every element of ``dst`` exactly once.

    Rank r of ``src`` is process r; rank r of ``dst`` lives in process ``placement[r]`` (None: in process r); ranks
    left out receive nothing. R engines with full HF weights are an HF layout with ``dp=R``. A process copies a box that
    it holds itself; else the replica with the fewest elements to send so far sends it; boxes too large to balance are
    cut. Raises WeightError naming the tensor if ``src`` lacks elements or holds overlapping boxes.
    """
    where = placement if placement is not None else {rank: rank for rank in range(dst.dims.world_size)}
    if len(set(where.values())) != len(where):
        raise WeightError(f"placement={dict(where)} puts two destination ranks into one process; give each its own")
    return dealt(stretches_between(src, dst, where), src.dims.world_size)


def dealt(drafts: Sequence[Stretch], holders: int) -> Plan:
    """The plan of stretches without senders, among which ``holders`` processes are."""
    moved = sum(stretch.size * stretch.count * len(stretch.remote) for stretch in drafts)
    limit = max(SMALLEST_CUT, moved // (holders * _LARGEST_SHARE))
    return Plan(stretches=tuple(_dealt([part for stretch in drafts for part in _striped(stretch, limit)])))


def _striped(stretch: Stretch, limit: int) -> Iterator[Stretch]:
    """The stretch cut along dim 0 into boxes of at most ``limit`` elements, if it has several possible senders."""
    start, stop = stretch.box[0]
    parts = min(stop - start, -(-stretch.size // limit))
    if parts <= 1 or len(stretch.holders) == 1 or not stretch.remote:
        yield stretch
        return
    edges = [start + (stop - start) * i // parts for i in range(parts + 1)]
    for low, high in pairwise(edges):
        yield replace(stretch, box=((low, high), *stretch.box[1:]))


def _dealt(stretches: Sequence[Stretch]) -> list[Stretch]:
    """The stretches with senders: those with the fewest holders, then the largest, first, so that the rest balance."""
    out = list(stretches)
    load: Counter[int] = Counter()
    for i in sorted(range(len(out)), key=lambda i: (len(out[i].holders), -out[i].size, i)):
        stretch = out[i]
        if stretch.remote:
            shares = _level([load[rank] for rank in stretch.holders], stretch.size, stretch.count * len(stretch.remote))
            bounds = [0]
            for rank, share in zip(stretch.holders, shares, strict=True):
                load[rank] += share * stretch.size
                bounds.append(bounds[-1] + share)
            out[i] = replace(stretch, bounds=tuple(bounds))
    return out


def _level(loads: Sequence[int], size: int, count: int) -> list[int]:
    """How many of ``count`` transfers each holder sends, if the least loaded (at a tie the lowest) sends the next."""
    order = sorted(range(len(loads)), key=lambda i: loads[i])
    total = sum(loads) + count * size
    while loads[order[-1]] * len(order) > total:  # too loaded to take any
        total -= loads[order.pop()]
    level = total // len(order)
    shares = [0] * len(loads)
    for i in order:
        shares[i] = (level - loads[i]) // size
    rest = count - sum(shares)
    for i in sorted(order, key=lambda i: (loads[i] + shares[i] * size, i))[:rest]:
        shares[i] += 1
    return shares
