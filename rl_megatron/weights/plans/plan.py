"""Plans which rank sends each box to which: integer arithmetic over two layouts, no torch, equal on every process.

A plan is symbolic. One `TransferSpan` stands for all layers and experts of a table's row that have the same holders and
the same destinations. A process expands only what it sends and receives itself. Plans go into other layouts and into
whole copies of a model, one for each node, which the node's processes write together. They also go into engine ranks,
which are members of the learner's group or have a learner rank as their relay."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from rl_megatron.errors import ConfigError, WeightError
from rl_megatron.weights.boxes import Box, Shape, intersect, shift, volume
from rl_megatron.weights.layouts.layout import Layout, ParamSpec, Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Copy ``src_box`` of ``src_param`` on process ``src_rank`` to ``dst_box`` of ``dst_param`` on ``dst_rank``.

    The boxes have one size; the shapes are those of the whole local tensors. ``layer`` is None outside of layers.
    """

    layer: int | None
    src_rank: int
    src_param: str
    src_shape: Shape
    src_box: Box
    dst_rank: int
    dst_param: str
    dst_shape: Shape
    dst_box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSpan:
    """``box`` of each listed layer and expert, from one of ``holders`` into each of the destinations.

    ``local`` destinations hold it themselves. The transfers into the others are in order of layer, expert and
    destination. Holder i sends those from ``bounds[i]`` up to ``bounds[i + 1]``, so that each destination gets about
    the same number from it.
    """

    box: Box
    box_in_target: Slice
    layers: tuple[int, ...]
    experts: tuple[int, ...]
    holders: tuple[int, ...]  # processes, ascending
    box_in_holder: tuple[Slice, ...]  # the boxes of each holder
    local: tuple[int, ...]
    remote: tuple[int, ...]  # processes, ascending
    bounds: tuple[int, ...] = ()

    @property
    def has_layers(self) -> bool:
        """True if it belongs to layers; if not, ``layers`` is (0,)."""
        return "{layer}" in self.box_in_target.param

    @property
    def count(self) -> int:
        """Number of transfers into one destination."""
        return len(self.layers) * len(self.experts)

    @property
    def size(self) -> int:
        """Number of elements of one transfer."""
        return volume(self.box)

    def rank_receives(self, process: int) -> Iterator[Transfer]:
        """The transfers that ``process`` receives, including those from itself."""
        if process in self.local:
            yield from self._write(bisect_left(self.holders, process), process, range(self.count))
        at = find_index(self.remote, process)
        if at is not None:
            for i in range(len(self.holders)):
                yield from self._write(i, process, self._span(i, at))

    def rank_sends(self, process: int) -> Iterator[Transfer]:
        """The transfers that ``process`` sends to others."""
        i = find_index(self.holders, process)
        if i is not None:
            for at, receiver in enumerate(self.remote):
                yield from self._write(i, receiver, self._span(i, at))

    def flows(self) -> Iterator[tuple[int, int, int]]:
        """(sender, receiver, elements) of each pair of different processes with transfers."""
        size, width = self.size, len(self.remote)
        for i, sender in enumerate(self.holders if self.remote else ()):
            each, more = divmod(self.bounds[i + 1] - self.bounds[i], width)
            for k in range(width if each else more):
                yield sender, self.remote[(self.bounds[i] + k) % width], (each + (k < more)) * size

    def relayed(self, to: Mapping[int, int]) -> Iterator[TransferSpan]:
        """The stretch into process ``to[p]`` instead of each destination p, which sends what it holds itself."""
        for process in self.local:
            i = bisect_left(self.holders, process)
            yield replace(
                self,
                holders=(process,),
                box_in_holder=(self.box_in_holder[i],),
                local=(),
                remote=(to[process],),
                bounds=(0, self.count),
            )
        if self.remote:
            yield replace(self, local=(), remote=tuple(sorted(to[process] for process in self.remote)))

    def _span(self, i: int, at: int) -> range:
        """The transfers into the ``at``-th destination that holder i sends."""
        width = len(self.remote)
        return range(-((at - self.bounds[i]) // width), -((at - self.bounds[i + 1]) // width))

    def _write(self, i: int, process: int, span: range) -> Iterator[Transfer]:
        if not span:
            return
        held, wanted = self.box_in_holder[i], self.box_in_target
        src_box, dst_box = shift(self.box, held.hf_box, held.box), shift(self.box, wanted.hf_box, wanted.box)
        for k in span:
            layer, expert = self.layers[k // len(self.experts)], self.experts[k % len(self.experts)]
            yield Transfer(
                layer=layer if self.has_layers else None,
                src_rank=self.holders[i],
                src_param=held.param.format(layer=layer, expert=expert),
                src_shape=held.shape,
                src_box=src_box,
                dst_rank=process,
                dst_param=wanted.param.format(layer=layer, expert=expert),
                dst_shape=wanted.shape,
                dst_box=dst_box,
            )


def find_index(ascending: Sequence[int], process: int) -> int | None:
    """The index of a process among others; None if it is not among them."""
    i = bisect_left(ascending, process)
    return i if i < len(ascending) and ascending[i] == process else None


_Stages = tuple[tuple[int, ...], ...]  # the stages that hold a layer, for each source row of one HF tensor


def spans_between(src: Layout, dst: Layout, where: Mapping[int, int]) -> list[TransferSpan]:
    """Returns the spans that every process in ``where`` needs and their holders, in ``dst``'s order, without senders.

    Rank r of ``dst`` is process ``where[r]``. Raises WeightError naming the tensor if ``src`` lacks elements or holds
    overlapping boxes.
    """
    source, target = _Source(src), _Target(dst, where)
    return [stretch for spec in dst.rows() for stretch in _stretches(source, target, spec)]


class _Source:
    """The ranks that hold each box of each HF tensor."""

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
    """The processes that need each chunk of each row."""

    def __init__(self, layout: Layout, where: Mapping[int, int]) -> None:
        self.layout = layout
        self._where = where
        self._processes: dict[tuple[str, int, tuple[int, ...], int], tuple[int, ...]] = {}

    def processes(self, spec: ParamSpec, chunk: int, stages: tuple[int, ...], ep: int) -> tuple[int, ...]:
        key = spec.name, chunk, stages, ep
        if key not in self._processes:
            ranks = [rank for stage in stages for rank in self.layout.ranks(spec, chunk, stage, ep)]
            self._processes[key] = tuple(sorted(self._where[rank] for rank in ranks if rank in self._where))
        return self._processes[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Layers and experts of one chunk that the same ranks hold and the same processes need."""

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


def _stretches(source: _Source, target: _Target, spec: ParamSpec) -> Iterator[TransferSpan]:
    for chunk, slices in enumerate(target.layout.chunks(spec)):
        for wanted in slices:
            cuts = [(box, cut) for box in source.boxes(wanted.hf) if (cut := intersect(box, wanted.hf_box))]
            for group in _groups(source, target, spec, chunk, wanted.hf):
                held = [(cut, *source.holders(wanted.hf, box, group.src_stages, group.src_ep)) for box, cut in cuts]
                found = [_stretch(wanted, group, cut, ranks, slices) for cut, ranks, slices in held if ranks]
                _refuse_gap(wanted, group, found)
                yield from found


def _stretch(wanted: Slice, group: _Group, cut: Box, ranks: tuple[int, ...], slices: tuple[Slice, ...]) -> TransferSpan:
    mine = set(ranks).intersection(group.wanting)
    return TransferSpan(
        box=cut,
        box_in_target=wanted,
        layers=group.layers,
        experts=group.experts,
        holders=ranks,
        box_in_holder=slices,
        local=tuple(sorted(mine)),
        remote=tuple(process for process in group.wanting if process not in mine) if mine else group.wanting,
    )


def _refuse_overlap(hf: str, boxes: Sequence[Box]) -> None:
    for i, box in enumerate(boxes):
        other = next((b for b in boxes[:i] if intersect(box, b) is not None), None)
        if other is not None:
            raise WeightError(f"{hf}: the source holds {box} and {other}, which overlap; fix its table")


def _refuse_gap(wanted: Slice, group: _Group, stretches: Sequence[TransferSpan]) -> None:
    found, needed = sum(stretch.size for stretch in stretches), volume(wanted.hf_box)
    if found != needed:
        layer, expert = group.layers[0], group.experts[0]
        raise WeightError(
            f"{wanted.hf.format(layer=layer, expert=expert)}: the source has {found} of the {needed} elements of box "
            f"{wanted.hf_box} that {wanted.param.format(layer=layer, expert=expert)} needs; add the tensor to the "
            f"source's table or drop it from the destination's"
        )


_LARGEST_SHARE = 32  # divides a sender's mean load: the largest transfer, if it has a choice of senders
SMALLEST_CUT = 256  # elements of a transfer that stays whole: cutting smaller boxes costs more than it evens


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Pairs the i-th sender in round k with receiver i + k modulo their number: all are busy from round 0 on."""

    senders: tuple[int, ...]
    receivers: tuple[int, ...]

    def __len__(self) -> int:
        return max(len(self.senders), len(self.receivers))

    def pair_round(self, sender: int, receiver: int) -> int:
        """The round of a sender and a receiver."""
        return (bisect_left(self.receivers, receiver) - bisect_left(self.senders, sender)) % len(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every transfer between two layouts, in the destination's table order; equal on every process."""

    stretches: tuple[TransferSpan, ...]

    def receives(self, process: int) -> Iterator[Transfer]:
        """The transfers that ``process`` writes, each element once; local copies have ``src_rank == dst_rank``."""
        for stretch in self.stretches:
            yield from stretch.rank_receives(process)

    def sends(self, process: int) -> Iterator[Transfer]:
        """The transfers that ``process`` sends to others, for each receiver in the order in which it receives them."""
        for stretch in self.stretches:
            yield from stretch.rank_sends(process)

    def traffic(self, bytes_of: Callable[[str], int] = lambda hf: 1) -> dict[tuple[int, int], int]:
        """Number of elements for every pair (sender, receiver) of different processes that have transfers.

        With ``bytes_of`` an element of a Hugging Face pattern, their bytes.
        """
        out: Counter[tuple[int, int]] = Counter()
        for stretch in self.stretches:
            each = bytes_of(stretch.box_in_target.hf)
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
    it holds itself. Otherwise the replica with the fewest elements to send so far sends it. Boxes too large to balance
    are cut. Raises WeightError naming the tensor if ``src`` lacks elements or holds overlapping boxes.
    """
    where = placement if placement is not None else {rank: rank for rank in range(dst.dims.world_size)}
    if len(set(where.values())) != len(where):
        raise WeightError(f"placement={dict(where)} puts two destination ranks into one process; give each its own")
    return assign_senders(spans_between(src, dst, where), src.dims.world_size)


def assign_senders(drafts: Sequence[TransferSpan], holders: int) -> Plan:
    """The plan of stretches without senders, among which ``holders`` processes are."""
    moved = sum(stretch.size * stretch.count * len(stretch.remote) for stretch in drafts)
    limit = max(SMALLEST_CUT, moved // (holders * _LARGEST_SHARE))
    return Plan(stretches=tuple(_dealt([part for stretch in drafts for part in _striped(stretch, limit)])))


def _striped(stretch: TransferSpan, limit: int) -> Iterator[TransferSpan]:
    """The stretch cut along dim 0 into boxes of at most ``limit`` elements, if it has several possible senders."""
    start, stop = stretch.box[0]
    parts = min(stop - start, -(-stretch.size // limit))
    if parts <= 1 or len(stretch.holders) == 1 or not stretch.remote:
        yield stretch
        return
    edges = [start + (stop - start) * i // parts for i in range(parts + 1)]
    for low, high in pairwise(edges):
        yield replace(stretch, box=((low, high), *stretch.box[1:]))


def _dealt(stretches: Sequence[TransferSpan]) -> list[TransferSpan]:
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
    """Returns how many of ``count`` transfers each holder sends; the least loaded, then the lowest, sends the next."""
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


def plan_into_copies(src: Layout, dst: Layout, writers: Sequence[Sequence[int]]) -> Plan:
    """The plan into a copy of ``dst``, a layout of one rank, for each group of ``writers``, which are ranks of ``src``.

    A box's rows are shared out over the writers of a group that hold it and so copy them. If none does, all of the
    group get a share, from the holder with the fewest elements to send. So a group receives once what none of its
    writers holds. A rank is in one group at most. Raises WeightError like `plan`.
    """
    drafts: list[TransferSpan] = []
    for stretch in spans_between(src, dst, {0: 0}):
        drafts += _shared_out(stretch, writers, turn=len(drafts))
    return assign_senders(drafts, src.dims.world_size)


def _shared_out(stretch: TransferSpan, writers: Sequence[Sequence[int]], turn: int) -> Iterator[TransferSpan]:
    """The stretch cut along dim 0, each part into one writer of every group; small ones go to writers in turn."""
    held = [[rank for rank in group if rank in stretch.holders] for group in writers]
    (start, stop), *rest = stretch.box
    most = max(len(mine or group) for mine, group in zip(held, writers, strict=True))
    parts = max(1, min(most, stop - start, stretch.size // SMALLEST_CUT))
    edges = [start + (stop - start) * i // parts for i in range(parts + 1)]
    for i, (low, high) in enumerate(pairwise(edges), start=turn):
        yield replace(
            stretch,
            box=((low, high), *rest),
            local=tuple(sorted(mine[i % len(mine)] for mine in held if mine)),
            remote=tuple(sorted(group[i % len(group)] for mine, group in zip(held, writers, strict=True) if not mine)),
        )


_STRETCHES: TypeAdapter[tuple[TransferSpan, ...]] = TypeAdapter(tuple[TransferSpan, ...])


def to_json(moves: Plan) -> list[Any]:
    """The plan as what `from_json` reads, for processes that receive it."""
    rows: list[Any] = _STRETCHES.dump_python(moves.stretches, mode="json")
    return rows


def from_json(data: Any) -> Plan:
    """The plan in JSON. Raises WeightError if it is not a plan."""
    try:
        return Plan(stretches=_STRETCHES.validate_python(data))
    except ValidationError as error:
        told = error.errors(include_url=False)[0]["msg"][:200]
        raise WeightError(f"rank 0 sent something that is not a plan of weights: {told}") from error


class LayerOrder:
    """The turn in which each process receives each layer; what belongs to no layer comes in turn 0.

    Processes that receive the same layers begin with different ones. So all pipeline stages, and all replicas that have
    their share of the layers to send, begin at the same time. Equal on every process.
    """

    def __init__(self, moves: Plan) -> None:
        layers: defaultdict[int, set[int]] = defaultdict(set)
        for some, processes in {(one.layers, one.remote) for one in moves.stretches if one.has_layers}:
            for process in processes:
                layers[process].update(some)
        equal: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for process in sorted(layers):
            equal[tuple(sorted(layers[process]))].append(process)
        self._places: dict[int, dict[int, int]] = {}  # the place of each layer among those of a process, by process
        self._starts: dict[int, int] = {}
        for order, same in equal.items():
            places = {layer: i for i, layer in enumerate(order)}
            for i, process in enumerate(same):
                self._places[process], self._starts[process] = places, len(order) * i // len(same)

    def position(self, moved: Transfer) -> int:
        """The turn of a transfer between processes."""
        if moved.layer is None:
            return 0
        places = self._places[moved.dst_rank]
        return 1 + (places[moved.layer] - self._starts[moved.dst_rank]) % len(places)


class Place(NamedTuple):
    """A process's place: what its node's other processes can reach, its host's name, its GPU's UUID (none: empty)."""

    node: str
    name: str
    gpu: str


_HOP_ON_A_GPU = True  # not measured on several GPUs; False: engine ranks on the learner's GPUs are refused


def find_receivers(places: Sequence[Place], learners: int) -> list[int]:
    """Returns the process of the group that receives the weights of each engine rank.

    That is a relay: the learner rank on its GPU or, on CPUs, those of its node in turn. Without one it is the engine
    rank itself, as a member of the group. ``places`` are `own_place` of all, the learner's first. Raises
    ConfigError if a learner rank is on an engine rank's GPU, but cannot reach it.
    """
    there: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, place in enumerate(places[:learners]):
        there[place.node, place.gpu].append(rank)
    gpus = {place.gpu for place in places[:learners] if place.gpu}
    carried: Counter[tuple[str, str]] = Counter()
    out = []
    for rank, (node, name, gpu) in enumerate(places[learners:]):
        beside = there.get((node, gpu), []) if _HOP_ON_A_GPU or not gpu else []
        if not beside and gpu in gpus:
            raise ConfigError(
                f"weights.transport=direct: engine rank {rank} is on {name}, GPU {gpu}, as a learner rank is that "
                "cannot hand weights on, of another user or in another container; set weights.transport=file"
            )
        out.append(beside[carried[node, gpu] % len(beside)] if beside else learners + rank)
        carried[node, gpu] += 1
    return out


def plan_into(src: Layout, dst: Layout, receivers: Sequence[int]) -> Plan:
    """Plans like `plan`; rank r of ``dst`` is a process after ``src``'s, and gets all through process receivers[r].

    A relay sends what it holds itself; so the fewest elements go from another process to it.
    """
    first, out = src.dims.world_size, list[TransferSpan]()
    for moves, ranks in _lanes(src, dst, receivers):
        to = {receiver: first + rank for rank, receiver in ranks.items()}
        out += (part for stretch in moves.stretches for part in stretch.relayed(to))
    return Plan(stretches=tuple(out))


def plan_of_group(src: Layout, dst: Layout, receivers: Sequence[int]) -> Plan:
    """Returns the transfers between processes of the group in `plan_into`."""
    return Plan(stretches=tuple(stretch for moves, _ in _lanes(src, dst, receivers) for stretch in moves.stretches))


def _lanes(src: Layout, dst: Layout, receivers: Sequence[int]) -> Iterator[tuple[Plan, dict[int, int]]]:
    """Plans into receivers, each for one engine rank of a receiver at most, with the ranks' receivers."""
    lanes: list[dict[int, int]] = []
    for rank, receiver in enumerate(receivers):
        lane = next((lane for lane in lanes if receiver not in lane.values()), None)
        if lane is None:
            lanes.append(lane := {})
        lane[rank] = receiver
    for lane in lanes:
        yield plan(src, dst, placement=lane), lane
