"""Seconds of one optimizer step of a learner, by term, in closed form. No torch.

A stage's micro-batches follow each other, the slowest stage sets the pace, and the pipeline fills and drains once
(arXiv:2104.04473); `layers` has the seconds of its layers. `hardware` has the constants that the formulas need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from rl_megatron.errors import GB
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.layouts.learner import rank_parameters
from tools.planner.hardware import FITTED, MEMORY, Constants, Gpu
from tools.planner.layers import (
    BYTES_READ,
    LayerKind,
    Seconds,
    embedding_seconds,
    head_seconds,
    layer_seconds,
    matrices,
    orthogonal_seconds,
    product_rate,
    replicated,
)

PCIE = 25.0  # GB/s each way of a GPU to its host, which copies of an offloaded optimizer take
HOST_ADAM = 1e9  # parameters a second that a GPU's share of the host's cores steps; assumed
_BEHIND = 0.7  # share of the last micro-batch that hides overlapped messages of gradients
_ADAM_BYTES = 34  # bytes per parameter: its gradient read, three float32 numbers read and written, the weight written


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerWork:
    """One optimizer step: the work and messages of a rank of the pipeline's stages.

    ``tokens`` and ``length`` are those of a micro-batch and of its sequences, before context parallelism divides them;
    ``micro_batches`` are of one data-parallel rank. ``stages`` are layers of each chunk, as in `Layout`; None: the best
    split into whole layers. ``drafts``: multi-token-prediction layers on the last stage. ``dispatcher``: a copy of a
    token leaves a node for each of its experts ("alltoall"), or for each node that has some. ``overlap``: the share of
    experts' messages that another micro-batch's computing hides. ``again``: parts of layers that are recomputed, as in
    ``learner.recompute``, "full" for whole ones, "experts" for torch's products of gate and up, "head" for the output
    layer, and "norms" for norms of its logits' gradients (``algorithm.credit=optimal``).
    ``graphs``: True if launches are recorded; ``sync_hidden``: True if gradients and parameters are sent while layers
    compute; ``offloaded``: the share of the optimizer in the host's memory; ``moved``: bytes per token that leave a
    layer without experts, and one with experts, for the host's memory; ``months``: the age of the software.
    ``scored``: there is no backward pass, as for log-probs. ``muon``: Muon steps matrices.
    """

    shape: ModelShape
    dims: ParallelDims
    gpu: Gpu
    tokens: float
    length: float
    micro_batches: float
    stages: tuple[int, ...] | None = None
    drafts: int = 0
    precision: Literal["float32", "bfloat16", "float8"] = "bfloat16"
    gradient_bytes: int = 4
    dispatcher: Literal["alltoall", "by_node"] = "by_node"
    overlap: float = 0.0
    natural: bool = True
    again: frozenset[str] = field(default_factory=frozenset)
    graphs: bool = False
    sync_hidden: bool = False
    offloaded: float = 0.0
    moved: tuple[float, float] = (0.0, 0.0)
    months: float = 0.0
    scored: bool = False
    muon: bool = False


def step_terms(work: LearnerWork, c: Constants = FITTED) -> Seconds:
    """Returns seconds of the step by term, which add up to the step's."""
    d = work.dims
    kinds = [_kind(work, is_sparse, c) for is_sparse in (False, True)]
    dense, sparse = (layer_seconds(kind) for kind in kinds)
    head = head_seconds(kinds[bool(work.shape.num_experts)], work.drafts)
    ends = (head, embedding_seconds(kinds[0]))
    counts, last = _counts(work, sum(sparse.values()), sum(head.values()))
    chunk: Seconds = {}
    here = (float(last), float(d.pp == 1 or not last))  # the first stage is one of the others
    for terms, times in ((dense, counts[0]), (sparse, counts[1]), *zip(ends, here, strict=True)):
        for name, seconds in terms.items():
            chunk[name] = chunk.get(name, 0.0) + seconds * times
    for terms, times, moved in zip((dense, sparse), counts, work.moved, strict=True):
        if moved and times and not work.scored:
            waits = _exposed(sum(terms.values()), moved * work.tokens / d.cp / (PCIE * GB))
            chunk["activations on the host"] = chunk.get("activations on the host", 0.0) + waits * times
    ways = 2 - work.scored
    p2p = ways * (2.0 * _boundary(work) / (work.gpu.network * GB * c.links) * (0.3 * d.vpp if d.vpp > 1 else 1))
    if d.pp > 1:
        chunk["between stages"] = p2p
    whole = work.micro_batches * (1 + c.age) ** work.months
    terms = {name: seconds * whole for name, seconds in chunk.items() if seconds}
    if d.pp > 1:
        every = ((dense, _kinds(work)[0]), (sparse, _kinds(work)[1]), *((end, 1.0) for end in ends))
        mean = sum(sum(one.values()) * times for one, times in every) / d.pp
        terms["bubble"] = (d.pp - 1) / d.vpp * (mean + p2p) * (1 + c.age) ** work.months
    return terms if work.scored else terms | _update(work, c, sum(chunk.values()))


