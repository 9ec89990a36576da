"""Which learner rank runs on which node: integer arithmetic, said before a job is sent and kept by its step.

Ranks fill a node before the next. In megatron-core's order (``tp-cp-ep-dp-pp``, tp fastest) tensor-parallel ranks are
then neighbours in one node, pipeline stages far apart, and expert-parallel groups span as many nodes as they must.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rl_megatron.errors import ConfigError
from rl_megatron.types import ParallelDims


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The node of every rank, ``ranks_per_node`` on each node, in the order of the nodes."""

    dims: ParallelDims
    nodes: tuple[str, ...]
    ranks_per_node: int

    def node_of(self, rank: int) -> str:
        """Where the rank runs."""
        return self.nodes[rank // self.ranks_per_node]

    def spans(self) -> Mapping[str, int]:
        """Most nodes that a group of each kind with two ranks or more spans."""
        return {
            kind: max(len({rank // self.ranks_per_node for rank in group}) for group in groups)
            for kind, groups in group_ranks(self.dims).items()
            if len(groups[0]) > 1
        }

    def describe(self) -> str:
        """Lines for a person: ranks of each node (runs of like nodes in one), then how far groups reach."""
        count, each = len(self.nodes), self.ranks_per_node
        shown = range(count) if count <= 8 else (0, 1, count - 1)
        lines = [f"{self.dims.world_size} ranks on {count} nodes, {each} on each"]
        for i in shown:
            if count > 8 and i == count - 1:
                lines.append("  ...")
            lines.append(f"  {self.nodes[i]}: ranks {i * each}-{(i + 1) * each - 1}")
        for kind, nodes in self.spans().items():
            where = "inside a node" if nodes == 1 else f"across {nodes} nodes"
            lines.append(f"  {kind}={len(group_ranks(self.dims)[kind][0])}: {where}")
        return "\n".join(lines)


def place(dims: ParallelDims, nodes: Sequence[str], ranks_per_node: int) -> Placement:
    """Ranks on nodes. Raises ConfigError where their numbers differ or a tensor-parallel group would leave its node."""
    problems = []
    room, wanted = len(nodes) * ranks_per_node, dims.world_size
    if room != wanted:
        problems.append(
            f"slurm.nodes={len(nodes)} * slurm.ntasks_per_node={ranks_per_node} = {room} tasks, but the learner has "
            f"tp*cp*dp*pp = {dims.tp}*{dims.cp}*{dims.dp}*{dims.pp} = {wanted} ranks; "
            + (f"set learner.dp={dims.dp * room // wanted}" if room % wanted == 0 else "change one of them")
        )
    for key, degree in (("tp", dims.tp), ("etp", dims.etp)):
        if ranks_per_node % degree and len(nodes) > 1:
            problems.append(
                f"learner.{key}={degree} does not divide slurm.ntasks_per_node={ranks_per_node}: a tensor-parallel "
                "group would leave its node, whose network is many times slower; set it to a divisor"
            )
    if problems:
        raise ConfigError("\n".join(problems))
    return Placement(dims=dims, nodes=tuple(nodes), ranks_per_node=ranks_per_node)


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
