"""Which box goes from which rank to which: integer arithmetic over two layouts, no torch, the same on every process.

A plan is symbolic. A row of the table moves alike in all its layers and experts, so one `Stretch` stands for all of
them that have the same holders and the same destinations; a process writes out only what it sends and receives itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rl_megatron.errors import WeightError
from rl_megatron.weights.boxes import Box, Shape, intersect, shift, volume
from rl_megatron.weights.layouts.layout import Layout, ParamSpec, Slice

_LARGEST_SHARE = 32  # a transfer that has a choice of senders is at most this part of a sender's mean load,
_SMALLEST_CUT = 256  # or this many elements: cutting smaller boxes costs more than it evens


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Copy ``src_box`` of ``src_param`` on process ``src_rank`` to ``dst_box`` of ``dst_param`` on ``dst_rank``.

    The boxes have one size; the shapes are those of the whole local tensors.
    """

    src_rank: int
    src_param: str
    src_shape: Shape
    src_box: Box
    dst_rank: int
    dst_param: str
    dst_shape: Shape
    dst_box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """``box`` of each layer and expert listed, from one of ``holders`` into every one of the destinations.

    ``local`` destinations hold it themselves. The transfers into the others make a line, layer after layer, in each
    expert after expert, in each destination after destination; holder i sends what lies between ``bounds[i]`` and
    ``bounds[i + 1]``, so all its destinations get about the same from it.
    """

    box: Box
    wanted: Slice
    layers: tuple[int, ...]
    experts: tuple[int, ...]
    holders: tuple[int, ...]  # processes, ascending
    held: tuple[Slice, ...]  # of each holder
    local: tuple[int, ...]
    remote: tuple[int, ...]  # processes, ascending
    bounds: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Transfers into one destination."""
        return len(self.layers) * len(self.experts)

    @property
    def size(self) -> int:
        """Elements of one transfer."""
        return volume(self.box)

    def into(self, process: int) -> Iterator[Transfer]:
        """The transfers that ``process`` receives, from itself too."""
        if process in self.local:
            yield from self._write(bisect_left(self.holders, process), process, range(self.count))
        at = _find(self.remote, process)
        if at is not None:
            for i in range(len(self.holders)):
                yield from self._write(i, process, self._span(i, at))

    def out_of(self, process: int) -> Iterator[Transfer]:
        """The transfers that ``process`` sends to others."""
        i = _find(self.holders, process)
        if i is not None:
            for at, receiver in enumerate(self.remote):
                yield from self._write(i, receiver, self._span(i, at))

    def flows(self) -> Iterator[tuple[int, int, int]]:
        """(sender, receiver, elements) between different processes."""
        for i, sender in enumerate(self.holders if self.remote else ()):
            if self.bounds[i] < self.bounds[i + 1]:
                for at, receiver in enumerate(self.remote):
                    yield sender, receiver, len(self._span(i, at)) * self.size

    def _span(self, i: int, at: int) -> range:
        """Which of the transfers into the ``at``-th destination holder i sends."""
        width = len(self.remote)
        return range(-((at - self.bounds[i]) // width), -((at - self.bounds[i + 1]) // width))

    def _write(self, i: int, process: int, span: range) -> Iterator[Transfer]:
        if not span:
            return
        held, wanted = self.held[i], self.wanted
        src_box, dst_box = shift(self.box, held.hf_box, held.box), shift(self.box, wanted.hf_box, wanted.box)
        for k in span:
            layer, expert = self.layers[k // len(self.experts)], self.experts[k % len(self.experts)]
            yield Transfer(
                src_rank=self.holders[i],
                src_param=held.param.format(layer=layer, expert=expert),
                src_shape=held.shape,
                src_box=src_box,
                dst_rank=process,
                dst_param=wanted.param.format(layer=layer, expert=expert),
                dst_shape=wanted.shape,
                dst_box=dst_box,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """In round k the i-th sender sends to the (i + k)-th receiver, counted round: all are busy from the first on."""

    senders: tuple[int, ...]
    receivers: tuple[int, ...]

    def __len__(self) -> int:
        return max(len(self.senders), len(self.receivers))

    def of_pair(self, sender: int, receiver: int) -> int:
        """The round of a sender and a receiver."""
        return (bisect_left(self.receivers, receiver) - bisect_left(self.senders, sender)) % len(self)

    def of_process(self, process: int) -> Iterator[tuple[int | None, int | None]]:
        """(where to, where from) of each round; a process may meet itself."""
        sender, receiver = _find(self.senders, process), _find(self.receivers, process)
        for k in range(len(self)):
            to = (sender + k) % len(self) if sender is not None else len(self)
            frm = (receiver - k) % len(self) if receiver is not None else len(self)
            yield (
                self.receivers[to] if to < len(self.receivers) else None,
                self.senders[frm] if frm < len(self.senders) else None,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every transfer between two layouts, in the destination's table order; equal on every process."""

    stretches: tuple[Stretch, ...]

    def receives(self, process: int) -> Iterator[Transfer]:
        """What ``process`` writes, each element once; copies within it have ``src_rank == dst_rank``."""
        for stretch in self.stretches:
            yield from stretch.into(process)

    def sends(self, process: int) -> Iterator[Transfer]:
        """What ``process`` sends to others; a pair's transfers come in the order in which the other receives them."""
        for stretch in self.stretches:
            yield from stretch.out_of(process)

    def traffic(self) -> dict[tuple[int, int], int]:
        """Elements between every pair (sender, receiver) of different processes that have any."""
        out: Counter[tuple[int, int]] = Counter()
        for stretch in self.stretches:
            for sender, receiver, elements in stretch.flows():
                if elements:
                    out[sender, receiver] += elements
        return dict(out)

    def rounds(self) -> Rounds:
        """An order for all pairs in which nobody sends to two at once, nor receives from two."""
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
        """Transfers of all processes, copies within a process counted."""
        return sum(stretch.count * (len(stretch.local) + len(stretch.remote)) for stretch in self.stretches)


