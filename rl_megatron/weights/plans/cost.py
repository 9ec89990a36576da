"""Estimates the cost of moving weights over given links, in bytes and seconds, by a plan and by a broadcast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from rl_megatron.weights.boxes import volume
from rl_megatron.weights.layouts.layout import Layout, coordinates
from rl_megatron.weights.plans.plan import Plan, Rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """A cluster: process p is on node ``p // per_node``, or on ``elsewhere[p]`` if that names one.

    Bandwidths are per GPU, in bytes/s each way.
    """

    nic: float
    nvlink: float
    per_node: int
    elsewhere: Mapping[int, int] = field(default_factory=dict)

    def node(self, process: int) -> int:
        """The number of the process's node."""
        return self.elsewhere.get(process, process // self.per_node)

    def within(self, a: int, b: int) -> bool:
        """Whether two processes share a node."""
        return self.node(a) == self.node(b)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One way to move weights. ``sent`` and ``received`` are bytes by process; times are seconds.

    ``bound`` is the busiest port's time if it never waits; ``expected`` includes waiting.
    """

    within: int
    across: int
    sent: Mapping[int, int]
    received: Mapping[int, int]
    bound: float
    expected: float


def plan_cost(moves: Plan, element_bytes: int | Callable[[str], int], links: Links) -> Cost:
    """Cost of a plan executed round by round; a pair begins when both have finished their previous round.

    ``element_bytes`` are those of all tensors, or of a Hugging Face pattern. It ignores latency and dtype conversion.
    """
    traffic = moves.traffic(element_bytes if callable(element_bytes) else lambda hf: element_bytes)
    ports: Counter[tuple[int, bool, bool]] = Counter()  # (process, sending, within the node) -> bytes
    for (a, b), moved in traffic.items():
        ports[a, True, links.within(a, b)] += moved
        ports[b, False, links.within(a, b)] += moved
    return Cost(
        within=sum(moved for (_, sending, near), moved in ports.items() if sending and near),
        across=sum(moved for (_, sending, near), moved in ports.items() if sending and not near),
        sent=_by_process(ports, sending=True),
        received=_by_process(ports, sending=False),
        bound=max(
            (moved / (links.nvlink if near else links.nic) for (_, _, near), moved in ports.items()), default=0.0
        ),
        expected=_last_round(traffic, moves.rounds(), links),
    )


def broadcast_cost(src: Layout, receivers: Iterable[int], element_bytes: int, links: Links) -> Cost:
    """Cost of the usual push: each learner rank gathers the whole model, then rank 0 broadcasts it to all receivers.

    A learner rank gathers from its own node what that holds. The broadcast enters each node once; the node forwards it.
    Bound: gather and broadcast overlap fully; expected: one after the other.
    """
    own, nodes, total = _held(src, links.per_node)
    ranks = range(src.dims.world_size)
    near = {rank: (nodes[rank // links.per_node] - own[rank]) * element_bytes for rank in ranks}
    far = {rank: (total - nodes[rank // links.per_node]) * element_bytes for rank in ranks}
    model = total * element_bytes
    targets = sorted(set(receivers) - {0})
    entered = {process // links.per_node for process in targets} - {0}
    gather = max(max(far.values()) / links.nic, max(near.values()) / links.nvlink)
    push = model / (links.nic if entered else links.nvlink) if targets else 0.0
    received = Counter({rank: near[rank] + far[rank] for rank in ranks})
    for process in targets:
        received[process] += model
    mean = sum(near.values()) + sum(far.values())
    sent = Counter({rank: mean // len(ranks) for rank in ranks})  # a ring: each rank forwards what it receives
    if targets:
        sent[0] += model
        for process in targets[:-1]:
            sent[process] += model
    return Cost(
        within=sum(near.values()) + model * (len(targets) - len(entered)),
        across=sum(far.values()) + model * len(entered),
        sent=sent,
        received=received,
        bound=max(gather, push),
        expected=gather + push,
    )


def _by_process(ports: Mapping[tuple[int, bool, bool], int], *, sending: bool) -> dict[int, int]:
    out: Counter[int] = Counter()
    for (process, sends, _), moved in ports.items():
        if sends == sending:
            out[process] += moved
    return dict(out)


def _last_round(traffic: Mapping[tuple[int, int], int], rounds: Rounds, links: Links) -> float:
    """When the last process has finished. A process's round takes as long as the longer of its two messages."""
    pairs: dict[int, list[tuple[int, int]]] = {}
    for a, b in traffic:
        pairs.setdefault(rounds.of_pair(a, b), []).append((a, b))
    ready: dict[int, float] = {}
    for k in sorted(pairs):
        done: dict[int, float] = {}
        for a, b in pairs[k]:
            bandwidth = links.nvlink if links.within(a, b) else links.nic
            end = max(ready.get(a, 0.0), ready.get(b, 0.0)) + traffic[a, b] / bandwidth
            for process in (a, b):
                done[process] = max(done.get(process, 0.0), end)
        ready |= done
    return max(ready.values(), default=0.0)


def _held(layout: Layout, per_node: int) -> tuple[list[int], list[int], int]:
    """Elements that each rank, each node and all ranks together hold; replicas count once, padding does not count."""
    own = [0] * layout.dims.world_size
    nodes: list[set[tuple[object, ...]]] = [set() for _ in range(-(-len(own) // per_node))]
    elements: dict[tuple[object, ...], int] = {}
    for spec in layout.rows():
        chunks, stages = layout.chunks(spec), layout.layer_stages(spec)
        layers = Counter(stage for places in stages.values() for stage in places)
        experts = layout.shape.num_experts // layout.dims.ep if "{expert}" in spec.name else 1
        for rank in range(len(own)):
            at = coordinates(layout.dims, rank)
            if not layers[at.pp]:
                continue
            stage, ep = at.pp if "{layer}" in spec.name else 0, at.ep if "{expert}" in spec.name else 0
            for held in chunks[at.on(spec.axis)]:
                key = held.hf, held.hf_box, stage, ep
                elements[key] = volume(held.hf_box) * layers[at.pp] * experts
                own[rank] += elements[key]
                nodes[rank // per_node].add(key)
    everything = set().union(*nodes)
    return own, [sum(elements[key] for key in node) for node in nodes], sum(elements[key] for key in everything)
