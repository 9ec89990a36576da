"""Seconds of one optimizer step of a learner, by term, in closed form. No torch.

Matrix products run at a share of the peak that grows with their rows and their narrower side, or at the speed of memory
if that is slower; what lies between them passes over memory; messages take their bytes over the links. A stage's
micro-batches follow each other, the slowest stage sets the pace, and the pipeline fills and drains once
(arXiv:2104.04473). What the formulas do not know is in `constants`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, pow
from typing import Literal

from rl_megatron.models.shape import ModelShape
from rl_megatron.scaling.constants import MEMORY, Constants
from rl_megatron.scaling.hardware import Gpu
from rl_megatron.scaling.parameters import rank_parameters
from rl_megatron.types import ParallelDims

GB = 1e9
PCIE = 25.0  # GB/s each way of a GPU to its host, which copies of an offloaded optimizer take
HOST_ADAM = 1e9  # parameters a second that a GPU's share of the host's cores steps; assumed
_BEHIND = 0.7  # of the last micro-batch, in which messages of gradients hide where they overlap
_ADAM_BYTES = 34  # of a parameter: its gradient read, three float32 numbers read and written, the weight written


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerWork:
    """One optimizer step: what a rank of the pipeline's stages computes and sends.

    ``tokens`` and ``length`` are those of a micro-batch and of its sequences, before context parallelism divides them;
    ``micro_batches`` are of one data-parallel rank. ``stages`` are layers of each chunk, as in `Layout`; None: the best
    split into whole layers. ``drafts``: multi-token-prediction layers on the last stage. ``dispatcher``: a copy of a
    token leaves a node for each of its experts ("alltoall"), or for each node that has some. ``overlap``: the share of
    experts' messages for which another micro-batch computes meanwhile. ``again``: parts of layers that are computed
    again, as in ``learner.recompute``, "full" for whole ones, "experts" for torch's products of gate and up, "head" for
    the output layer.
    ``graphs``: whether launches are recorded; ``sync_hidden``: whether gradients and parameters travel while layers
    compute; ``offloaded``: the share of the optimizer in the host's memory; ``months``: the age of the software.
    ``scored``: there is no backward pass, as for log-probs.
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
    months: float = 0.0
    scored: bool = False


Seconds = dict[str, float]


def step_terms(work: LearnerWork, constants: Constants | None = None) -> Seconds:
    """Seconds of the step by term; they add up to the step's. None: the constants of its GPU."""
    d, c = work.dims, constants or work.gpu.constants
    kinds = [_Kind.of(work, is_sparse, c) for is_sparse in (False, True)]
    dense, sparse = (_layer(kind) for kind in kinds)
    head = _head(kinds[bool(work.shape.num_experts)], work.drafts)
    counts, last = _counts(work, _sum(sparse), _sum(head))
    chunk: Seconds = {}
    for terms, times in ((dense, counts[0]), (sparse, counts[1]), (head, 1.0 if last else 0.0)):
        for name, seconds in terms.items():
            chunk[name] = chunk.get(name, 0.0) + seconds * times
    ways = 2 - work.scored
    p2p = ways * (2.0 * _boundary(work) / (work.gpu.network * GB * c.links) * (0.3 * d.vpp if d.vpp > 1 else 1))
    if d.pp > 1:
        chunk["between stages"] = p2p
    whole = work.micro_batches * (1 + c.age) ** work.months
    terms = {name: seconds * whole for name, seconds in chunk.items() if seconds}
    if d.pp > 1:
        mean = sum(_sum(t) * n for t, n in ((dense, _kinds(work)[0]), (sparse, _kinds(work)[1]), (head, 1.0))) / d.pp
        terms["bubble"] = (d.pp - 1) / d.vpp * (mean + p2p) * (1 + c.age) ** work.months
    return terms if work.scored else terms | _update(work, c, _sum(chunk))


def step_seconds(work: LearnerWork, constants: Constants | None = None) -> float:
    """Seconds of the step in all."""
    return _sum(step_terms(work, constants))


def product_seconds(
    rows: float, wide: float, deep: float, rate: float, gpu: Gpu, c: Constants, size: float = 2
) -> float:
    """Of a product of [rows, wide] and [wide, deep] at ``rate`` FLOP/s, ``size`` bytes an element of what is read."""
    narrow = min(wide, deep)
    computed = 2 * rows * wide * deep / rate * (1 + c.tile / rows) * (1 + c.tile / narrow)
    moved = (wide * deep * size + rows * (wide * size + max(2.0, size) * deep)) / (gpu.hbm * GB * MEMORY)
    return max(computed, moved) + c.operation


