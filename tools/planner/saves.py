"""Computes the bytes of a checkpoint, and of the host's memory that writing it takes. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rl_megatron.config.beside import nodes_of_role, reference_follows, separate
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import GB
from rl_megatron.models.shape import ModelShape
from rl_megatron.options.option import BYTES, Elements
from rl_megatron.placement.names import LEARNER
from rl_megatron.weights.layouts.learner import learner_layout
from rl_megatron.weights.layouts.parameters import elements_by_stage, trained_elements, trained_matrices

_STATE = 12  # bytes: a float32 copy of the parameter, and both moments
_MOMENT = 4  # of which Muon's matrices have one


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A checkpoint: bytes in all and by the busiest node, and steps from one to the next."""

    total: int
    by_node: int
    every: int  # steps; 0: only after the last
    most: int  # checkpoints that are on the disk at once
    best: int  # of these, checkpoint.keep_best: as many more for each other way in which a resume measures accuracy

    def describe(self) -> str:
        """A line to show."""
        when = f"every {self.every} steps" if self.every else "after the last step"
        return f"a checkpoint, {when}: {self.total / GB:,.1f} GB, up to {self.by_node / GB:,.1f} GB by one node"

    def describe_disk(self) -> str:
        """A line to show of the disk that the run needs."""
        more = f"; {self.best * self.total / GB:,.1f} GB more after a resume that measures accuracy otherwise"
        return (
            f"  up to {self.most} checkpoints at once: {self.most * self.total / GB:,.1f} GB of disk (checkpoint.keep*)"
            + (more if self.best else "")
        )


def bytes_by_rank(config: RunConfig, shape: ModelShape, role: str = LEARNER) -> dict[int, int]:
    """Bytes of weights and optimizer that each rank writes of the model of ``role``, and on the learner's of a
    reference that follows the policy; ranks left out write none.

    Of ranks with the same parameters the first of a data-parallel group writes (megatron-core 0.16.1,
    ``fully_reshardable`` gathers its optimizer state there), the experts' group for experts. With Muon each writes what
    it steps, which is counted for the first. What is whole on all tensor-parallel ranks, norms and routers, counts for
    each. With ``learner.lora`` they write adapters alone.
    """
    layout, d = learner_layout(config, shape), config.learner.dims
    each, inner = BYTES[config.learner.dtype], d.world_size // d.pp
    muon = config.learner.optimizer.name == "muon"
    of_stages = trained_elements(config, layout)
    whole_by = elements_by_stage(layout)
    beside = BYTES["float32"] if role == LEARNER and reference_follows(config) else 0
    held_by = of_stages if config.learner.lora.rank is not None else whole_by
    spared_of = trained_matrices(config, layout) if muon else [Elements(dense=0, experts=0)] * d.pp
    out: dict[int, int] = {}
    for stage, (held, trained, spared, whole) in enumerate(zip(held_by, of_stages, spared_of, whole_by, strict=True)):
        for rank in range(max(d.tp, d.etp * d.ep)):
            dense, experts = rank < d.tp, rank < d.etp * d.ep
            of_dense = held.dense * each + trained.dense * _STATE - spared.dense * _MOMENT + whole.dense * beside
            of_experts = held.experts * each + trained.experts * _STATE - spared.experts * _MOMENT
            out[stage * inner + rank] = dense * of_dense + experts * (of_experts + whole.experts * beside)
    return out


def copied_by_rank(config: RunConfig, shape: ModelShape, role: str = LEARNER) -> dict[int, float]:
    """Bytes of the host's memory that each learner rank takes for one model while its checkpoint is written apart.

    That is a copy of what it writes. Where data-parallel ranks share the optimizer's state out, each copies its shards
    too, which the first then gathers.
    """
    layout, learner = learner_layout(config, shape), config.learner
    d, out = learner.dims, Counter[int]()
    for rank, count in bytes_by_rank(config, shape, role).items():
        out[rank] += count
    if learner.optimizer.name == "muon":
        return dict(out)
    groups = d.dp * d.cp, d.tp * d.cp * d.dp // (d.etp * d.ep)
    inner = d.world_size // d.pp
    for stage, trained in enumerate(trained_elements(config, layout)):
        each = sum(
            _STATE * n // size for n, size in zip((trained.dense, trained.experts), groups, strict=True) if size > 1
        )
        for rank in range(stage * inner, (stage + 1) * inner):
            out[rank] += each
    return dict(out)


def save_cost(config: RunConfig, shape: ModelShape) -> Save:
    """A checkpoint of a run, with its critic's. Raises ConfigError if the layout does not divide the model's sizes."""
    saved = (LEARNER, "critic") if config.algorithm.needs_critic else (LEARNER,)
    by_node = [_by_node(config, role, bytes_by_rank(config.of_role(role), shape, role)) for role in saved]
    busiest = [max(found.values()) for found in by_node]
    return Save(
        total=sum(found.total() for found in by_node),
        by_node=max(busiest) if "critic" in separate(config) else sum(busiest),
        every=config.checkpoint.every,
        most=_most_at_once(config),
        best=config.checkpoint.keep_best,
    )


def _by_node(config: RunConfig, role: str, by_rank: Mapping[int, int]) -> Counter[int]:
    """Bytes by the number of the node among the role's."""
    world = config.learner_of(role).dims.world_size
    per_node = world
    if config.run.launcher != "local":
        apart = role in separate(config)
        per_node = -(-world // nodes_of_role(config, role)) if apart else config.slurm.tasks_per_node(world)
    out: Counter[int] = Counter()
    for rank, count in by_rank.items():
        out[rank // per_node] += count
    return out


def _most_at_once(config: RunConfig) -> int:
    """Checkpoints on the disk while the last is written: those that the rules keep, and itself."""
    section, steps = config.checkpoint, config.train.steps
    written = bool(config.warm_start.steps) + (-(-steps // section.every) if section.every else bool(steps))
    return min(section.keep + section.keep_best + 1, written)
