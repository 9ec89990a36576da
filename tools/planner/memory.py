"""Computes a run's memory before any of it is allocated: integer arithmetic over the layout, without torch.

Memory of each GPU: parameters, gradients and optimizer state are exact except for padding. Activations follow from the
layers' shapes, for attention that keeps no scores (FlashAttention) where it has such a kernel, and evenly loaded
experts (arXiv:2205.05198); logits are counted as `learner.heads` computes them. Each server on a GPU takes its memory
fraction. If it takes turns with the learner (``rollout.server.colocated``), it holds that while it samples, and
`ASLEEP` while the learner trains, which then has activations and logits.

It also computes bytes of a checkpoint, and host memory of a node: for the learner's offloaded data
(``learner.offload``, adapters), for copies that are saved, and for the weight file that servers read. Most of it is
pinned, and torch's allocator of pinned memory rounds every request up to a power of two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import ceil, prod
from typing import Literal

from launcher.servers.degrees import served_bytes
from rl_megatron.config.activations import offloaded
from rl_megatron.config.beside import (
    frozen_folders,
    num_role_nodes,
    scoring_roles,
    separate,
    with_role_keys,
)
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.config.sections.weights import NODE_MEMORY
from rl_megatron.errors import GB, ConfigError, gigabytes
from rl_megatron.feature import adapter_layouts, make_encoding
from rl_megatron.learner.keywords import SLAB
from rl_megatron.models.shape import ModelShape
from rl_megatron.placement.files import file_writer_ranks, weights_folder
from rl_megatron.placement.names import LEARNER, rank_label
from rl_megatron.placement.ranks import ranks_by_role
from rl_megatron.placement.seats import gpus_on_learner_nodes
from rl_megatron.types import BYTES
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.layouts.families import hf_layout
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.learner import (
    Elements,
    Rank,
    Terms,
    elements,
    elements_by_stage,
    layers_held,
    learner_layout,
    role_layout,
    stage_ranks,
    trained_elements,
    trained_matrices,
)
from tools.planner.layers import forward_bytes, peak_beyond_activations
from tools.planner.terms import changes, memory, num_in_flight

Phase = Literal["", "training", "sampling"]
RESERVED = 0.06  # share of a GPU for CUDA and NCCL contexts, and for blocks that the allocator cannot join
_SERVER_SHARE = 0.9  # share of a GPU that an engine takes if memory_fraction is not set
ASLEEP = 2e9
"""Bytes of a GPU that a server keeps while its weights and cache are released: its CUDA context, NCCL's buffers, CUDA
graphs. Assumed, not measured."""
_RING = 2 * 64 * 2**20  # two slots, in a learner's memory that a server's rank maps
WINDOW_LAYERS: Mapping[str, int] = {"vllm": 3, "sglang": 0}
"""The number of layers that a server holds in addition to its kernels' weights while it receives a version directly,
besides the tensors outside of layers: one layer arrives, one is verified, and one is converted for kernels
(docs/engines.md). A custom server counts as one that receives in place."""
CHANGES: Mapping[str, str] = {
    "parameters": "raise learner.tp, learner.pp or learner.ep",
    "gradients": "raise learner.tp, learner.pp or learner.ep, or with learner.dtype=bfloat16 set "
    "learner.gradient_dtype=bfloat16",
    "optimizer": "raise slurm.nodes with learner.dp or learner.ep, which share it out, or with "
    "learner.dtype=bfloat16 set learner.offload.optimizer",
    "critic": "set roles.critic=separate, raise learner.tp, learner.pp or learner.ep, or take an algorithm without a "
    "critic",
    "reference": "set roles.reference=separate, raise learner.tp, learner.pp or learner.ep, or set "
    "algorithm.kl.coefficient=0",
    "activations": "set learner.recompute.uniform=1 if it is not, lower learner.max_tokens_per_micro_batch or raise "
    "learner.cp",
    "logits": "set learner.head_dtype=float32, lower learner.max_tokens_per_micro_batch, or raise learner.tp or "
    "learner.cp",
    "step": "raise slurm.nodes with learner.dp or learner.ep, which share it out",
    "weight push": "lower weights.bucket_mb",
    "engine": "lower rollout.server.memory_fraction, or give servers other GPUs: slurm.engines.nodes or "
    "rollout.server.addresses",
    "reserved": "take GPUs with more memory",
}
"""The changes that make each term smaller, for messages (`advice`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes that ``rank``'s GPU must hold, by purpose, in the order of `CHANGES`, then installed options' terms.

    ``phase`` is "training" or "sampling" if learner and servers take turns, otherwise empty.
    """

    rank: int
    stage: int
    terms: Mapping[str, float]
    role: str = LEARNER
    phase: Phase = ""

    @property
    def total(self) -> float:
        """The total number of bytes."""
        return sum(self.terms.values())

    @property
    def largest(self) -> str:
        """The term with the most bytes."""
        return max(self.terms, key=lambda term: self.terms[term])


def footprints(config: RunConfig, shape: ModelShape) -> list[Footprint]:
    """Returns footprints, in each phase, of the ranks that may be the fullest.

    These are the first rank of each pipeline stage, also of separate roles, and ranks that share a GPU with a server.
    Raises ConfigError if the layout does not divide the model's sizes.
    """
    return _footprints(config, shape, every=True)


def _footprints(config: RunConfig, shape: ModelShape, here: int | None = None, *, every: bool) -> list[Footprint]:
    """Returns `footprints`; unless ``every``, of ranks with equal stage and number of servers only the first."""
    of = {role: config.for_role(role) for role in (LEARNER, *separate(config))}
    layouts = {role: role_layout(config, shape, role) for role in of}
    inner = {role: layout.dims.world_size // layout.dims.pp for role, layout in layouts.items()}
    stages = {role: stage_ranks(of[role], layout) for role, layout in layouts.items()}
    beside = _count_shared_servers(config, here)
    firsts = {role: {stage * inner[role] for stage in range(layout.dims.pp)} for role, layout in layouts.items()}
    for role, servers in beside.items():
        alike = {(rank // inner[role], servers[rank]): rank for rank in sorted(servers, reverse=True)}
        firsts[role] |= servers.keys() if every else set(alike.values())

    @cache
    def phases(role: str, stage: int, servers: int) -> Sequence[tuple[Phase, Terms]]:
        terms, critic = gpu_terms(of[role], layouts[role], stages[role][stage], role, servers=servers)
        if role != LEARNER and servers:
            terms = {**terms, "engine": servers * _server(config, shape)}
        return list(_phases(config, role, terms, critic, servers))

    return [
        Footprint(rank=r, stage=r // inner[role], terms=terms, role=role, phase=phase)
        for role in of
        for r in sorted(firsts[role])
        for phase, terms in phases(role, r // inner[role], beside[role][r] if role in beside else 0)
    ]


def fullest(config: RunConfig, shape: ModelShape, here: int | None = None) -> Footprint:
    """Returns the footprint with the most bytes; ``here`` as in `gpus_on_learner_nodes`. Raises like `footprints`."""
    return max(_footprints(config, shape, here, every=False), key=lambda m: m.total)


def check_memory(config: RunConfig, shape: ModelShape, here: int | None = None) -> Footprint | None:
    """Returns the fullest GPU's footprint; None if ``slurm.gpu_memory_gb`` is null. Raises ConfigError if it is over.

    ``here`` as in `gpus_on_learner_nodes`.
    """
    share, beside = config.rollout.server.memory_fraction, _count_shared_servers(config, here)
    servers = max(beside[LEARNER].values(), default=0)  # rank 0's GPU has the most
    if share is not None and share * servers >= 1:
        raise ConfigError(
            f"rollout.server.memory_fraction={share:g} for each of {servers} servers on a GPU of the learner leaves it "
            "nothing; lower it, or rollout.server.replicas, or give servers nodes of their own "
            "(slurm.engines.nodes)"
        )
    if config.slurm.gpu_memory_gb is None:
        return None
    most, room = fullest(config, shape, here), config.slurm.gpu_memory_gb * GB
    if most.total > room:
        change = with_role_keys(config, most.role, advice(config, most.largest))
        if servers and most.role == LEARNER and not config.rollout.server.colocated:
            turns = "rollout.server.colocated=true learner.offload.while_sampling=optimizer"
            change = f"let servers and learner use the GPUs in turns ({turns}), {change}"
        if config.rollout.served:
            change += "; rl-megatron scale MODEL gpus=N gpu=NAME --write FILE.yaml finds a layout"
        when = {"": "", "training": " while it trains", "sampling": " while servers sample"}[most.phase]
        if most.phase == "sampling" and most.role == LEARNER and config.learner.offload.while_sampling != "optimizer":
            change += "; or set learner.offload.while_sampling=optimizer"
        terms = ", ".join(f"{term} {held / GB:.1f}" for term, held in most.terms.items() if held >= 0.05 * GB)
        raise ConfigError(
            f"slurm.gpu_memory_gb={config.slurm.gpu_memory_gb:g}: {rank_label(most.role, most.rank)} needs "
            f"{gigabytes(most.total, room)[0]}{when} ({terms}). Largest: {most.largest}; {change}"
        )
    per_gpu = server_weights(config, shape)
    starts = config.rollout.served and config.rollout.server.addresses is None
    if starts and share is not None and per_gpu > share * room:
        raise ConfigError(
            f"rollout.server.memory_fraction={share:g} of slurm.gpu_memory_gb={config.slurm.gpu_memory_gb:g} is less "
            f"than the {gigabytes(per_gpu)[0]} of weights on a GPU of the engine; raise it, or rollout.server.tp or pp"
        )
    if starts and not config.rollout.server.colocated and _server(config, shape) > room:
        raise ConfigError(
            f"rollout.engine={config.rollout.engine} takes {share or _SERVER_SHARE:g} of "
            f"slurm.gpu_memory_gb={config.slurm.gpu_memory_gb:g} (rollout.server.memory_fraction), and with "
            f"weights.transport={config.transport.name} it needs {gigabytes(server_window(config, shape))[0]} more to "
            f"receive layers; lower the fraction, raise "
            "rollout.server.tp, or take an engine that receives in place "
            f"(rollout={', '.join(name for name, layers in WINDOW_LAYERS.items() if not layers)})"
        )
    return most


def fullest_line(config: RunConfig, shape: ModelShape) -> str:
    """Returns a line about the fullest GPU, empty if the GPUs' memory is unknown. Raises like `check_memory`."""
    found = check_memory(config, shape)
    if found is None:
        return ""
    rank = rank_label(found.role, found.rank)
    return f"memory: up to {found.total / GB:.1f} GB a GPU ({rank}), most of it: {found.largest}"


def rank_lines(config: RunConfig, shape: ModelShape, role: str, rank: int) -> list[str]:
    """Returns the plan of a rank's GPU in its fuller phase, and the change that makes the largest term smaller. A rank
    missing in the plan equals the first of its stage. Raises ConfigError if the layout does not divide the sizes."""
    inner = config.learner.dims.world_size // config.learner.dims.pp
    found = [one for one in footprints(config, shape) if one.role == role and one.stage == rank // inner]
    planned = max([one for one in found if one.rank == rank] or found, key=lambda one: one.total)
    terms = ", ".join(f"{name} {size / GB:.3g}" for name, size in planned.terms.items() if size)
    return [
        f"the plan of its GPU, {planned.total / GB:.3g} GB: {terms}",
        f"the largest, {planned.largest}: {advice(config, planned.largest)}",
    ]


def advice(config: RunConfig, term: str, known: Mapping[str, str] = CHANGES) -> str:
    """Returns the change that makes a term of the run's footprints smaller, from ``known`` or from `changes`."""
    if term == "engine" and not config.rollout.served:
        return "lower rollout.slots or rollout.max_new_tokens, or take servers (rollout=vllm, sglang)"
    return {**known, **changes()}[term]


def server_weights(config: RunConfig, shape: ModelShape) -> float:
    """Returns bytes of the model on each GPU of a server: its share of experts, and of the rest in a dp replica."""
    return weights_on_gpu(config.rollout.server, weights_served(config, shape))


def weights_served(config: RunConfig, shape: ModelShape) -> Elements:
    """Returns bytes of the whole model in engines, with the scales of quantized tensors."""
    hf = hf_layout(shape)
    layout = encoded_layout(config, hf, hf)
    return elements(layout, 0, bytes_served(config, hf))


def weights_on_gpu(server: ServerSection, whole: Elements) -> float:
    """Returns bytes of `weights_served` on each GPU of a server."""
    return (whole.dense * server.dp + whole.experts) / server.ranks


def bytes_served(config: RunConfig, hf: Layout) -> Callable[[str], int]:
    """Returns bytes per element in engines as a function of the tensor's pattern in ``hf``, the plain checkpoint's."""
    each, encoding, plain = BYTES[config.learner.dtype], make_encoding(config), DType(config.learner.dtype)
    if encoding is None:
        return lambda name: each
    whole = [one for spec in hf.rows() for one in hf.chunks(spec)[0]]
    entries = encoding.stored({one.hf: (plain, tuple(high for _, high in one.hf_box)) for one in whole})
    return lambda name: entries[name][0].itemsize


def encoded_layout(config: RunConfig, layout: Layout, hf: Layout) -> Layout:
    """Returns a layout with the tensors that engines hold in addition to those of ``hf``, the plain checkpoint's."""
    encoding = make_encoding(config)
    return layout if encoding is None else encoding.layout(layout, hf)


def server_window(config: RunConfig, shape: ModelShape) -> float:
    """Returns bytes on each GPU of a server, besides the kernels' weights, for layers that it receives in turn."""
    server, count = config.rollout.server, WINDOW_LAYERS.get(config.rollout.engine, 0)
    if not config.transport.direct or not count:
        return 0.0
    hf, sizes = hf_layout(shape), Counter[int | None]()
    layout = encoded_layout(config, hf, hf)
    bytes_of = bytes_served(config, hf)
    for spec in layout.rows():
        held, each = layout.first_chunk(spec)[0], shape.num_experts if "{expert}" in spec.name else server.dp
        layers = layout.layer_stages(spec) if "{layer}" in spec.name else (None,)
        sizes.update(dict.fromkeys(layers, prod(held.shape) * each * bytes_of(held.hf)))
    outside = sizes.pop(None)
    return (count * max(sizes.values()) + outside) / (server.tp * server.dp)


def _count_shared_servers(config: RunConfig, here: int | None) -> dict[str, Counter[int]]:
    """Counts the servers on the GPU of each rank that shares it with some, by role. On one machine separate roles'
    ranks follow the learner's and are included. In a job other roles have their own nodes, so only the learner is."""
    on = Counter(gpu for gpus in gpus_on_learner_nodes(config, here) for gpu in gpus)
    counts = {LEARNER: config.learner.dims.world_size} if here is None else ranks_by_role(config)
    firsts = zip(counts.items(), accumulate(counts.values(), initial=0), strict=False)
    return {
        role: Counter({gpu - first: servers for gpu, servers in on.items() if first <= gpu < first + count})
        for (role, count), first in firsts
    }


def gpu_terms(config: RunConfig, layout: Layout, rank: Rank, role: str, *, servers: int) -> tuple[Terms, Terms]:
    """Returns the terms of one rank that shares its GPU with ``servers``, and those of a critic counted in them.

    A separate critic has values instead of logits; a separate reference and teachers need no backward pass.
    """
    learner, algorithm, shape = config.learner, config.algorithm, layout.shape
    if role == "critic":
        rank = _critic_rank(layout, rank)
    own = dict(memory(learner, shape, rank))
    if role == "critic":
        own["logits"] = 0.0
    # The computing layer's bytes, and its gradients'; there are no logits while a layer computes.
    own["activations"] += max(peak_beyond_activations(learner, shape, rank) - own["logits"], 0.0)
    own["step"] = max(own["step"] - own["activations"] - own["logits"], 0.0)  # the optimizer steps after the passes
    if role in frozen_folders(config):
        own |= {"gradients": 0.0, "optimizer": 0.0, "activations": forward_bytes(learner, shape, rank), "step": 0.0}
    beside = {"critic": algorithm.needs_critic, "reference": config.needs_reference}
    here = {name for name, needed in beside.items() if needed and name not in separate(config)}
    reserved = RESERVED * (config.slurm.gpu_memory_gb or 0) * GB
    terms = {**dict.fromkeys(CHANGES, 0.0), **own, "reserved": reserved}
    if role != LEARNER:
        return terms, {}
    critic: Terms = {}
    if "critic" in here:
        found = memory(learner, shape, _critic_rank(layout, rank))
        held = ("parameters", "gradients", "optimizer", "fp8 weights")
        critic = {term: found[term] for term in held if term in found}
        terms["critic"] = sum(critic.values())
    if "reference" in here:
        terms["reference"] = 0.0 if config.reference_is_base else own["parameters"]
        if config.reference_moves:
            terms["reference"] *= BYTES["float32"] / BYTES[learner.dtype]
    terms["weight push"] = 4.0 * config.weights.bucket_mb * 2**20  # two buffers each way
    if not config.fills_files:
        terms["engine"] = _local_engine(config, shape)
    elif servers:
        terms["engine"] = servers * _server(config, shape)
        if config.transport.last_hop:
            terms["weight push"] += (1 + servers) * _RING  # one for other ranks, one for each server
    return terms, critic


def _phases(config: RunConfig, role: str, terms: Terms, critic: Terms, servers: int) -> Iterator[tuple[Phase, Terms]]:
    """Yields ``terms`` in each phase of a GPU shared with ``servers``. Ranks of separate roles keep theirs on the GPU.
    Reward models score while servers sample."""
    turns = config.rollout.served and config.rollout.server.colocated and (role == LEARNER or servers > 0)
    if not turns or role in scoring_roles(config):
        yield "", terms
        return
    yield "training", {**terms, "engine": min(terms["engine"], servers * ASLEEP)}
    idle = dict.fromkeys(("activations", "logits", "step"), 0.0)
    kinds = config.learner.offload.leaving if role == LEARNER else ()
    yield "sampling", {**parked(terms, critic, kinds), **idle}


def parked(terms: Terms, critic: Terms, kinds: Collection[str]) -> Terms:
    """Returns the terms that stay on a learner rank's GPU after ``kinds`` (as in ``learner.offload.leaving``) have
    left. ``terms`` include those of ``critic``."""
    out, copies = dict(terms), {"fp8 weights"} & set(terms) if kinds else set()
    for kind in {"gradients", "optimizer"} & set(kinds) | copies:
        out[kind] = 0.0
        out["critic"] -= critic.get(kind, 0.0)
    if "models" in kinds:
        out |= {"critic": 0.0, "reference": 0.0}
    return out


def _server(config: RunConfig, shape: ModelShape) -> float:
    """Returns bytes of a server on each of its GPUs, with the memory in which it receives layers.

    If learner and server take turns, that memory is allocated only while the server has no cache.
    """
    section, weights = config.rollout.server, server_weights(config, shape)
    own = (section.memory_fraction or _SERVER_SHARE) * (config.slurm.gpu_memory_gb or 0) * GB or weights
    window = server_window(config, shape)
    return max(own, weights + window) if section.colocated else own + window


def _critic_rank(layout: Layout, rank: Rank) -> Rank:
    """Returns ``rank`` with a critic's parameters: a value layer of one row replaces the output layer."""
    last = rank.stage == layout.dims.pp - 1
    held = [layout.chunks(spec)[0][0].shape for spec in layout.rows() if spec.name.startswith("output_layer.")]
    less = sum(map(prod, held)) - layout.shape.hidden_size - 1 if last else 0
    parameters, trained = (replace(one, dense=one.dense - less) for one in (rank.parameters, rank.trained_parameters))
    return replace(rank, parameters=parameters, trained_parameters=trained)


def _local_engine(config: RunConfig, shape: ModelShape) -> float:
    """Returns bytes of the in-process engine: a whole copy of the model, and a cache of keys and values for every slot.
    Delta nets add the last inputs of their convolutions and a state in float32 (`DeltaStates`), indexers their keys
    (`KVCache`)."""
    cache = 2 * len(shape.attention_layers) * shape.num_kv_heads * shape.widest_head
    rollout, each, nets, net = config.rollout, BYTES[config.learner.dtype], len(shape.delta_layers), shape.delta
    columns, indexer = rollout.max_prompt_tokens + config.longest_completion, shape.indexer
    if indexer is not None and columns > indexer.top_k:
        cache += len(indexer.layers) * indexer.head_dim
    cached = columns * cache * each
    if net is not None:
        cached += nets * (net.mixed * (net.kernel - 1) * each + 4 * net.value_heads * net.key_dim * net.value_dim)
    whole = sum(prod(size) for size in hf_layout(shape).local_shapes(0).values())
    return float(whole * each + rollout.slots * cached)


_STATE = 12  # bytes: a float32 copy of the parameter, and both moments
_MOMENT = 4  # bytes; Muon's matrices have one moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A checkpoint: bytes in total and by the busiest node, and steps from one to the next."""

    total: int
    by_node: int
    every: int  # steps; 0: only after the last
    max_kept: int  # the most checkpoints that are on the disk at the same time
    best: int  # checkpoint.keep_best, included in ``max_kept``; as many more per other way to measure accuracy

    def describe(self) -> str:
        """Returns a line to show."""
        when = f"every {self.every} steps" if self.every else "after the last step"
        return f"a checkpoint, {when}: {self.total / GB:,.1f} GB, up to {self.by_node / GB:,.1f} GB by one node"

    def describe_disk(self) -> str:
        """Returns a line about the disk that the run needs."""
        more = f"; {self.best * self.total / GB:,.1f} GB more after a resume that measures accuracy otherwise"
        return (
            f"  at most {self.max_kept} checkpoints: {self.max_kept * self.total / GB:,.1f} GB of disk "
            "(checkpoint.keep*)" + (more if self.best else "")
        )


def bytes_by_rank(config: RunConfig, shape: ModelShape, role: str = LEARNER) -> dict[int, int]:
    """Returns bytes of weights and optimizer that each rank of ``role`` writes; missing ranks write none.

    The learner's ranks also write a reference that follows the policy. The first rank of a data-parallel group writes
    for ranks with the same parameters, because megatron-core 0.16.1 gathers its optimizer state there
    (``fully_reshardable``); experts have their own group. With Muon each rank writes the parameters that it steps,
    counted for the first.
    Norms and routers, whole on all tensor-parallel ranks, count for each. A model with adapters writes only these.
    """
    layout, d = learner_layout(config, shape), config.learner.dims
    each, inner = BYTES[config.learner.dtype], d.world_size // d.pp
    muon = config.learner.optimizer.name == "muon"
    of_stages = trained_elements(config, layout)
    whole_by = elements_by_stage(layout)
    beside = BYTES["float32"] if role == LEARNER and config.reference_moves else 0
    held_by = whole_by if adapter_layouts(config.learner) is None else of_stages
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
    """Returns host bytes that each learner rank takes for one model while its checkpoint is written in the background.

    A rank copies the bytes that it writes. If data-parallel ranks shard the optimizer's state, each also copies its
    shards, which the first rank then gathers.
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
    """Returns a run's checkpoint, with its critic's. Raises ConfigError if the layout does not divide the sizes."""
    saved = (LEARNER, "critic") if config.algorithm.needs_critic else (LEARNER,)
    by_node = [_sum_nodes(config, role, bytes_by_rank(config.for_role(role), shape, role)) for role in saved]
    busiest = [max(found.values()) for found in by_node]
    return Save(
        total=sum(found.total() for found in by_node),
        by_node=max(busiest) if "critic" in separate(config) else sum(busiest),
        every=config.checkpoint.every,
        max_kept=_max_checkpoints(config),
        best=config.checkpoint.keep_best,
    )


def _sum_nodes(config: RunConfig, role: str, by_rank: Mapping[int, int]) -> Counter[int]:
    """Sums bytes by the node's index among the role's nodes."""
    world = config.role_learner(role).dims.world_size
    per_node = world
    if config.run.launcher != "local":
        apart = role in separate(config)
        per_node = -(-world // num_role_nodes(config, role)) if apart else config.slurm.tasks_per_node(world)
    out: Counter[int] = Counter()
    for rank, count in by_rank.items():
        out[rank // per_node] += count
    return out


def _max_checkpoints(config: RunConfig) -> int:
    """Returns the number of checkpoints on the disk while the last is written: those that are kept, and itself."""
    section, steps = config.checkpoint, config.train.steps
    written = bool(config.warm_start.steps) + (-(-steps // section.every) if section.every else bool(steps))
    return min(section.keep + section.keep_best + 1, written)


_FLOAT = 4  # bytes
_MOMENTS = 8  # bytes of both moments, which torch's AdamW does not pin


def host_bytes(config: RunConfig, shape: ModelShape) -> float:
    """Returns bytes on the node that needs most, with rounding; the free ends of slabs are not counted.

    Raises ConfigError if the layout does not divide the model's sizes.
    """
    roles = (role for role in (LEARNER, *config.roles.layouts) if role not in frozen_folders(config))
    return max(_held(config, shape, role) for role in roles)


def _held(config: RunConfig, shape: ModelShape, role: str) -> float:
    """Returns bytes on the role's node that needs most. A critic in the learner's layout needs at most the policy's."""
    each, layout = _ranks_of_a_node(config, role), role_layout(config, shape, role)
    of, inner = config.for_role(role), layout.dims.world_size // layout.dims.pp
    by_stage = [
        _stepped(of, layout, rank)
        + _activations(of, shape, rank)
        + (_parked(of, layout, rank) + _frozen(of, layout, rank) if role == LEARNER else 0.0)
        for rank in stage_ranks(of, layout)
    ]
    held = [by_stage[rank // inner] for rank in range(layout.dims.world_size)]
    return max(sum(held[first : first + each]) for first in range(0, len(held), each))


def host_memory_keys(config: RunConfig) -> list[str]:
    """Returns the sections of keys that need `host_bytes`."""
    offload, adapters = config.learner.offload.model_dump(exclude_defaults=True), adapter_layouts(config.learner)
    return ["learner.offload"] * bool(offload) + ([] if adapters is None else [adapters.section])


def file_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Returns bytes of the weight file that pushes or an export fill in a node's memory; 0 if it is not there.

    A direct transport fills it only when a server is restarted and at the run's end, so it is not counted.
    """
    return 0 if sent_straight(config) else filled_bytes(config, shape)


def sent_straight(config: RunConfig) -> bool:
    """True if pushes bypass the weight file."""
    return config.rollout.served and config.transport.direct


def filled_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Returns bytes of the filled weight file in a node's memory; 0 if it is not there. The file through which several
    ranks write a model that they quantize is included."""
    folder = weights_folder(config) if config.fills_files else None
    if folder is None or not folder.is_relative_to(NODE_MEMORY):
        return 0
    together = max(map(len, file_writer_ranks(config))) > 1 and config.rollout.server.quantization != "none"
    return served_bytes(config, shape) + (served_bytes(_unquantized(config), shape) if together else 0)


def _unquantized(config: RunConfig) -> RunConfig:
    server = config.rollout.server.model_copy(update={"quantization": "none"})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"server": server})})


