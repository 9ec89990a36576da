"""Plans which rank sends each box to which: integer arithmetic over two layouts, no torch, equal on every process.

A plan is symbolic. One `Stretch` stands for all layers and experts of a table's row that have the same holders and the
same destinations; a process expands only what it sends and receives itself.

Plans moves into whole copies of a model, each of which the processes of a node write together. No torch.

Converts a plan to and from JSON, for processes that receive it: lists of a Plan's fields, in their order.

The order in which each process receives a plan's layers: one after the other, so that it need not hold them all.

Plans moves into engine ranks: members of the learner's group, or through a learner rank beside them. No torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from rl_megatron.errors import ConfigError, WeightError
from rl_megatron.weights.layouts.layout import Layout, Slice
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


def plan_into_copies(src: Layout, dst: Layout, writers: Sequence[Sequence[int]]) -> Plan:
    """The plan into a copy of ``dst``, a layout of one rank, for each group of ``writers``, which are ranks of ``src``.

    A box's rows are shared out over the writers of a group that hold it and so copy them, or, if none does, over all
    of the group: then they come from the holder with the fewest elements to send. So a group receives what no writer of
    it holds, once. A rank is in one group at most. Raises WeightError as `plan` does.
    """
    drafts: list[Stretch] = []
    for stretch in stretches_between(src, dst, {0: 0}):
        drafts += _shared_out(stretch, writers, turn=len(drafts))
    return dealt(drafts, src.dims.world_size)


def _shared_out(stretch: Stretch, writers: Sequence[Sequence[int]], turn: int) -> Iterator[Stretch]:
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


def to_json(moves: Plan) -> list[Any]:
    """The plan as lists that `from_json` reads."""
    return [
        [b.box, _row(b.wanted), b.layers, b.experts, b.holders, [_row(h) for h in b.held], b.local, b.remote, b.bounds]
        for b in moves.stretches
    ]


def from_json(said: Any) -> Plan:
    """The plan in JSON. Raises WeightError if it is not a plan."""
    try:
        return Plan(stretches=tuple(_stretch(*row) for row in said))
    except (TypeError, ValueError) as error:
        raise WeightError(f"rank 0 sent something that is not a plan of weights: {error}") from error


def _row(one: Slice) -> list[Any]:
    return [one.hf, one.hf_box, one.param, one.shape, one.box]


def _stretch(
    box: Any, wanted: Any, layers: Any, experts: Any, holders: Any, held: Any, local: Any, remote: Any, bounds: Any
) -> Stretch:
    return Stretch(
        box=_box(box),
        wanted=_slice(*wanted),
        layers=_numbers(layers),
        experts=_numbers(experts),
        holders=_numbers(holders),
        held=tuple(_slice(*one) for one in held),
        local=_numbers(local),
        remote=_numbers(remote),
        bounds=_numbers(bounds),
    )


def _slice(hf: Any, hf_box: Any, param: Any, shape: Any, box: Any) -> Slice:
    return Slice(hf=str(hf), hf_box=_box(hf_box), param=str(param), shape=_numbers(shape), box=_box(box))


def _box(said: Any) -> tuple[tuple[int, int], ...]:
    return tuple((int(low), int(high)) for low, high in said)


def _numbers(said: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in said)


class Turns:
    """The turn in which each process receives each layer; what belongs to no layer comes in turn 0.

    Of processes that receive the same layers each begins with another, so that all pipeline stages, and all replicas
    that have their share of the layers to send, begin at once. Equal on every process.
    """

    def __init__(self, moves: Plan) -> None:
        layers: defaultdict[int, set[int]] = defaultdict(set)
        for some, processes in {(one.layers, one.remote) for one in moves.stretches if one.in_layers}:
            for process in processes:
                layers[process].update(some)
        alike: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for process in sorted(layers):
            alike[tuple(sorted(layers[process]))].append(process)
        self._places: dict[int, dict[int, int]] = {}  # by process: the place of a layer among its layers
        self._starts: dict[int, int] = {}
        for order, same in alike.items():
            places = {layer: i for i, layer in enumerate(order)}
            for i, process in enumerate(same):
                self._places[process], self._starts[process] = places, len(order) * i // len(same)

    def of(self, moved: Transfer) -> int:
        """The turn of a transfer between processes."""
        if moved.layer is None:
            return 0
        places = self._places[moved.dst_rank]
        return 1 + (places[moved.layer] - self._starts[moved.dst_rank]) % len(places)


class Place(NamedTuple):
    """Where a process is: what its node's other processes can reach, its host's name, its GPU's UUID (none: empty)."""

    node: str
    name: str
    gpu: str


_HOP_ON_A_GPU = True  # not measured on several GPUs; False: engine ranks on the learner's GPUs are refused


def receivers_of(places: Sequence[Place], learners: int) -> list[int]:
    """The process of the group that receives what goes into each engine rank.

    That is a learner rank beside it, which hands it on: the one on its GPU or, on CPUs, those of its node in turn; else
    the engine rank itself, as a member of the group. ``places`` are `own_place` of all, the learner's first. Raises
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
    """As `plan`, where rank r of ``dst`` is a process after those of ``src`` and gets all through process receivers[r].

    What a learner rank that hands on holds itself it sends; so the fewest elements go from another process to it.
    """
    first, out = src.dims.world_size, list[Stretch]()
    for moves, ranks in _lanes(src, dst, receivers):
        to = {receiver: first + rank for rank, receiver in ranks.items()}
        out += (part for stretch in moves.stretches for part in stretch.handed_on(to))
    return Plan(stretches=tuple(out))


def plan_of_group(src: Layout, dst: Layout, receivers: Sequence[int]) -> Plan:
    """What the processes of the group send each other in `plan_into`."""
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
