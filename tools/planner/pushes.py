"""Computes what a push of weights moves and how long that takes at stated speeds, before any weight exists. No torch.

Bytes between ranks are those of the real plans, into the layout that vLLM and SGLang have by their degrees. Latency,
packing, checksums and the engines' own work are left out, so real pushes take longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from launcher.servers.degrees import served_bytes
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.errors import GB
from rl_megatron.models.shape import ModelShape
from rl_megatron.options.option import BYTES
from rl_megatron.placement.files import writers_of_files
from rl_megatron.placement.routes import Route, engine_nodes, route_of
from rl_megatron.weights.formats.scaled import BLOCKS, with_scales
from rl_megatron.weights.layouts.families import hf_layout
from rl_megatron.weights.layouts.learner import engine_layout, learner_layout
from rl_megatron.weights.layouts.lora import hf_adapters, learner_adapters, ranks_of_parts
from rl_megatron.weights.layouts.parameters import elements_by_stage
from rl_megatron.weights.plans.cost import Links, plan_cost
from rl_megatron.weights.plans.plan import Place, Plan, plan, plan_into_copies, plan_of_group, receivers_of
from tools.planner.memory import bytes_served


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """A part of a push: bytes in all, of the busiest sender and of the busiest receiver; seconds at ``speed``."""

    where: str  # "over NVLink"
    total: float
    sent: float
    received: float
    seconds: float
    speed: str

    def describe(self) -> str:
        """A line to show."""
        if not self.total:
            return f"nothing goes {self.where}"
        ends = {"sends": self.sent, "receives": self.received}
        busiest = " and ".join(f"one {does} up to {count / GB:,.1f} GB" for does, count in ends.items() if count)
        return f"{self.total / GB:,.1f} GB {self.where}; {busiest}: {self.seconds:,.2f} s at {self.speed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """A push of all weights, or of adapters: its route, and its parts, one after the other. Own code's part is not
    known."""

    route: Route
    hops: tuple[Hop, ...]
    before: float = 0.0  # bytes of the model, where it is pushed once and adapters after that

    @property
    def seconds(self) -> float:
        """Seconds of all parts that are known."""
        return sum(hop.seconds for hop in self.hops)


def push_cost(config: RunConfig, shape: ModelShape) -> Push:
    """The push of a run's weights. Raises ConfigError if the layout or the servers do not fit."""
    route, kind, served = route_of(config), config.transport, config.rollout.served
    if config.weights.push == "adapters":
        return _of_adapters(config, shape, route)
    if served and kind.direct:
        return Push(route=route, hops=(_straight(config, shape, route),))
    if served:
        first = [hop for hop in (_into_files(config, shape, route),) if hop.total] if route.over else []
        return Push(route=route, hops=(*first, *_through_file(config, served_bytes(config, shape), route)))
    return Push(route=route, hops=(_into_every_rank(config, shape, route),))


def _by_stage(section: ServerSection) -> list[int]:
    """The servers' processes, server by server and in it replica by replica, in the order of a layout's ranks: all of a
    stage come before the next."""
    each = section.tp * section.pp
    blocks = range(0, section.count * section.dp * each, each)
    return [
        block + stage * section.tp + i for stage in range(section.pp) for block in blocks for i in range(section.tp)
    ]


def _straight(config: RunConfig, shape: ModelShape, route: Route) -> Hop:
    """From the learner's ranks into the servers', whose processes follow the learner's in number."""
    source, target, nodes = learner_layout(config, shape), engine_layout(config, shape), engine_nodes(config)
    first = source.dims.world_size
    links = _links(config, {first + rank: node for rank, node in enumerate(nodes)})
    if target is None:
        return _evenly(config, shape, route, links)
    hf, blocks = hf_layout(shape), BLOCKS.get(config.rollout.server.quantization)
    source, target = with_scales(source, hf, blocks), with_scales(target, hf, blocks)
    each = bytes_served(config, source)
    processes = _by_stage(config.rollout.server)
    if config.transport.last_hop:
        places = [Place(node=str(links.node(process)), name="", gpu="") for process in range(first + len(nodes))]
        receivers = receivers_of(places, first)
        moves = plan_of_group(source, target, [receivers[process] for process in processes])
        return _over_links(moves, each, links, route)
    placement = {rank: first + process for rank, process in enumerate(processes)}
    return _over_links(plan(source, target, placement=placement), each, links, route)


def _into_files(config: RunConfig, shape: ModelShape, route: Route) -> Hop:
    """Into the learner ranks that write the servers' files."""
    layout = learner_layout(config, shape)
    moves = plan_into_copies(layout, hf_layout(shape), writers_of_files(config))
    return _over_links(moves, bytes_served(config, layout), _links(config, {}), route)