def copies_bytes(config: RunConfig, shape: ModelShape) -> float:
    """Returns bytes on the node that needs most for copies that ``checkpoint.async_save`` writes during training.

    Raises ConfigError if the layout does not divide the model's sizes.
    """
    if not config.checkpoint.async_save:
        return 0.0
    apart = "critic" in separate(config)
    models = 2 if config.algorithm.needs_critic and not apart else 1
    of_critic = _copies(config, shape, "critic") if apart else 0.0
    return max(models * _copies(config, shape, LEARNER), of_critic)


def _copies(config: RunConfig, shape: ModelShape, role: str) -> float:
    """Returns bytes of the copies of one model on the node that needs most."""
    each, held = _ranks_of_a_node(config, role), copied_by_rank(config.for_role(role), shape, role)
    world = range(0, config.role_learner(role).dims.world_size, each)
    return max(sum(held.get(rank, 0) for rank in range(first, first + each)) for first in world)


def _ranks_of_a_node(config: RunConfig, role: str) -> int:
    return config.slurm.gpus_per_node or config.role_learner(role).dims.world_size


def pinned(num_bytes: float) -> int:
    """Returns the bytes that torch pins for a request of ``num_bytes``."""
    return 1 << max(int(num_bytes) - 1, 0).bit_length() if num_bytes else 0


