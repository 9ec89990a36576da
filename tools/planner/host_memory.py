"""Computes the host's memory that a node needs for what the learner keeps off its GPUs (``learner.offload``,
``learner.lora``), for copies of what is saved, and for the file of weights that servers read.

Most of it is pinned. torch's allocator of pinned memory rounds every request up to a power of two.
"""

from __future__ import annotations

from math import ceil, prod

from launcher.servers.degrees import served_bytes
from rl_megatron.config.beside import frozen_folders, separate
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.weights import NODE_MEMORY
from rl_megatron.models.shape import ModelShape
from rl_megatron.options.kept import offloaded
from rl_megatron.options.offload import SLAB, leaving
from rl_megatron.options.option import BYTES, Rank
from rl_megatron.options.pipeline import in_flight
from rl_megatron.placement.files import weights_folder, writers_of_files
from rl_megatron.placement.names import LEARNER
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.learner import role_layout
from rl_megatron.weights.layouts.lora import adapted_rows
from rl_megatron.weights.layouts.parameters import layers_held, ranks_of
from tools.planner.memory import gpu_terms
from tools.planner.saves import copied_by_rank

_FLOAT = 4  # bytes
_MOMENTS = 8  # bytes of both, which torch's AdamW does not pin


def host_bytes(config: RunConfig, shape: ModelShape) -> float:
    """Bytes on the node that needs most, with what rounding adds; slabs' ends that stay free are not counted.

    Raises ConfigError if the layout does not divide the model's sizes.
    """
    roles = (role for role in (LEARNER, *config.roles.layouts) if role not in frozen_folders(config))
    return max(_held(config, shape, role) for role in roles)


def _held(config: RunConfig, shape: ModelShape, role: str) -> float:
    """Bytes on the node that needs most of the role's. A critic in the learner's layout has no more than the policy."""
    each, layout = _ranks_of_a_node(config, role), role_layout(config, shape, role)
    of, inner = config.of_role(role), layout.dims.world_size // layout.dims.pp
    by_stage = [
        _stepped(of, layout, rank)
        + _activations(of, shape, rank)
        + (_parked(of, layout, rank) + _frozen(of, layout, rank) if role == LEARNER else 0.0)
        for rank in ranks_of(of, layout)
    ]
    held = [by_stage[rank // inner] for rank in range(layout.dims.world_size)]
    return max(sum(held[first : first + each]) for first in range(0, len(held), each))


def why_off_gpus(config: RunConfig) -> list[str]:
    """The sections of keys for which `host_bytes` are needed."""
    offload, lora = config.learner.offload.model_dump(exclude_defaults=True), config.learner.lora
    return ["learner.offload"] * bool(offload) + ["learner.lora"] * (lora.rank is not None)


def file_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Bytes of the file of weights that pushes or an export fill in a node's memory; 0 if there is none there.

    That of a direct transport is filled only where a server is restarted and at the run's end, and is not counted.
    """
    return 0 if sent_straight(config) else filled_bytes(config, shape)


def sent_straight(config: RunConfig) -> bool:
    """Whether pushes pass the file of weights by."""
    return config.rollout.served and config.transport.direct


def filled_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Bytes of the file of weights in a node's memory once it is filled, with the file through which several ranks
    write a model that they quantise; 0 if there is none there."""
    folder = weights_folder(config) if config.fills_files else None
    if folder is None or not folder.is_relative_to(NODE_MEMORY):
        return 0
    together = max(map(len, writers_of_files(config))) > 1 and config.rollout.server.quantization != "none"
    return served_bytes(config, shape) + (served_bytes(_unquantised(config), shape) if together else 0)


def _unquantised(config: RunConfig) -> RunConfig:
    server = config.rollout.server.model_copy(update={"quantization": "none"})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"server": server})})