def _into_every_rank(config: RunConfig, shape: ModelShape, route: Route) -> Hop:
    """Into a whole copy of the model on each of the learner's ranks, which lack what other ranks hold."""
    layout, world, links = learner_layout(config, shape), config.learner.dims.world_size, _links(config, {})
    each, whole = BYTES[config.learner.dtype], sum(map(prod, hf_layout(shape).local_shapes(0).values()))
    lacks = [max(0, whole - held.both) * each for held in elements_by_stage(layout)]
    total, across = sum(lacks) * world // layout.dims.pp, world > links.per_node
    return Hop(
        where=f"over {route.over}",
        total=total,
        sent=total / world,
        received=max(lacks),
        seconds=max(lacks) / (links.nic if across else links.nvlink),
        speed=_speed_of(links, across=across),
    )


def _over_links(moves: Plan, bytes_of: Callable[[str], int], links: Links, route: Route) -> Hop:
    cost = plan_cost(moves, bytes_of, links)
    return Hop(
        where=f"over {route.over}",
        total=cost.within + cost.across,
        sent=max(cost.sent.values(), default=0),
        received=max(cost.received.values(), default=0),
        seconds=cost.bound,
        speed=_speed_of(links, across=cost.across > 0),
    )


def _evenly(config: RunConfig, shape: ModelShape, route: Route, links: Links) -> Hop:
    """As `_straight`, if nobody knows what each rank of a server holds: by what the learner's ranks send together."""
    section, first = config.rollout.server, config.learner.dims.world_size
    processes = range(first, first + len(links.elsewhere))
    across = any(not links.within(0, process) for process in processes)
    servers = len(processes) if section.addresses is not None else section.count
    total = servers * served_bytes(config, shape)
    return Hop(
        where=f"over {route.over}",
        total=total,
        sent=total / first,
        received=0,
        seconds=total / first / (links.nic if across else links.nvlink),
        speed=f"{_speed_of(links, across=across)}, for the senders; the receivers' shares are not known",
    )


def _of_adapters(config: RunConfig, shape: ModelShape, route: Route) -> Push:
    """Into the first of the ranks that write each file, which writes its folder; then all servers read theirs."""
    learner, each = learner_layout(config, shape), BYTES[config.learner.dtype]
    layout = learner_adapters(learner, config.learner.lora)
    whole = hf_adapters(hf_layout(shape), ranks_of_parts(learner, config.learner.lora))
    size = sum(map(prod, whole.local_shapes(0).values())) * each
    moves = plan_into_copies(layout, whole, [group[:1] for group in writers_of_files(config)])
    first = [hop for hop in (_over_links(moves, lambda _: each, _links(config, {}), route),) if hop.total]
    hops = (*first, *_through_file(config, size, route, alone=True))
    return Push(route=route, hops=hops, before=served_bytes(config, shape))


def _through_file(config: RunConfig, size: int, route: Route, *, alone: bool = False) -> tuple[Hop, Hop]:
    """The writers of each file write it together, or one ``alone``; then all servers read theirs at once, a node of a
    shared file system once."""
    speeds, nodes = config.slurm.speeds, engine_nodes(config)
    section, writers = config.rollout.server, writers_of_files(config)
    each = section.ranks if section.addresses is None else 1
    readers = len(set(nodes)) if route.shared else len({(i // each, node) for i, node in enumerate(nodes)})
    sent = size if alone else size / len(writers[0])
    written, read = sent / (speeds.memory * GB), size / (speeds.memory * GB)
    speed = f"{speeds.memory:g} GB/s a process"
    if route.shared:
        written = size / (min(speeds.storage_node, speeds.storage) * GB)
        read = max(size / speeds.storage_node, size * readers / speeds.storage) / GB
        speed = _storage_speed(config)
    file, total = str(route.file), size * len(writers)
    return (
        Hop(where=f"written to {file}", total=total, sent=sent, received=0, seconds=written, speed=speed),
        Hop(where=f"read from {file}", total=size * readers, sent=0, received=size, seconds=read, speed=speed),
    )


def _links(config: RunConfig, elsewhere: Mapping[int, int]) -> Links:
    """Links of learner ranks, and of processes ``elsewhere``. Processes on CPUs of one node share its memory."""
    speeds, gpus, world = config.slurm.speeds, config.learner.device != "cpu", config.learner.dims.world_size
    per_node = world if config.run.launcher == "local" else config.slurm.tasks_per_node(world)
    near = speeds.nvlink if gpus else speeds.memory
    return Links(nic=speeds.nic * GB, nvlink=near * GB, per_node=per_node, elsewhere=elsewhere)


def _speed_of(links: Links, *, across: bool) -> str:
    inside = f"{links.nvlink / GB:g} GB/s a rank inside a node"
    return f"{inside}, {links.nic / GB:g} between nodes" if across else inside


def _storage_speed(config: RunConfig) -> str:
    speeds = config.slurm.speeds
    return f"{speeds.storage_node:g} GB/s a node, {speeds.storage:g} in all"