def plan(src: Layout, dst: Layout, *, placement: Mapping[int, int] | None = None) -> Plan:
    """The fewest elements between processes that write every element of ``dst`` exactly once.

    Rank r of ``src`` is process r; rank r of ``dst`` lives in process ``placement[r]`` (None: in process r), and ranks
    left out are not planned. R engines with full HF weights are an HF layout with ``dp=R``. A box is taken from its
    own process where that holds it, else from the replica with the fewest elements to send so far; one too large to be
    dealt evenly is cut. Raises WeightError naming the tensor where ``src`` lacks elements or holds rows in two ways.
    """
    where = placement if placement is not None else {rank: rank for rank in range(dst.dims.world_size)}
    if len(set(where.values())) != len(where):
        raise WeightError(f"placement={dict(where)} puts two destination ranks into one process; give each its own")
    source, target = _Source(src), _Target(dst, where)
    drafts = [stretch for spec in dst.rows() for stretch in _stretches(source, target, spec)]
    moved = sum(stretch.size * stretch.count * len(stretch.remote) for stretch in drafts)
    limit = max(_SMALLEST_CUT, moved // (src.dims.world_size * _LARGEST_SHARE))
    return Plan(stretches=tuple(_dealt([part for stretch in drafts for part in _striped(stretch, limit)])))


_Stages = tuple[tuple[int, ...], ...]  # of each source row of one HF tensor: the stages that hold a layer


class _Source:
    """Who holds which box of which HF tensor."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._rows: dict[str, list[ParamSpec]] = {}
        self._boxes: dict[str, dict[Box, list[tuple[int, int, Slice]]]] = {}
        for spec in layout.rows():
            for chunk, slices in enumerate(layout.chunks(spec)):
                for held in slices:
                    rows = self._rows.setdefault(held.hf, [])
                    if spec not in rows:
                        rows.append(spec)
                    boxes = self._boxes.setdefault(held.hf, {})
                    boxes.setdefault(held.hf_box, []).append((rows.index(spec), chunk, held))
        for hf, held_boxes in self._boxes.items():
            _refuse_overlap(hf, list(held_boxes))
        self._stages = {hf: [layout.layer_stages(spec) for spec in rows] for hf, rows in self._rows.items()}
        self._holders: dict[tuple[str, Box, _Stages, int], tuple[tuple[int, ...], tuple[Slice, ...]]] = {}

    def stages(self, hf: str, layer: int) -> _Stages:
        return tuple(stages.get(layer, ()) for stages in self._stages.get(hf, ()))

    def expert_rank(self, hf: str, expert: int) -> int:
        rows = self._rows.get(hf)
        return self._layout.expert_rank(rows[0], expert) if rows else 0

    def boxes(self, hf: str) -> list[Box]:
        return list(self._boxes.get(hf, ()))

    def holders(self, hf: str, box: Box, stages: _Stages, ep: int) -> tuple[tuple[int, ...], tuple[Slice, ...]]:
        """Ranks, ascending, with the slice by which each holds the box."""
        key = hf, box, stages, ep
        if key not in self._holders:
            found: dict[int, Slice] = {}
            for row, chunk, held in self._boxes[hf][box]:
                for stage in stages[row]:
                    for rank in self._layout.ranks(self._rows[hf][row], chunk, stage, ep):
                        found.setdefault(rank, held)
            ranks = tuple(sorted(found))
            self._holders[key] = ranks, tuple(found[rank] for rank in ranks)
        return self._holders[key]


class _Target:
    """Which processes want a chunk of a row."""

    def __init__(self, layout: Layout, where: Mapping[int, int]) -> None:
        self.layout = layout
        self._where = where
        self._processes: dict[tuple[str | None, bool, int, tuple[int, ...], int], tuple[int, ...]] = {}

    def processes(self, spec: ParamSpec, chunk: int, stages: tuple[int, ...], ep: int) -> tuple[int, ...]:
        key = spec.axis, "{expert}" in spec.name, chunk, stages, ep
        if key not in self._processes:
            ranks = [rank for stage in stages for rank in self.layout.ranks(spec, chunk, stage, ep)]
            self._processes[key] = tuple(sorted(self._where[rank] for rank in ranks if rank in self._where))
        return self._processes[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Layers and experts of one chunk that have the same holders and are wanted by the same processes."""

    layers: tuple[int, ...]
    experts: tuple[int, ...]
    wanting: tuple[int, ...]
    src_stages: _Stages
    src_ep: int


def _groups(source: _Source, target: _Target, spec: ParamSpec, chunk: int, hf: str) -> Iterator[_Group]:
    layers: dict[tuple[tuple[int, ...], _Stages], list[int]] = {}
    for layer, stages in sorted(target.layout.layer_stages(spec).items()):
        layers.setdefault((stages, source.stages(hf, layer)), []).append(layer)
    experts: dict[tuple[int, int], list[int]] = {}
    for expert in range(target.layout.shape.num_experts if "{expert}" in spec.name else 1):
        experts.setdefault((target.layout.expert_rank(spec, expert), source.expert_rank(hf, expert)), []).append(expert)
    for (dst_stages, src_stages), some_layers in layers.items():
        for (dst_ep, src_ep), some_experts in experts.items():
            wanting = target.processes(spec, chunk, dst_stages, dst_ep)
            if wanting:
                yield _Group(
                    layers=tuple(some_layers),
                    experts=tuple(some_experts),
                    wanting=wanting,
                    src_stages=src_stages,
                    src_ep=src_ep,
                )


def _stretches(source: _Source, target: _Target, spec: ParamSpec) -> Iterator[Stretch]:
    for chunk, slices in enumerate(target.layout.chunks(spec)):
        for wanted in slices:
            cuts = [(box, cut) for box in source.boxes(wanted.hf) if (cut := intersect(box, wanted.hf_box))]
            for group in _groups(source, target, spec, chunk, wanted.hf):
                held = [(cut, *source.holders(wanted.hf, box, group.src_stages, group.src_ep)) for box, cut in cuts]
                found = [_stretch(wanted, group, cut, ranks, slices) for cut, ranks, slices in held if ranks]
                _refuse_gap(wanted, group, found)
                yield from found


def _stretch(wanted: Slice, group: _Group, cut: Box, ranks: tuple[int, ...], slices: tuple[Slice, ...]) -> Stretch:
    mine = set(ranks).intersection(group.wanting)
    return Stretch(
        box=cut,
        wanted=wanted,
        layers=group.layers,
        experts=group.experts,
        holders=ranks,
        held=slices,
        local=tuple(sorted(mine)),
        remote=tuple(process for process in group.wanting if process not in mine) if mine else group.wanting,
    )


def _striped(stretch: Stretch, limit: int) -> Iterator[Stretch]:
    """The stretch cut along dim 0 into boxes of at most ``limit`` elements, where somebody has a choice."""
    start, stop = stretch.box[0]
    parts = min(stop - start, -(-stretch.size // limit))
    if parts <= 1 or len(stretch.holders) == 1 or not stretch.remote:
        yield stretch
        return
    edges = [start + (stop - start) * i // parts for i in range(parts + 1)]
    for low, high in pairwise(edges):
        yield replace(stretch, box=((low, high), *stretch.box[1:]))


def _dealt(stretches: Sequence[Stretch]) -> list[Stretch]:
    """Senders chosen. Those with the fewest holders, then the largest boxes, choose first: the rest can even out."""
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
    """How many of ``count`` transfers each holder sends: as if each went in turn to the least loaded, lowest rank."""
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


def _refuse_overlap(hf: str, boxes: Sequence[Box]) -> None:
    for i, box in enumerate(boxes):
        other = next((b for b in boxes[:i] if intersect(box, b) is not None), None)
        if other is not None:
            raise WeightError(f"{hf}: the source holds {box} and {other}, which overlap; fix its table")


def _refuse_gap(wanted: Slice, group: _Group, stretches: Sequence[Stretch]) -> None:
    found, needed = sum(stretch.size for stretch in stretches), volume(wanted.hf_box)
    if found != needed:
        layer, expert = group.layers[0], group.experts[0]
        raise WeightError(
            f"{wanted.hf.format(layer=layer, expert=expert)}: the source has {found} of the {needed} elements of box "
            f"{wanted.hf_box} that {wanted.param.format(layer=layer, expert=expert)} needs; add the tensor to the "
            f"source's table or drop it from the destination's"
        )


def _find(ascending: Sequence[int], process: int) -> int | None:
    i = bisect_left(ascending, process)
    return i if i < len(ascending) and ascending[i] == process else None
