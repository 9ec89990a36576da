"""The cost of a step, a push and a checkpoint, in lines that ``plan`` and ``submit`` show. No torch.

Bytes of a push between ranks are those of the real plans, into the layout that vLLM and SGLang have by their degrees.
Seconds are at stated speeds. Latency, packing, checksums and the engines' own work are left out, so real pushes
take longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from launcher.servers.degrees import served_bytes
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.errors import GB, ConfigError
from rl_megatron.feature import adapter_layouts, make_pushes
from rl_megatron.models.shape import ModelShape
from rl_megatron.placement.files import file_writer_ranks
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import gpus_by_role
from rl_megatron.placement.routes import Route, engine_nodes, find_route
from rl_megatron.training.flops import training_flops
from rl_megatron.types import BYTES
from rl_megatron.weights.boxes import volume
from rl_megatron.weights.layouts.families import hf_layout
from rl_megatron.weights.layouts.layout import Layout, coordinates
from rl_megatron.weights.layouts.learner import elements_by_stage, engine_layout, learner_layout
from rl_megatron.weights.plans.plan import Place, Plan, Rounds, find_receivers, plan, plan_into_copies, plan_of_group
from tools.planner.hardware import RANGE, Gpu, gpu_named
from tools.planner.memory import Save, bytes_served, encoded_layout, footprints, save_cost
from tools.planner.rl_step import RlStep, length_distribution, rl_step, unmodeled_features


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """A cluster: process p is on node ``p // per_node``, or on ``elsewhere[p]`` if that names one.

    Bandwidths are per GPU, in bytes/s each way.
    """

    nic: float
    nvlink: float
    per_node: int
    node_of: Mapping[int, int] = field(default_factory=dict)

    def node(self, process: int) -> int:
        """Returns the index of the process's node."""
        return self.node_of.get(process, process // self.per_node)

    def within(self, a: int, b: int) -> bool:
        """True if two processes share a node."""
        return self.node(a) == self.node(b)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One way to move weights. ``sent`` and ``received`` are bytes by process; times are seconds.

    ``bound`` is the busiest port's time if it never waits; ``expected`` includes waiting.
    """

    bytes_within_nodes: int
    bytes_across_nodes: int
    sent: Mapping[int, int]
    received: Mapping[int, int]
    bound: float
    expected: float


def plan_cost(moves: Plan, element_bytes: int | Callable[[str], int], links: Links) -> Cost:
    """Returns the cost of a plan executed by rounds; a pair begins when both have finished their previous round.

    ``element_bytes`` are those of all tensors, or of a Hugging Face pattern. It ignores latency and dtype conversion.
    """
    traffic = moves.traffic(element_bytes if callable(element_bytes) else lambda hf: element_bytes)
    ports: Counter[tuple[int, bool, bool]] = Counter()  # (process, sending, within the node) -> bytes
    for (a, b), moved in traffic.items():
        ports[a, True, links.within(a, b)] += moved
        ports[b, False, links.within(a, b)] += moved
    return Cost(
        bytes_within_nodes=sum(moved for (_, sending, near), moved in ports.items() if sending and near),
        bytes_across_nodes=sum(moved for (_, sending, near), moved in ports.items() if sending and not near),
        sent=_process_bytes(ports, sending=True),
        received=_process_bytes(ports, sending=False),
        bound=max(
            (moved / (links.nvlink if near else links.nic) for (_, _, near), moved in ports.items()), default=0.0
        ),
        expected=_last_round(traffic, moves.rounds(), links),
    )


def broadcast_cost(src: Layout, receivers: Iterable[int], element_bytes: int, links: Links) -> Cost:
    """Returns the usual push's cost: each learner rank gathers the model, then rank 0 broadcasts it to all receivers.

    A learner rank gathers from its own node the parts there. The broadcast enters each node once; the node forwards it.
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
    sent = Counter({rank: mean // len(ranks) for rank in ranks})  # a ring: each rank forwards received bytes
    if targets:
        sent[0] += model
        for process in targets[:-1]:
            sent[process] += model
    return Cost(
        bytes_within_nodes=sum(near.values()) + model * (len(targets) - len(entered)),
        bytes_across_nodes=sum(far.values()) + model * len(entered),
        sent=sent,
        received=received,
        bound=max(gather, push),
        expected=gather + push,
    )


def _process_bytes(ports: Mapping[tuple[int, bool, bool], int], *, sending: bool) -> dict[int, int]:
    out: Counter[int] = Counter()
    for (process, sends, _), moved in ports.items():
        if sends == sending:
            out[process] += moved
    return dict(out)


def _last_round(traffic: Mapping[tuple[int, int], int], rounds: Rounds, links: Links) -> float:
    """Returns the last process's end, in seconds. A round takes as long as the longer of a process's two messages."""
    pairs: dict[int, list[tuple[int, int]]] = {}
    for a, b in traffic:
        pairs.setdefault(rounds.pair_round(a, b), []).append((a, b))
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
    """Counts elements of each rank, each node and all ranks together; replicas count once, padding does not count."""
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
            for held in chunks[at.index_on(spec.axis)]:
                key = held.hf, held.hf_box, stage, ep
                elements[key] = volume(held.hf_box) * layers[at.pp] * experts
                own[rank] += elements[key]
                nodes[rank // per_node].add(key)
    everything = set().union(*nodes)
    return own, [sum(elements[key] for key in node) for node in nodes], sum(elements[key] for key in everything)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """A part of a push: total bytes, those of the busiest sender and of the busiest receiver; seconds at ``speed``."""

    link: str  # "over NVLink"
    total: float
    sent: float
    received: float
    seconds: float
    speed: str

    def describe(self) -> str:
        """Returns a line to show."""
        if not self.total:
            return f"nothing goes {self.link}"
        ends = {"sends": self.sent, "receives": self.received}
        busiest = " and ".join(f"one {does} up to {count / GB:,.1f} GB" for does, count in ends.items() if count)
        return f"{self.total / GB:,.1f} GB {self.link}; {busiest}: {self.seconds:,.2f} s at {self.speed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """A push of all weights, or of adapters: its route, and its parts, one after the other. The part of custom code is
    not known."""

    route: Route
    hops: tuple[Hop, ...]
    before: float = 0.0  # bytes of the model if it is pushed once, and adapters after that

    @property
    def seconds(self) -> float:
        """The seconds of all known parts."""
        return sum(hop.seconds for hop in self.hops)


def push_cost(config: RunConfig, shape: ModelShape) -> Push:
    """Returns the push of a run's weights. Raises ConfigError if the layout or the servers do not fit."""
    route, kind, served = find_route(config), config.transport, config.rollout.served
    if make_pushes(config) is not None:
        return _adapter_problems(config, shape, route)
    if served and kind.direct:
        return Push(route=route, hops=(_straight(config, shape, route),))
    if served:
        first = [hop for hop in (_into_files(config, shape, route),) if hop.total] if route.link else []
        return Push(route=route, hops=(*first, *_through_file(config, served_bytes(config, shape), route)))
    return Push(route=route, hops=(_into_every_rank(config, shape, route),))


def _stage_processes(section: ServerSection) -> list[int]:
    """Returns the servers' processes, numbered by server and by replica within it, in the order of a layout's ranks:
    all of a stage come before the next."""
    each = section.tp * section.pp
    blocks = range(0, section.count * section.dp * each, each)
    return [
        block + stage * section.tp + i for stage in range(section.pp) for block in blocks for i in range(section.tp)
    ]


def _straight(config: RunConfig, shape: ModelShape, route: Route) -> Hop:
    """Returns the hop from the learner's ranks into the servers' processes, which follow the learner's in number."""
    source, target, nodes = learner_layout(config, shape), engine_layout(config, shape), engine_nodes(config)
    first = source.dims.world_size
    links = _links(config, {first + rank: node for rank, node in enumerate(nodes)})
    if target is None:
        return _evenly(config, shape, route, links)
    hf = hf_layout(shape)
    source, target = encoded_layout(config, source, hf), encoded_layout(config, target, hf)
    each = bytes_served(config, hf)
    processes = _stage_processes(config.rollout.server)
    if config.transport.last_hop:
        places = [Place(node=str(links.node(process)), name="", gpu="") for process in range(first + len(nodes))]
        receivers = find_receivers(places, first)
        moves = plan_of_group(source, target, [receivers[process] for process in processes])
        return _make_hop(moves, each, links, route)
    placement = {rank: first + process for rank, process in enumerate(processes)}
    return _make_hop(plan(source, target, placement=placement), each, links, route)


def _into_files(config: RunConfig, shape: ModelShape, route: Route) -> Hop:
    """Returns the hop into the learner ranks that write the servers' files."""
    layout = learner_layout(config, shape)
    moves = plan_into_copies(layout, hf_layout(shape), file_writer_ranks(config))
    return _make_hop(moves, bytes_served(config, layout), _links(config, {}), route)


def _into_every_rank(config: RunConfig, shape: ModelShape, route: Route) -> Hop:
    """Returns the hop into a whole copy of the model on each learner rank, which lacks the other ranks' parts."""
    layout, world, links = learner_layout(config, shape), config.learner.dims.world_size, _links(config, {})
    each, whole = BYTES[config.learner.dtype], sum(map(prod, hf_layout(shape).local_shapes(0).values()))
    lacks = [max(0, whole - held.both) * each for held in elements_by_stage(layout)]
    total, across = sum(lacks) * world // layout.dims.pp, world > links.per_node
    return Hop(
        link=f"over {route.link}",
        total=total,
        sent=total / world,
        received=max(lacks),
        seconds=max(lacks) / (links.nic if across else links.nvlink),
        speed=_speed_of(links, across=across),
    )


def _make_hop(moves: Plan, bytes_of: Callable[[str], int], links: Links, route: Route) -> Hop:
    cost = plan_cost(moves, bytes_of, links)
    return Hop(
        link=f"over {route.link}",
        total=cost.bytes_within_nodes + cost.bytes_across_nodes,
        sent=max(cost.sent.values(), default=0),
        received=max(cost.received.values(), default=0),
        seconds=cost.bound,
        speed=_speed_of(links, across=cost.bytes_across_nodes > 0),
    )


def _evenly(config: RunConfig, shape: ModelShape, route: Route, links: Links) -> Hop:
    """Returns the hop of `_straight` by the learner's sent bytes, if the layout of a server's ranks is not known."""
    section, first = config.rollout.server, config.learner.dims.world_size
    processes = range(first, first + len(links.node_of))
    across = any(not links.within(0, process) for process in processes)
    servers = len(processes) if section.addresses is not None else section.count
    total = servers * served_bytes(config, shape)
    return Hop(
        link=f"over {route.link}",
        total=total,
        sent=total / first,
        received=0,
        seconds=total / first / (links.nic if across else links.nvlink),
        speed=f"{_speed_of(links, across=across)}, for the senders; the receivers' shares are not known",
    )


def _adapter_problems(config: RunConfig, shape: ModelShape, route: Route) -> Push:
    """Returns the push into the first rank that writes each file and its folder; then all servers read theirs."""
    learner, each = learner_layout(config, shape), BYTES[config.learner.dtype]
    adapters = adapter_layouts(config.learner)
    assert adapters is not None, "the rows of weights.push say so"
    layout, whole = adapters.on_ranks(learner), adapters.file_layout(learner, hf_layout(shape))
    size = sum(map(prod, whole.local_shapes(0).values())) * each
    moves = plan_into_copies(layout, whole, [group[:1] for group in file_writer_ranks(config)])
    first = [hop for hop in (_make_hop(moves, lambda _: each, _links(config, {}), route),) if hop.total]
    hops = (*first, *_through_file(config, size, route, is_single=True))
    return Push(route=route, hops=hops, before=served_bytes(config, shape))


def _through_file(config: RunConfig, size: int, route: Route, *, is_single: bool = False) -> tuple[Hop, Hop]:
    """Returns the hops of writing and reading files: the writers of a file share it, or one writes ``is_single``. Then
    all servers read theirs at the same time, and a node reads a shared file system once."""
    speeds, nodes = _hardware(config), engine_nodes(config)
    section, writers = config.rollout.server, file_writer_ranks(config)
    each = section.ranks if section.addresses is None else 1
    readers = len(set(nodes)) if route.shared else len({(i // each, node) for i, node in enumerate(nodes)})
    sent = size if is_single else size / len(writers[0])
    written, read = sent / (speeds.node_file * GB), size / (speeds.node_file * GB)
    speed = f"{speeds.node_file:g} GB/s a process"
    if route.shared:
        written = size / (min(speeds.storage_node, speeds.storage) * GB)
        read = max(size / speeds.storage_node, size * readers / speeds.storage) / GB
        speed = _storage_speed(config)
    file, total = str(route.file), size * len(writers)
    return (
        Hop(link=f"written to {file}", total=total, sent=sent, received=0, seconds=written, speed=speed),
        Hop(link=f"read from {file}", total=size * readers, sent=0, received=size, seconds=read, speed=speed),
    )


def _links(config: RunConfig, remote_nodes: Mapping[int, int]) -> Links:
    """Links of learner ranks, and of processes ``node_of``. Processes on CPUs of one node share its memory."""
    speeds, gpus, world = _hardware(config), config.learner.device != "cpu", config.learner.dims.world_size
    per_node = world if config.run.launcher == "local" else config.slurm.tasks_per_node(world)
    near = speeds.nvlink if gpus else speeds.node_file
    return Links(nic=speeds.network * GB, nvlink=near * GB, per_node=per_node, node_of=remote_nodes)


def _speed_of(links: Links, *, across: bool) -> str:
    inside = f"{links.nvlink / GB:g} GB/s a rank inside a node"
    return f"{inside}, {links.nic / GB:g} between nodes" if across else inside


def _hardware(config: RunConfig) -> Gpu:
    """Returns the kind of the run's GPUs, with speeds of links and files. Raises ConfigError for an unknown name."""
    return gpu_named(config.slurm.speeds.gpu or "h100", "slurm.speeds.gpu")


def _storage_speed(config: RunConfig) -> str:
    speeds = _hardware(config)
    return f"{speeds.storage_node:g} GB/s a node, {speeds.storage:g} in all"


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """A step that `rl_step` predicts for ``gpus`` of the kind ``gpu``, with completions of ``mean`` tokens.

    ``peak_seconds`` are the seconds of training at the peak of the learner's GPUs.
    """

    step: RlStep
    gpu: str
    gpus: int
    mean: float
    peak_seconds: float

    @property
    def mfu(self) -> float:
        """The share of the learner's peak that training uses."""
        return self.peak_seconds / self.step.parts["training"]

    def lines(self) -> Iterator[str]:
        """Yields lines to show below the step's seconds."""
        step, (low, high) = self.step, RANGE
        parts = ", ".join(f"{name} {seconds:,.1f} s" for name, seconds in step.parts.items())
        bubble = step.training.get("bubble", 0.0) / step.parts["training"]
        yield f"  {parts}{f'; sampling overlaps the rest (staleness {step.staleness})' if step.staleness else ''}"
        if step.min_staleness:
            older = ", which only makes data older" if step.staleness > step.min_staleness else ""
            yield (
                f"  the longest completion takes {step.sampled.longest:,.0f} s: "
                f"train.max_staleness={step.min_staleness} is "
                f"the least with which no step waits for it, and takes {step.slower:,.1f} s; here it is "
                f"{step.staleness}{older}"
            )
        rate = step.tokens_a_second
        yield (
            f"  {rate:,.0f} tokens/s, {rate / self.gpus:,.0f} on each of {self.gpus} GPUs; "
            f"training at {self.mfu:.0%} of the peak (MFU), {bubble:.0%} of it the pipeline's bubble"
        )
        if step.sampled.held_back:
            yield (
                "  rollout.server.max_concurrent_groups holds the servers back: raise it; "
                f"{step.sampled.requests:,} requests, each of a group, fill their places"
            )
        if step.server.drafts:
            yield (
                f"  a server's step with rollout.server.draft_tokens={step.server.drafts} gives "
                f"{1 + step.server.accepted:.2f} tokens of a row (assumed)"
            )
        yield (
            f"  expect training at {low:g} to {high:g} times its rate, whole steps less surely (docs/cluster.md); "
            f"completions of {self.mean:,.0f} tokens in the mean are assumed (slurm.speeds.mean_tokens)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step: ``predicted``, or the floor of a step with completions of full length;
    ``no_prediction_reason`` is the reason if none are predicted."""

    seconds: float
    predicted: PredictedStep | None = None
    no_prediction_reason: str = ""

    def lines(self) -> Iterator[str]:
        """Yields the estimate as lines of text, with units."""
        found = self.predicted
        if found is None:
            yield (
                f"a step: at least {self.seconds:,.1f} s if completions have full length, for training alone at the "
                "GPUs' peak"
            )
        if found is not None:
            yield f"a step: {found.step.seconds:,.1f} s, predicted for slurm.speeds.gpu={found.gpu}:"
            yield from found.lines()
        elif self.no_prediction_reason:
            yield f"  seconds by phase are not predicted: {self.no_prediction_reason}"

    def share(self, seconds: float) -> str:
        """Returns the share of ``seconds`` in the step, in words; of a floor it is the highest possible share."""
        share = seconds / self.seconds
        if self.predicted is not None:
            return f"{share:.1%}"
        return f"at most {share:.1%}" if share <= 1 else f"{share:.1f} times this floor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A run's push, checkpoint and step; ``step`` is None if nothing is known of it, as on CPUs.

    ``signal_seconds`` are the seconds that a job leaves for a step and a checkpoint before its time is up.
    """

    push: Push
    save: Save
    step: StepTime | None
    signal_seconds: int
    pushes: bool = True  # False if only the run's end pushes weights, for its export

    def lines(self) -> Iterator[str]:
        """Yields the estimate as lines of text, with units."""
        route = self.push.route
        what = "a push" if self.pushes else "the export"
        if self.push.before:
            yield f"{self.push.before / GB:,.1f} GB of frozen weights to each server, once before the first push"
        pushed = "adapters" if self.push.before else "weights"
        way = f"{what} of {pushed} by {route.transport}, through {route.describe()}"
        if max([self.save.total, *(hop.total for hop in self.push.hops)]) < GB / 20:
            yield f"{way}, or a checkpoint: less than 0.1 GB"
        else:
            yield f"{way}:"
            yield from (f"  {hop.describe()}" for hop in self.push.hops)
            yield self.save.describe()
            yield self.save.describe_disk()
        if self.step is not None:
            seconds = self.push.seconds if self.pushes else 0.0
            yield from self.step.lines()
            yield f"  share of a push: {self.step.share(seconds)}"
        yield "all speeds are assumed, none is measured (slurm.speeds)"

    def warnings(self) -> Iterator[str]:
        """Yields changes that a user should make before the run."""
        if self.push.route.shared and self.pushes:
            yield (
                f"each push of weights goes through {self.push.route.file}: {self.push.seconds:,.1f} s at assumed "
                "speeds. Give servers nodes of their own (slurm.engines.nodes) and weights.transport=direct, or "
                "keep learner and servers on one node (docs/how_it_works.md)"
            )
        if self.step is not None and self.step.seconds > self.signal_seconds:
            yield (
                f"a step takes {self.step.seconds:,.0f} s, more than slurm.signal_seconds={self.signal_seconds} leaves "
                "it and its checkpoint: a job whose time is up loses the step; set it longer"
            )


def estimate(config: RunConfig, shape: ModelShape) -> Estimate:
    """Returns the estimate of a run. Raises ConfigError if the layout or the servers do not fit."""
    push = push_cost(config, shape)
    saves, step = save_cost(config, shape), _step(config, shape, push)
    signal = config.slurm.signal_seconds
    return Estimate(push=push, save=saves, step=step, signal_seconds=signal, pushes=config.kind.samples)


def planned_metrics(config: RunConfig, shape: ModelShape) -> dict[str, float]:
    """Returns the plan's values of a run's metrics on GPUs, by their names; none for a run on CPUs.

    memory/peak is that of torch's allocator, without engine servers on the same GPU, contexts and NCCL. Seconds,
    mfu/train and a completion's assumed length are included if ``slurm.speeds.gpu`` names the GPUs.
    Raises ConfigError if the layout does not divide the model's sizes.
    """
    if config.learner.device == "cpu":
        return {}
    apart = {"reserved", "engine"} if config.rollout.served else {"reserved"}
    held = [
        sum(taken for term, taken in one.terms.items() if term not in apart)
        for one in footprints(config, shape)
        if one.role == LEARNER
    ]
    step = estimate(config, shape).step
    found = step.predicted if step is not None else None
    if found is None:
        return {"memory/peak": max(held)}
    names = {"training": "train", "log-probs": "logprobs", "rollout": "rollout", "push": "weights"}
    seconds = {f"seconds/{name}": found.step.parts[part] for part, name in names.items() if part in found.step.parts}
    return {"memory/peak": max(held), "mfu/train": found.mfu, "response/length_mean": found.mean, **seconds}


def _step(config: RunConfig, shape: ModelShape, push: Push) -> StepTime | None:
    if config.learner.device == "cpu":
        return None
    why = _unpredicted(config)
    found = predicted(config, shape, push) if not why else None
    seconds = floor_seconds(config, shape) if found is None else found.step.seconds
    return StepTime(seconds=seconds, predicted=found, no_prediction_reason=why)


def _unpredicted(config: RunConfig) -> str:
    """Returns the reason that a step's seconds are not predicted; empty if they are."""
    server = config.rollout.server
    if config.slurm.speeds.gpu is None:
        return "set slurm.speeds.gpu to the kind of your GPUs, as h100"
    if not config.kind.samples:
        return f"they are of steps that sample, and job={config.job} samples nothing"
    for why in unmodeled_features(config):
        return f"they are of {why}"
    if not config.rollout.served:
        return f"they are of servers that sample, and rollout.engine={config.rollout.engine}"
    if server.addresses is not None:
        return "the GPUs of servers at rollout.server.addresses are not known"
    return f"they are of servers of one stage, and rollout.server.pp={server.pp}" if server.pp > 1 else ""


def predicted(config: RunConfig, shape: ModelShape, push: Push) -> PredictedStep:
    """Predicts the step of a configuration with ``slurm.speeds.gpu``; a push takes the seconds of its plan.

    Raises ConfigError for an unknown GPU, or if the mean length of completions is above the longest.
    """
    speeds, rollout, kind = config.slurm.speeds, config.rollout, str(config.slurm.speeds.gpu)
    mean = speeds.mean_tokens or rollout.max_new_tokens / 2
    if mean > rollout.max_new_tokens:
        raise ConfigError(
            f"slurm.speeds.mean_tokens={mean:g} is more than rollout.max_new_tokens={rollout.max_new_tokens}; lower "
            "the first, or leave it out for half of the second"
        )
    gpu, prompt = _hardware(config), rollout.max_prompt_tokens / 2
    each = training_flops(shape, [round(prompt + mean)], config.learner)
    flops = each * config.trained_per_step * config.train.epochs
    return PredictedStep(
        step=rl_step(
            config,
            shape,
            gpu,
            length_distribution(mean, rollout.max_new_tokens),
            prompt=prompt,
            staleness=config.train.max_staleness,
            push=push.seconds,
        ),
        gpu=kind,
        gpus=sum(gpus_by_role(config).values()),
        mean=mean,
        peak_seconds=flops / (config.learner.dims.world_size * gpu.peak.bfloat16 * 1e12),
    )


def floor_seconds(config: RunConfig, shape: ModelShape) -> float:
    """Returns seconds that no step on GPUs can beat if all completions have full length: only training, at peak.

    Forward and backward at the peak (`flops`); recomputation and sampling are left out.
    """
    peak = _hardware(config).peak.bfloat16 * 1e12
    each = training_flops(shape, [config.longest_sequence], config.learner)
    return each * config.trained_per_step * config.train.epochs / (config.learner.dims.world_size * peak)