def _parked(config: RunConfig, layout: Layout, rank: Rank) -> float:
    """Returns pinned bytes of a rank while servers sample. Each model's state and weights have separate slabs."""
    kinds = config.learner.offload.leaving
    terms, critic = gpu_terms(config, layout, rank, LEARNER, servers=0)
    left = [terms["optimizer"], critic.get("optimizer", 0.0)] if "optimizer" in kinds else []
    left += [critic.get("parameters", 0.0), terms["reference"]] if "models" in kinds else []
    return sum(held // SLAB * SLAB + pinned(held % SLAB) for held in left)


def _activations(config: RunConfig, shape: ModelShape, rank: Rank) -> float:
    """Returns pinned bytes of a rank for halves of layers of all micro-batches in flight, in slabs. A policy and a
    critic take turns in them."""
    learner = config.learner
    chunks = learner.stages or (1,) * (learner.pp * learner.vpp)
    each = sum(sum(offloaded(learner, shape, layer, rank.longest)) for layer in rank.layers) * rank.tokens
    return ceil(each * num_in_flight(learner.pp, rank.stage, chunks[rank.stage :: learner.pp]) / SLAB) * SLAB


def _frozen(config: RunConfig, layout: Layout, rank: Rank) -> float:
    """Returns pinned bytes of a rank for adapted weights: a push merges adapters into them and restores them after."""
    if (adapters := adapter_layouts(config.learner)) is None:
        return 0.0
    adapted = adapters.ranks(layout)
    each, experts = BYTES[config.learner.dtype], layout.shape.num_experts // layout.dims.ep
    return sum(
        layers * (experts if "{expert}" in spec.name else 1) * pinned(prod(held) * each)
        for spec, held, layers in layers_held(layout, rank.stage)
        if layout.first_chunk(spec)[0].hf in adapted
    )


def _stepped(config: RunConfig, layout: Layout, rank: Rank) -> float:
    """Returns pinned bytes of a rank for parameters stepped on the CPU: weight and gradient are pinned separately."""
    counts = dict.fromkeys(("asked", "pinned"), 0)
    if not (share := config.learner.offload.optimizer):
        return 0.0
    for spec, held, layers in layers_held(layout, rank.stage):
        each = layout.shape.num_experts // layout.dims.ep if "{expert}" in spec.name else 1
        size = prod(held) * _FLOAT
        counts["asked"] += layers * each * size
        counts["pinned"] += layers * each * pinned(size)
    rounded = counts["pinned"] / counts["asked"]  # ratio of whole parameters; data-parallel ranks cut few of them
    return share * rank.stepped(config.learner) * (_MOMENTS + 2 * _FLOAT * rounded)