def rate_of(gpu: Gpu, precision: str, constants: Constants) -> float:
    """FLOP/s that large products reach. The clocks of GPUs with few watts for their peak fall (`Constants.power`)."""
    peak = gpu.peak
    share = pow(min(1.0, gpu.watts / peak.bfloat16 / _AMPLE), constants.power)
    if precision == "float8" and peak.float8 is not None:
        return peak.float8 * 1e12 * constants.gemm_fp8 * share
    return peak.bfloat16 * 1e12 * constants.gemm * share


_AMPLE = 700 / 989.5  # W for a TFLOP/s: an H100's


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """All that a layer's seconds depend on, so that layouts which differ otherwise share them."""

    shape: ModelShape
    gpu: Gpu
    sparse: bool
    tp: int
    ep: int
    etp: int
    cp: int
    tokens: float
    length: float
    precision: str
    dispatcher: str
    overlap: float
    natural: bool
    again: frozenset[str]
    graphs: bool
    scored: bool
    constants: Constants

    @property
    def size(self) -> float:
        """Bytes of an element of what lies between products, or is sent."""
        return _BYTES[self.precision] if self.precision == "float32" else 2.0

    def __hash__(self) -> int:
        """Of the numbers that differ between layouts of one model, whose hash takes longer."""
        own = (self.sparse, self.tp, self.ep, self.etp, self.cp, self.tokens, self.dispatcher, self.again, self.scored)
        return hash(own)

    @classmethod
    def of(cls, work: LearnerWork, sparse: bool, constants: Constants) -> _Kind:
        d = work.dims
        return cls(
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


@lru_cache(maxsize=4096)
def _layer(k: _Kind) -> Mapping[str, float]:
    """Seconds of one layer, forward, backward and what is computed again, by term."""
    sparse = len(k.shape.moe_layers)
    if not (sparse if k.sparse else k.shape.num_layers - sparse):
        return {}
    forward, full, c = _forward(k), "full" in k.again, k.constants
    out = {}
    for name, seconds in forward.items():
        backward = (
            2.5 if name == "attention" else 1.0 if name in _MESSAGES else c.backward if name in _PRODUCTS else 2.0
        )
        out[name] = seconds * (1 + backward * (not k.scored))
    again = forward if full else _parts_again(k, forward)
    out["computed again"] = sum(seconds for name, seconds in again.items() if name not in _MESSAGES)
    for name in _MESSAGES & again.keys():
        out[name] += again[name]
    out["all-to-all"] = out.get("all-to-all", 0.0) * (1 - min(1.0, k.overlap * c.hidden))
    launches = c.host * (0.5 if k.graphs else 1.0) * (1.0 if k.sparse else 0.5)
    launches = (launches + c.each_expert * k.sparse * k.shape.num_experts / k.ep) * (1 if k.scored else 3 + full)
    busy, power = _sum(out), c.ahead
    out["host"] = (busy**power + launches**power) ** (1 / power) - busy  # behind the GPU as long as they are shorter
    return out


_MESSAGES = {"all-to-all", "tensor parallel", "context parallel"}
_PRODUCTS = {"linears", "experts"}
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float8": 1.0}


def _parts_again(k: _Kind, forward: Mapping[str, float]) -> Mapping[str, float]:
    """Forward seconds of the parts of a layer that are computed again."""
    out: Seconds = {}
    between = forward["between products"]
    if "core_attn" in k.again:
        out["attention"] = forward["attention"]
    if "layernorm" in k.again or "moe_act" in k.again:
        out["between products"] = 0.2 * between
    if "mla_up_proj" in k.again and k.shape.latent is not None:
        out["linears"] = _sum({str(i): s for i, s in enumerate(_products(k, _latent_up(k)))})
    if not k.sparse and "mlp" in k.again:
        out["linears"] = out.get("linears", 0.0) + sum(_products(k, _gated(k, k.shape.dense_width)))
    if k.sparse and "moe" in k.again:
        out |= {name: forward[name] for name in ("experts", "all-to-all") if name in forward}
        out["between products"] = 0.5 * between
    if k.sparse and ({"moe", "shared_experts"} & k.again) and k.shape.shared_width:
        out["linears"] = out.get("linears", 0.0) + sum(_products(k, _gated(k, k.shape.shared_width)))
    if k.sparse and "experts" in k.again:  # torch's layers compute gate and up again
        out["experts"] = forward["experts"] * 2 / 3
    return out


def _forward(k: _Kind) -> Seconds:
    s, c, gpu = k.shape, k.constants, k.gpu
    rows = k.tokens / k.cp
    own = rows / k.tp
    hbm = gpu.hbm * GB * MEMORY
    rate = rate_of(gpu, "bfloat16", c) / c.gemm * c.attention
    out: Seconds = {
        "linears": sum(_products(k, _linears(k))),
        "attention": _attention_flops(s, k.length) * own / rate,
        "between products": c.passes * own * s.hidden_size * k.size / hbm,
    }
    if k.tp > 1:
        sent = 4 * rows * s.hidden_size * k.size * (k.tp - 1) / k.tp
        out["tensor parallel"] = sent / (gpu.nvlink * GB * c.links) + c.latency
    if k.cp > 1:
        near = k.tp * k.cp <= gpu.domain
        link = (gpu.nvlink if near else gpu.network) * GB * c.links
        kept = s.num_kv_heads * s.head_dim * 2 if s.latent is None else 2 * s.num_heads * s.head_dim
        out["context parallel"] = (
            0.3 * rows * kept * k.size * (k.cp - 1) / k.tp / link
        )  # a ring, mostly behind attention
    if k.sparse:
        _add_experts(k, own, out)
    return out


def _add_experts(k: _Kind, own: float, out: Seconds) -> None:
    """Products of the experts, what lies between them, and the messages of both ways."""
    s, c, gpu = k.shape, k.constants, k.gpu
    local, chosen = s.num_experts / k.ep, s.experts_per_token
    rows = own * chosen * k.etp * (c.imbalance if k.natural else 1.0)
    width, hidden = s.expert_width / k.etp, s.hidden_size
    size, rate, each = _BYTES[k.precision], rate_of(gpu, k.precision, c), rows / local
    out["experts"] = local * (
        product_seconds(each, hidden, 2 * width, rate, gpu, c, size)
        + product_seconds(each, width, hidden, rate, gpu, c, size)
    )
    columns = 6 * hidden + 4 * width + (2 * hidden + 14 * width if s.expert_bias else 0)
    cast = 2 * (hidden + width) if k.precision == "float8" else 0  # both inputs read, and written twice
    out["between products"] += c.inside * rows * k.size * (columns + cast) / (gpu.hbm * GB * MEMORY)
    group = k.ep * k.etp
    if group > 1:
        nodes = max(1.0, group / gpu.domain)
        copies = float(chosen) if k.dispatcher == "alltoall" else nodes * (1 - (1 - 1 / nodes) ** chosen)
        moved = own * hidden * k.size * (c.imbalance if k.natural else 1.0)
        slow = c.plain if k.dispatcher == "alltoall" else 1.0
        far = moved * copies * (1 - 1 / nodes) / (gpu.network * GB)
        near = moved * chosen * k.etp * (1 - 1 / group) / (gpu.nvlink * GB)
        out["all-to-all"] = 2 * max(far, near) / c.links / slow + c.latency


def _products(k: _Kind, sizes: Sequence[tuple[float, float, float]]) -> Iterator[float]:
    rate, size = rate_of(k.gpu, k.precision, k.constants), _BYTES[k.precision]
    for rows, wide, deep in sizes:
        yield product_seconds(rows, wide, deep, rate, k.gpu, k.constants, size)


def _linears(k: _Kind) -> list[tuple[float, float, float]]:
    """Products of a layer without its experts, as (rows, wide, deep) of a rank."""
    s, rows, tp = k.shape, k.tokens / k.cp, k.tp
    h = s.hidden_size
    if s.latent is None:
        out = [
            (rows, h, (s.num_heads + 2 * s.num_kv_heads) * s.head_dim / tp),
            (rows, s.num_heads * s.head_dim / tp, h),
        ]
    else:
        m = s.latent
        first = [(rows / tp, h, m.query_rank)] if m.query_rank else [(rows, h, s.num_heads * s.head_dim / tp)]
        down = (rows / tp, h, m.kv_rank + m.rope_dim)
        out = [*first, down, *_latent_up(k), (rows, s.num_heads * m.value_dim / tp, h)]
    if not k.sparse:
        return [*out, *_gated(k, s.dense_width)]
    out.append((rows / tp, h, s.num_experts))
    return [*out, *_gated(k, s.shared_width)] if s.shared_width else out


def _latent_up(k: _Kind) -> list[tuple[float, float, float]]:
    s, rows, m = k.shape, k.tokens / k.cp, k.shape.latent
    assert m is not None
    of_queries = [(rows, m.query_rank, s.num_heads * s.head_dim / k.tp)] if m.query_rank else []
    return [*of_queries, (rows, m.kv_rank, s.num_heads * (m.nope_dim + m.value_dim) / k.tp)]


def _gated(k: _Kind, width: int) -> list[tuple[float, float, float]]:
    rows, h = k.tokens / k.cp, k.shape.hidden_size
    return [(rows, h, 2 * width / k.tp), (rows, width / k.tp, h)]


def _attention_flops(s: ModelShape, length: float) -> float:
    """Forward FLOPs of scores and their product with the values, for a token, the mean over the layers' windows."""
    widths = s.head_dim + (s.latent.value_dim if s.latent else s.head_dim)
    windows = s.windows or (0,)
    spans = [length / 2 if not w or w >= length else w - w * w / (2 * length) for w in windows]
    return 2 * s.num_heads * widths * sum(spans) / len(spans)


@lru_cache(maxsize=4096)
def _head(k: _Kind, drafts: int) -> Mapping[str, float]:
    """The output layer and log-probs of the last stage, and draft layers as ``k``, forward and backward."""
    s, c, rows = k.shape, k.constants, k.tokens / k.cp
    rate = rate_of(k.gpu, "bfloat16", c)
    products = 1 if k.scored else 1 + c.backward + ("head" in k.again)
    logits = product_seconds(rows, s.hidden_size, s.vocab_size / k.tp, rate, k.gpu, c, k.size) * products
    read = c.logits * (3 if k.scored else 6) * rows * s.vocab_size / k.tp * 4 / (k.gpu.hbm * GB * MEMORY)
    out = {"output layer": (logits + read) * (1 + drafts)}
    if drafts:
        merge = 3 * product_seconds(rows, 2 * s.hidden_size, s.hidden_size / k.tp, rate, k.gpu, c, k.size)
        out["draft layers"] = drafts * (_sum(_layer(k)) + merge)
    return out


def _kinds(work: LearnerWork) -> tuple[int, int]:
    """Layers without and with experts."""
    sparse = len(work.shape.moe_layers)
    return work.shape.num_layers - sparse, sparse


def _counts(work: LearnerWork, layer: float, head: float) -> tuple[tuple[float, float], bool]:
    """Layers without and with experts of the slowest stage, and whether that is the last one.

    ``layer`` and ``head`` are seconds. Without ``stages`` the last stage gets the whole number of layers that is best.
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
    """Bytes of hidden states that a rank sends to the next stage for a micro-batch."""
    return (
        work.tokens / work.dims.cp / work.dims.tp * work.shape.hidden_size * (4 if work.precision == "float32" else 2)
    )


def _update(work: LearnerWork, c: Constants, chunk: float) -> Seconds:
    """Gradients' and parameters' messages, the optimizer, and what a step costs whatever it does."""
    d, s, gpu = work.dims, work.shape, work.gpu
    dense, experts = rank_parameters(s, d)
    shards = {"dense": d.dp * d.cp, "experts": max(1.0, d.tp * d.cp * d.dp / (d.ep * d.etp))}
    inside = d.tp * d.cp * d.dp <= gpu.domain
    link = (gpu.nvlink if inside else gpu.network) * GB * c.links
    moved = sum(n * (1 - 1 / shards[of]) for of, n in (("dense", dense), ("experts", experts)))
    sync = moved * (work.gradient_bytes + (4 if work.precision == "float32" else 2)) / link
    held = dense / shards["dense"] + experts / shards["experts"]
    on_gpu = held * (1 - work.offloaded)
    out = {
        "gradients, parameters": max(0.0, sync - _BEHIND * chunk * work.sync_hidden),
        "optimizer": on_gpu * _ADAM_BYTES * c.adam / (gpu.hbm * GB * MEMORY),
        "fixed": c.fixed,
    }
    if work.offloaded:
        out["optimizer on the host"] = held * work.offloaded * (6 / (PCIE * GB) + 1 / HOST_ADAM)
    return out


def _sum(terms: Mapping[str, float]) -> float:
    return sum(terms.values())
