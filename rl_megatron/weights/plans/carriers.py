"""Plans moves into engine ranks through *carriers*: a learner rank beside each, on its GPU or its node. No torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rl_megatron.errors import ConfigError
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.plans.plan import Plan, plan
from rl_megatron.weights.plans.transfers import Stretch


class Place(NamedTuple):
    """Where a process is: its node, by the kernel's boot id and by name, and its GPU's UUID (none: empty)."""

    node: str
    name: str
    gpu: str


def carriers_of(places: Sequence[Place], learners: int) -> list[int]:
    """The carrier of each engine rank: the learner rank on its GPU or, on CPUs, those of its node in turn.

    ``places`` are `own_place` each rank, the learner's first. Raises ConfigError if an engine rank has none, or shares
    its GPU with another.
    """
    there: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, (node, _, gpu) in enumerate(places[:learners]):
        there[node, gpu].append(rank)
    carried: Counter[tuple[str, str]] = Counter()
    out = []
    for rank, (node, name, gpu) in enumerate(places[learners:]):
        where, ranks = f"engine rank {rank} is on {name}" + (f", GPU {gpu}" if gpu else ""), there[node, gpu]
        if not ranks:
            raise ConfigError(
                f"weights.transport=direct: {where}, where no learner rank is that could hand weights on; start "
                "servers on the learner's own nodes and GPUs; servers on other GPUs of this machine need "
                "rollout.server.memory_fraction left out; or set weights.transport=file"
            )
        if gpu and carried[node, gpu]:
            raise ConfigError(
                f"weights.transport=direct: {where}, as another engine rank is; give each a GPU of its own, or set "
                "weights.transport=file"
            )
        out.append(ranks[carried[node, gpu] % len(ranks)])
        carried[node, gpu] += 1
    return out


def carried_plan(src: Layout, dst: Layout, carriers: Sequence[int]) -> Plan:
    """As `plan`, where rank r of ``dst`` is a process after those of ``src`` and gets all through process carriers[r].

    What a carrier holds itself it sends; so the fewest elements go from another process to a carrier.
    """
    first, out = src.dims.world_size, list[Stretch]()
    for moves, ranks in _lanes(src, dst, carriers):
        to = {carrier: first + rank for rank, carrier in ranks.items()}
        out += (part for stretch in moves.stretches for part in stretch.handed_on(to))
    return Plan(stretches=tuple(out))


def plan_into_carriers(src: Layout, dst: Layout, carriers: Sequence[int]) -> Plan:
    """What the processes of ``src`` send each other in `carried_plan`."""
    return Plan(stretches=tuple(stretch for moves, _ in _lanes(src, dst, carriers) for stretch in moves.stretches))


def _lanes(src: Layout, dst: Layout, carriers: Sequence[int]) -> Iterator[tuple[Plan, dict[int, int]]]:
    """Plans into carriers, each for one engine rank of a carrier at most, with the ranks' carriers."""
    lanes: list[dict[int, int]] = []
    for rank, carrier in enumerate(carriers):
        lane = next((lane for lane in lanes if carrier not in lane.values()), None)
        if lane is None:
            lanes.append(lane := {})
        lane[rank] = carrier
    for lane in lanes:
        yield plan(src, dst, placement=lane), lane