def copies_bytes(config: RunConfig, shape: ModelShape) -> float:
    """Bytes on the node that needs most for copies of what is saved while training goes on (``checkpoint.async_save``).

    Raises ConfigError if the layout does not divide the model's sizes.
    """
    if not config.checkpoint.async_save:
        return 0.0
    apart = "critic" in separate(config)
    models = 2 if config.algorithm.needs_critic and not apart else 1
    of_critic = _copies(config, shape, "critic") if apart else 0.0
    return max(models * _copies(config, shape, LEARNER), of_critic)


def _copies(config: RunConfig, shape: ModelShape, role: str) -> float:
    """Of one model, on the node that needs most."""
    each, held = _ranks_of_a_node(config, role), copied_by_rank(config.of_role(role), shape, role)
    world = range(0, config.learner_of(role).dims.world_size, each)
    return max(sum(held.get(rank, 0) for rank in range(first, first + each)) for first in world)


def _ranks_of_a_node(config: RunConfig, role: str) -> int:
    gpus = config.slurm.gpus_per_node if role == LEARNER else config.slurm.gpus_of(role)
    return gpus or config.learner_of(role).dims.world_size


def pinned(num_bytes: float) -> int:
    """What torch pins for a request of ``num_bytes``."""
    return 1 << max(int(num_bytes) - 1, 0).bit_length() if num_bytes else 0


def _parked(config: RunConfig, layout: Layout, rank: Rank) -> float:
    """Of a rank, while servers sample: each model's state and weights are in slabs of their own."""
    kinds = leaving(config.learner)
    terms, critic = gpu_terms(config, layout, rank, LEARNER, servers=0)
    left = [terms["optimizer"], critic.get("optimizer", 0.0)] if "optimizer" in kinds else []
    left += [critic.get("parameters", 0.0), terms["reference"]] if "models" in kinds else []
    return sum(held // SLAB * SLAB + pinned(held % SLAB) for held in left)


def _activations(config: RunConfig, shape: ModelShape, rank: Rank) -> float:
    """Of a rank, for halves of layers of all micro-batches in flight, in slabs, which a policy and a critic take in
    turns."""
    learner = config.learner
    chunks = learner.stages or (1,) * (learner.pp * learner.vpp)
    each = sum(sum(offloaded(learner, shape, layer, rank.longest)) for layer in rank.layers) * rank.tokens
    return ceil(each * in_flight(learner.pp, rank.stage, chunks[rank.stage :: learner.pp]) / SLAB) * SLAB


def _frozen(config: RunConfig, layout: Layout, rank: Rank) -> float:
    """Of a rank, for the weights beside which it has adapters: a push merges these into them, and they come back."""
    if config.learner.lora.rank is None:
        return 0.0
    adapted = {one.base.name for one in adapted_rows(layout.rows(), layout.shape, config.learner.lora)}
    each, experts = BYTES[config.learner.dtype], layout.shape.num_experts // layout.dims.ep
    return sum(
        layers * (experts if "{expert}" in spec.name else 1) * pinned(prod(held) * each)
        for spec, held, layers in layers_held(layout, rank.stage)
        if spec.name in adapted
    )


def _stepped(config: RunConfig, layout: Layout, rank: Rank) -> float:
    """Of a rank, for parameters that are stepped on the CPU: weight and gradient are pinned, each by itself."""
    counts = dict.fromkeys(("asked", "pinned"), 0)
    if not (share := config.learner.offload.optimizer):
        return 0.0
    for spec, held, layers in layers_held(layout, rank.stage):
        each = layout.shape.num_experts // layout.dims.ep if "{expert}" in spec.name else 1
        size = prod(held) * _FLOAT
        counts["asked"] += layers * each * size
        counts["pinned"] += layers * each * pinned(size)
    rounded = counts["pinned"] / counts["asked"]  # of whole parameters, of which data-parallel ranks cut few
    return share * rank.stepped(config.learner) * (_MOMENTS + 2 * _FLOAT * rounded)