def _exposed(layer: float, copy: float) -> float:
    """Returns the seconds by which copies of ``copy`` seconds each way exceed a layer's forward pass, a third of
    ``layer`` seconds, and its backward pass."""
    return max(0.0, copy - layer / 3) + max(0.0, copy - layer * 2 / 3)


def step_seconds(work: LearnerWork, c: Constants = FITTED) -> float:
    """Returns the total seconds of the step."""
    return sum(step_terms(work, c).values())


def _kind(work: LearnerWork, sparse: bool, constants: Constants) -> LayerKind:
    d = work.dims
    return LayerKind(
        shape=work.shape,
        gpu=work.gpu,
        sparse=sparse,
        tp=d.tp,
        ep=d.ep,
        etp=d.etp,
        cp=d.cp,
        tokens=work.tokens,
        length=work.length,
        precision=work.precision,
        dispatcher=work.dispatcher,
        overlap=work.overlap,
        natural=work.natural,
        again=work.again,
        graphs=work.graphs,
        scored=work.scored,
        constants=constants,
    )


def _kinds(work: LearnerWork) -> tuple[int, int]:
    """Counts layers without and with experts."""
    sparse = len(work.shape.moe_layers)
    return work.shape.num_layers - sparse, sparse


def _counts(work: LearnerWork, layer: float, head: float) -> tuple[tuple[float, float], bool]:
    """Returns layers without and with experts of the slowest stage, and True if that is the last one.

    ``layer`` and ``head`` are seconds. Without ``stages`` the last stage gets the best whole number of layers.
    """
    d, total = work.dims, work.shape.num_layers
    dense, sparse = _kinds(work)
    layer = layer or 1.0
    if d.pp == 1:
        return (dense, sparse), True
    if work.stages is None:
        last = min(range(total - d.pp + 2), key=lambda n: max(n * layer + head, ceil((total - n) / (d.pp - 1)) * layer))
        middle = ceil((total - last) / (d.pp - 1))
    else:
        held = [sum(work.stages[stage :: d.pp]) for stage in range(d.pp)]
        last, middle = held[-1], max(held[:-1])
    slowest = last * layer + head >= middle * layer
    count = last if slowest else middle
    return ((count, 0.0) if not sparse else (0.0, count)), slowest


def _boundary(work: LearnerWork) -> float:
    """Returns bytes of hidden states that a rank sends to the next stage for a micro-batch."""
    return (
        work.tokens / work.dims.cp / work.dims.tp * work.shape.hidden_size * (4 if work.precision == "float32" else 2)
    )


def _update(work: LearnerWork, c: Constants, chunk: float) -> Seconds:
    """Returns seconds of gradients' and parameters' messages, of the optimizer, and of each step's fixed cost."""
    d, s, gpu = work.dims, work.shape, work.gpu
    dense, experts = rank_parameters(s, d)
    shards = {"dense": d.dp * d.cp, "experts": max(1.0, d.tp * d.cp * d.dp / (d.ep * d.etp))}
    inside = d.tp * d.cp * d.dp <= gpu.domain
    link = (gpu.nvlink if inside else gpu.network) * GB * c.links
    moved = sum(n * (1 - 1 / shards[of]) for of, n in (("dense", dense), ("experts", experts)))
    sync = moved * (work.gradient_bytes + (4 if work.precision == "float32" else 2)) / link
    if d.tp > 1:  # gradients of parameters that a tensor-parallel group holds whole; an all-reduce sends them twice
        whole = replicated(s, s.num_layers / d.pp, len(s.moe_layers) / d.pp, last=False)
        sync += 2 * whole * work.gradient_bytes * (d.tp - 1) / d.tp / (gpu.nvlink * GB * c.links)
    held = dense / shards["dense"] + experts / shards["experts"]
    on_gpu = held * (1 - work.offloaded)
    out = {
        "gradients, parameters": max(0.0, sync - _BEHIND * chunk * work.sync_hidden),
        "optimizer": on_gpu * _ADAM_BYTES / (gpu.hbm * GB * MEMORY),
        "fixed": c.fixed,
    }
    if work.muon:
        out["orthogonalization"] = _orthogonalization(work, c, shards)
    if work.offloaded:
        out["optimizer on the host"] = held * work.offloaded * (6 / (PCIE * GB) + 1 / HOST_ADAM)
    return out


def _orthogonalization(work: LearnerWork, c: Constants, shards: Mapping[str, float]) -> float:
    """Returns seconds of Muon's products on a rank, the mean over stages. Data-parallel ranks share the matrices; each
    rank of a tensor-parallel group takes whole ones."""
    precision = "float32" if work.precision == "float32" else "bfloat16"
    rate, size = product_rate(work.gpu, precision, c), BYTES_READ[precision]
    both = zip(matrices(work.shape, work.dims.ep), (shards["dense"], shards["experts"]), strict=True)
    return sum(
        orthogonal_seconds(one, rate, work.gpu, c, size) / ranks / work.dims.pp
        for found, ranks in both
        for one in found
    )
