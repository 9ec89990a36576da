"""Places ranks on nodes by integer arithmetic. `submit` shows the placement, and the job's steps use it.

Ranks fill a node before the next. In megatron-core's order (``tp-cp-ep-dp-pp``, tp fastest) tensor-parallel ranks are
then neighbors in one node. Pipeline stages are far apart, and expert-parallel groups span as many nodes as they need.

Shares a node's CPUs among its ranks.

Assigns nodes to the roles of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rl_megatron.config.beside import num_role_nodes, separate, with_role_keys
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.placement.names import LEARNER
from rl_megatron.types import ParallelDims


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """The node of every rank, ``ranks_per_node`` on each node, in the order of the nodes."""

    dims: ParallelDims
    nodes: tuple[str, ...]
    ranks_per_node: int
    domain: int = 1  # neighboring nodes that NVLink joins
    role: str = LEARNER

    def rank_node(self, rank: int) -> str:
        """Returns the node that the rank runs on."""
        return self.nodes[rank // self.ranks_per_node]

    def spans(self, nodes: int = 1) -> Mapping[str, int]:
        """Returns kind -> maximum number of nodes, or blocks of ``nodes``, that a group of two or more ranks spans."""
        return {
            kind: max(len({rank // (self.ranks_per_node * nodes) for rank in group}) for group in groups)
            for kind, groups in group_ranks(self.dims).items()
            if len(groups[0]) > 1
        }

    def describe(self) -> str:
        """Returns lines to show: the ranks of each node (three of many nodes), then the nodes that groups span."""
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


def place_ranks(
    dims: ParallelDims, nodes: Sequence[str], ranks_per_node: int, *, domain: int = 1, role: str = LEARNER
) -> RankPlacement:
    """Places ranks on nodes. Raises ConfigError if their numbers differ or a tensor-parallel group would leave NVLink.

    ``domain``: neighboring nodes that NVLink joins.
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
            f"{role}: {len(nodes)} nodes cannot share out {ranks} evenly; change a degree of roles.layouts.{role}, or "
            "slurm.ntasks_per_node"
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
    return RankPlacement(dims=dims, nodes=tuple(nodes), ranks_per_node=ranks_per_node, domain=domain, role=role)


def make_placement(config: RunConfig, nodes: Sequence[str], role: str = LEARNER) -> RankPlacement:
    """Places the ranks of the learner, or of a separate role, on its nodes. Raises like `place_ranks`."""
    dims, slurm = config.role_learner(role).dims, config.slurm
    each = slurm.tasks_per_node(dims.world_size) if role == LEARNER else -(-dims.world_size // max(1, len(nodes)))
    try:
        placement = place_ranks(dims, nodes, each, domain=slurm.nvlink_nodes, role=role)
    except ConfigError as error:
        raise ConfigError(with_role_keys(config, role, str(error))) from error
    on_gpus = config.learner.device != "cpu" and slurm.gpus_per_node > 0
    if role == LEARNER and on_gpus and slurm.gpus_per_node < each:
        raise ConfigError(
            f"slurm.ntasks_per_node={each} is more than slurm.gpus_per_node={slurm.gpus_per_node}: NCCL takes one rank "
            "a GPU; lower it, or leave it out"
        )
    return placement


def ranks_by_role(config: RunConfig) -> dict[str, int]:
    """Returns the number of ranks of the learner, and of each separate role in the order of a job's nodes."""
    return {role: config.role_learner(role).dims.world_size for role in (LEARNER, *separate(config))}


def group_ranks(dims: ParallelDims) -> Mapping[str, list[list[int]]]:
    """Returns kind -> ranks of each process group of megatron-core 0.16.1.

    Dense groups are over tp, cp, dp, pp. Groups of experts are over etp, ep, the experts' data parallelism, pp. The
    first axis varies fastest (megatron/core/parallel_state.py, RankGenerator).
    """
    dense = {"tp": dims.tp, "cp": dims.cp, "dp": dims.dp, "pp": dims.pp}
    rest = dims.tp * dims.cp * dims.dp // (dims.etp * dims.ep)
    expert = {"etp": dims.etp, "ep": dims.ep, "edp": rest, "pp": dims.pp}
    return {
        **{kind: list(_groups(dense, kind)) for kind in dense},
        **{kind: list(_groups(expert, kind)) for kind in ("etp", "ep", "edp")},
    }


def _groups(sizes: Mapping[str, int], kind: str) -> Iterable[list[int]]:
    """Yields groups of ranks that differ only in their coordinate of ``kind``."""
    world, stride = 1, 1
    for name, size in sizes.items():
        stride = world if name == kind else stride
        world *= size
    for first in range(world):
        if first // stride % sizes[kind] == 0:
            yield [first + i * stride for i in range(sizes[kind])]


def shares_of_cores(cpus: Mapping[int, tuple[int, int]], ranks: int) -> list[list[int]]:
    """Divides CPUs among ranks, given each CPU's package and core. Shares are empty if there are too few cores.

    Shares differ by at most one core. They are neighbors in the order of packages, like GPUs in the order of ranks.
    Both threads of a core belong to one rank.
    """
    cores: dict[tuple[int, int], list[int]] = {}
    for cpu, where in cpus.items():
        cores.setdefault(where, []).append(cpu)
    ordered = [sorted(cores[where]) for where in sorted(cores)]
    if len(ordered) < ranks:
        return [[] for _ in range(ranks)]
    cuts = [len(ordered) * i // ranks for i in range(ranks + 1)]
    return [[cpu for core in ordered[a:b] for cpu in core] for a, b in pairwise(cuts)]


def extra_role_nodes(config: RunConfig) -> dict[str, int]:
    """Returns the number of nodes of each role with its own nodes, without the learner, in the order of the job."""
    slurm, counts = config.slurm, {role: num_role_nodes(config, role) for role in separate(config)}
    return counts | ({"engines": slurm.engines.nodes} if slurm.engines.nodes else {})


def cut(nodes: Sequence[str], others: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Divides equal nodes among roles. The learner's are first: all nodes that the others leave."""
    first = max(1, len(nodes) - sum(others.values()))
    found = {LEARNER: tuple(nodes[:first])}
    for role, count in others.items():
        found[role] = tuple(nodes[first : first + count])
        first += count
    return found


def placeholder_nodes(config: RunConfig) -> dict[str, tuple[str, ...]]:
    """Returns role -> placeholder names for the nodes of a job that does not exist yet."""
    others = extra_role_nodes(config)
    return cut([f"node {i}" for i in range(config.slurm.nodes + sum(others.values()))], others)


def gpus_by_role(config: RunConfig) -> dict[str, int]:
    """Returns role -> GPUs of a job's nodes. "engines" are servers on their own nodes.

    If slurm.gpus_per_node=0 leaves them open, it counts the GPUs of ranks, and of servers that do not share them.
    """
    slurm, server = config.slurm, config.rollout.server
    if not slurm.gpus_per_node:
        ranks = ranks_by_role(config)
        own = config.rollout.served and server.addresses is None
        apart = own and (slurm.engines.nodes or not (server.colocated or server.memory_fraction))
        return ranks | ({"engines": server.count * server.ranks} if apart else {})
    return {role: slurm.gpus_per_node * len(nodes) for role, nodes in placeholder_nodes(config).items()}
