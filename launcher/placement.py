"""Which rank and which engine run where: integer arithmetic, said before a job is sent and kept by its steps.

Ranks fill a node before the next. In megatron-core's order (``tp-cp-ep-dp-pp``, tp fastest) tensor-parallel ranks are
then neighbours in one node, pipeline stages far apart, and expert-parallel groups span as many nodes as they must.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from launcher.naming import LEARNER
from rl_megatron.config.run import RunConfig
from rl_megatron.config.slurm import SlurmSection
from rl_megatron.errors import ConfigError
from rl_megatron.types import ParallelDims


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The node of every rank, ``ranks_per_node`` on each node, in the order of the nodes."""

    dims: ParallelDims
    nodes: tuple[str, ...]
    ranks_per_node: int
    domain: int = 1  # neighbouring nodes that NVLink joins
    role: str = LEARNER

    def node_of(self, rank: int) -> str:
        """Where the rank runs."""
        return self.nodes[rank // self.ranks_per_node]

    def spans(self, nodes: int = 1) -> Mapping[str, int]:
        """Most nodes, or blocks of ``nodes``, that a group of each kind with two ranks or more spans."""
        return {
            kind: max(len({rank // (self.ranks_per_node * nodes) for rank in group}) for group in groups)
            for kind, groups in group_ranks(self.dims).items()
            if len(groups[0]) > 1
        }

    def describe(self) -> str:
        """Lines for a person: ranks of each node (runs of like nodes in one), then how far groups reach."""
        count, each = len(self.nodes), self.ranks_per_node
        shown = range(count) if count <= 8 else (0, 1, count - 1)
        whose = "" if self.role == LEARNER else f"{self.role}: "
        lines = [f"{whose}{self.dims.world_size} ranks on {count} nodes, {each} on each"]
        for i in shown:
            if count > 8 and i == count - 1:
                lines.append("  ...")
            lines.append(f"  {self.nodes[i]}: ranks {i * each}-{(i + 1) * each - 1}")
        domains = self.spans(self.domain)
        for kind, nodes in self.spans().items():
            where = "inside a node" if nodes == 1 else f"across {nodes} nodes"
            if self.domain > 1 and nodes > 1:
                where += " of one NVLink domain" if domains[kind] == 1 else f" of {domains[kind]} NVLink domains"
            lines.append(f"  {kind}={len(group_ranks(self.dims)[kind][0])}: {where}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where an engine server runs, and on which GPUs of that node; none: on its CPUs."""

    node: str
    gpus: tuple[int, ...]


def describe_seats(seats: Sequence[Seat]) -> str:
    """A line for each server."""
    return "\n".join(
        f"engine {i}: {seat.node}" + (f", GPUs {seat.gpus[0]}-{seat.gpus[-1]}" if seat.gpus else "")
        for i, seat in enumerate(seats)
    )


def seat(replicas: int, tp: int, nodes: Sequence[str], gpus_per_node: int, *, shared: bool) -> tuple[Seat, ...]:
    """Servers on nodes, each inside one, shared out evenly in order.

    Where GPUs are ``shared`` with the learner, servers may also share them among themselves. Raises ConfigError where
    a server would span nodes, or there are too few GPUs.
    """
    each = -(-replicas // len(nodes))
    if gpus_per_node and tp > gpus_per_node:
        raise ConfigError(
            f"rollout.server.tp={tp} is more than the {gpus_per_node} GPUs of a node: a server would leave its node, "
            "whose network is many times slower; lower it"
        )
    if gpus_per_node and each * tp > gpus_per_node and not shared:
        raise ConfigError(
            f"rollout.server.replicas={replicas} of tp={tp} on slurm.engines.nodes={len(nodes)} are {each} on a node, "
            f"{each * tp} GPUs of {gpus_per_node}; lower them, or set "
            f"slurm.engines.nodes={-(-replicas // (gpus_per_node // tp))}"
        )
    slots = max(1, gpus_per_node // tp)
    return tuple(
        Seat(
            node=nodes[i // each],
            gpus=tuple(range(i % each % slots * tp, (i % each % slots + 1) * tp)) if gpus_per_node else (),
        )
        for i in range(replicas)
    )


def place(
    dims: ParallelDims, nodes: Sequence[str], ranks_per_node: int, *, domain: int = 1, role: str = LEARNER
) -> Placement:
    """Ranks on nodes. Raises ConfigError where their numbers differ or a tensor-parallel group would leave NVLink.

    ``domain``: neighbouring nodes that NVLink joins.
    """
    problems = []
    room, wanted = len(nodes) * ranks_per_node, dims.world_size
    ranks = f"tp*cp*dp*pp = {dims.tp}*{dims.cp}*{dims.dp}*{dims.pp} = {wanted} ranks"
    if room != wanted and role == LEARNER:
        problems.append(
            f"slurm.nodes={len(nodes)} * slurm.ntasks_per_node={ranks_per_node} = {room} tasks, but the learner has "
            f"{ranks}; "
            + (f"set learner.dp={dims.dp * room // wanted}" if room % wanted == 0 else "change one of them")
        )
    elif room != wanted:
        problems.append(
            f"slurm.{role}.nodes={len(nodes)} cannot share out the ranks of a separate {role} evenly: it has the "
            f"learner's layout, {ranks}; set it to a divisor"
        )
    for key, degree in (("tp", dims.tp), ("etp", dims.etp)):
        if ranks_per_node * domain % degree and len(nodes) > domain:
            joined = f" * slurm.nvlink_nodes={domain}" if domain > 1 else ""
            per_node = "slurm.ntasks_per_node" if role == LEARNER else f"{role} ranks on a node"
            each = f"{per_node}={ranks_per_node}"
            problems.append(
                f"learner.{key}={degree} does not divide {each}{joined}: a "
                f"tensor-parallel group would leave its {'NVLink domain' if joined else 'node'}, whose network is many "
                "times slower; set it to a divisor"
            )
    if problems:
        raise ConfigError("\n".join(problems))
    return Placement(dims=dims, nodes=tuple(nodes), ranks_per_node=ranks_per_node, domain=domain, role=role)


def placement_of(config: RunConfig, nodes: Sequence[str], role: str = LEARNER) -> Placement:
    """The ranks of the learner, or of a separate role, on its nodes. Raises as `place` does."""
    dims, slurm = config.learner.dims, config.slurm
    each = slurm.tasks_per_node(dims.world_size) if role == LEARNER else -(-dims.world_size // max(1, len(nodes)))
    placement = place(dims, nodes, each, domain=slurm.nvlink_nodes, role=role)
    if role != LEARNER and config.learner.device != "cpu" and slurm.gpus_of(role) < each:
        raise ConfigError(
            f"slurm.{role}.nodes={len(nodes)} get {each} ranks each, more than their {slurm.gpus_of(role)} GPUs; raise "
            f"slurm.{role}.nodes or slurm.{role}.gpus_per_node"
        )
    return placement


def seats_of(config: RunConfig, nodes: Sequence[str], engine_nodes: Sequence[str]) -> tuple[Seat, ...]:
    """Where the servers run that are started for a run; none where there are none to start. Raises as `seat` does."""
    section, slurm = config.rollout.server, config.slurm
    if not config.rollout.served or section.addresses:
        return ()
    gpus = (slurm.engine_gpus if engine_nodes else slurm.gpus_per_node) if config.learner.device != "cpu" else 0
    return seat(section.replicas, section.tp, engine_nodes or nodes, gpus, shared=not engine_nodes)


def seats_here(config: RunConfig, gpus: int) -> tuple[Seat, ...]:
    """As `seats_of`, on one machine with so many GPUs: behind those of the ranks, which take the first.

    Where there are too few servers share them if they were told to: in turns, or with a share of each one's memory.
    Raises ConfigError.
    """
    section, ranks = config.rollout.server, config.learner.dims.world_size * (1 + len(config.roles.separate))
    if not config.rollout.served or section.addresses:
        return ()
    if config.learner.device == "cpu":
        return (Seat(node="here", gpus=()),) * section.replicas
    wanted = section.replicas * section.tp
    apart = not section.colocated and ranks + wanted <= gpus
    if section.tp > gpus or not (apart or section.colocated or section.memory_fraction):
        raise ConfigError(
            f"{ranks} learner processes and rollout.server.replicas={section.replicas} of "
            f"rollout.server.tp={section.tp} want {ranks + wanted} GPUs, and this machine has {gpus}; lower them, or "
            "let servers share GPUs with the learner by rollout.server.colocated=true (they take turns) or "
            "rollout.server.memory_fraction (a share of each one's memory)"
        )
    first = ranks if apart else 0
    firsts = (first + i * section.tp for i in range(section.replicas))
    return tuple(Seat(node="here", gpus=tuple((f + j) % gpus for j in range(section.tp))) for f in firsts)


def beside(slurm: SlurmSection, separate: Sequence[str]) -> dict[str, int]:
    """The number of nodes of each role that has some beside the learner's, in the order of the job's."""
    counts = {role: slurm.alone(role).nodes or slurm.nodes for role in separate}
    return counts | ({"engines": slurm.engines.nodes} if slurm.engines.nodes else {})


def cut(nodes: Sequence[str], others: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """The nodes of like ones that each role gets: the learner's, all that the others leave, come first."""
    first = max(1, len(nodes) - sum(others.values()))
    found = {LEARNER: tuple(nodes[:first])}
    for role, count in others.items():
        found[role] = tuple(nodes[first : first + count])
        first += count
    return found


def made_up_nodes(config: RunConfig) -> dict[str, tuple[str, ...]]:
    """Names for the nodes of a job that is not there yet, by role."""
    others = beside(config.slurm, config.roles.separate)
    return cut([f"node {i}" for i in range(config.slurm.nodes + sum(others.values()))], others)


def engines_elsewhere(config: RunConfig) -> bool:
    """Whether a run starts servers on other nodes than the learner's first."""
    if config.run.launcher == "local":
        return False
    nodes = made_up_nodes(config)
    seats = seats_of(config, nodes[LEARNER], nodes.get("engines", ()))
    return any(s.node != nodes[LEARNER][0] for s in seats)


def group_ranks(dims: ParallelDims) -> Mapping[str, list[list[int]]]:
    """Every kind of group of megatron-core 0.16.1 and the ranks of each group of it.

    Dense groups are over tp, cp, dp, pp, groups of experts over etp, ep, the rest of the data parallelism, pp; the
    first varies fastest (megatron/core/parallel_state.py, RankGenerator).
    """
    dense = {"tp": dims.tp, "cp": dims.cp, "dp": dims.dp, "pp": dims.pp}
    rest = dims.tp * dims.cp * dims.dp // (dims.etp * dims.ep)
    expert = {"etp": dims.etp, "ep": dims.ep, "edp": rest, "pp": dims.pp}
    return {
        **{kind: list(_groups(dense, kind)) for kind in dense},
        **{kind: list(_groups(expert, kind)) for kind in ("etp", "ep", "edp")},
    }


def _groups(sizes: Mapping[str, int], kind: str) -> Iterable[list[int]]:
    """Ranks that differ in ``kind`` alone."""
    world, stride = 1, 1
    for name, size in sizes.items():
        stride = world if name == kind else stride
        world *= size
    for first in range(world):
        if first // stride % sizes[kind] == 0:
            yield [first + i * stride for i in range(sizes[kind])]
