"""The cost of a layer and the output layer on a rank, in closed form: products, messages, seconds, bytes. No torch.

Matrix products run at a share of the peak that grows with their rows and their narrower side, or at the speed of memory
if that is slower. Besides products a layer has attention, passes over memory, messages, and launches, which count
where they take longer than the GPU. Muon's orthogonalization of matrices (`features.muon`) takes extra seconds.

Messages are those of a tensor-parallel or expert-parallel group, for a token of one layer. Columns are numbers of a
token on the larger side of a collective, as a dry run counts them (tests/recipes). With sequence parallelism
(arXiv:2205.05198) each block of a layer gathers its input, and gathers it again in the backward pass for the gradient
of its weights, together with the gradient of its output. It scatters the sums of its output and of its input's
gradient. Only latents that are projected up are gathered.

Bytes are those that a rank holds while one of its layers computes, besides the activations that all layers keep. Dry
runs count the same for torch's layers: the way to the experts and back has four copies of the rows at a time, and its
backward pass two in addition to the experts' gradients. They cannot count TransformerEngine's layers, for which twice
the bytes that a layer creates are an upper bound, within 3 % of published peaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import pow

from rl_megatron.config.activations import (
    activation_bytes,
    delta_bytes,
    freed,
    halves,
    probabilities,
    uses_grouped_gemm,
    wants_transformer_engine,
)
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import GB
from rl_megatron.learner.keywords import NEWTON_SCHULZ_STEPS
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import BYTES
from rl_megatron.weights.layouts.learner import Rank
from tools.planner.hardware import MEMORY, Constants, Gpu

BYTES_READ = {"float32": 4.0, "bfloat16": 2.0, "float8": 1.0}
"""Bytes of an element that a product reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """All inputs of a layer's seconds: layouts with equal inputs share the result."""

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
        """Bytes of an element between products, or in messages."""
        return BYTES_READ[self.precision] if self.precision == "float32" else 2.0

    def __hash__(self) -> int:
        """Hashes fields that differ between layouts of one model or between constants of a fit; the model's hash takes
        longer. Tables of results compare all fields of keys with equal hashes."""
        own = (self.sparse, self.tp, self.ep, self.etp, self.cp, self.tokens, self.dispatcher, self.again, self.scored)
        return hash((own, self.constants))


def product_seconds(rows: float, wide: float, deep: float, rate: float, gpu: Gpu, c: Constants, size: float) -> float:
    """Returns seconds of [rows, wide] x [wide, deep] at ``rate`` FLOP/s; read elements have ``size`` bytes."""
    narrow = min(wide, deep)
    computed = 2 * rows * wide * deep / rate * (1 + c.tile / rows) * (1 + c.tile / narrow)
    moved = (wide * deep * size + rows * (wide * size + max(2.0, size) * deep)) / (gpu.hbm * GB * MEMORY)
    return max(computed, moved)


def product_rate(gpu: Gpu, precision: str, constants: Constants) -> float:
    """Returns FLOP/s that large products reach. GPUs with few watts for their peak lower clocks (`Constants.power`).

    Float32 is multiplied as such, not as TF32, outside of the tensor cores.
    """
    peak = gpu.peak
    if precision == "float32":
        return peak.float32 * 1e12 * constants.gemm
    share = pow(min(1.0, gpu.watts / peak.bfloat16 / _AMPLE), constants.power)
    if precision == "float8" and peak.float8 is not None:
        return peak.float8 * 1e12 * constants.gemm_fp8 * share
    return peak.bfloat16 * 1e12 * constants.gemm * share


_AMPLE = 700 / 989.5  # W per TFLOP/s of an H100


def products(k: LayerKind, sizes: Sequence[tuple[float, float, float]]) -> Iterator[float]:
    """Yields seconds of each product (rows, wide, deep)."""
    rate, size = product_rate(k.gpu, k.precision, k.constants), BYTES_READ[k.precision]
    for rows, wide, deep in sizes:
        yield product_seconds(rows, wide, deep, rate, k.gpu, k.constants, size)


def linears(k: LayerKind) -> list[tuple[float, float, float]]:
    """Returns products of a layer without its experts, as (rows, wide, deep) of a rank."""
    s, rows, tp = k.shape, k.tokens / k.cp, k.tp
    h = s.hidden_size
    if s.latent is None:
        given, taken = mixer_columns(s)
        out = [(rows, h, given / tp), (rows, taken / tp, h)]
    else:
        m = s.latent
        first = [(rows / tp, h, m.query_rank)] if m.query_rank else [(rows, h, s.num_heads * s.head_dim / tp)]
        down = (rows / tp, h, m.kv_rank + m.rope_dim)
        out = [*first, down, *latent_up(k), (rows, s.num_heads * m.value_dim / tp, h)]
    if not k.sparse:
        return [*out, *gated(k, s.dense_width)]
    out.append((rows / tp, h, s.num_experts))
    return [*out, *gated(k, s.shared_width)] if s.shared_width else out


def mixer_columns(s: ModelShape) -> tuple[float, float]:
    """Returns columns of the first linear's output and of the last linear's input, in the mean over layers of
    grouped-query attention and delta nets."""
    gates = s.num_heads if s.output_gate else 0
    given, taken = float((s.num_heads + gates + 2 * s.num_kv_heads) * s.head_dim), float(s.num_heads * s.head_dim)
    if s.delta is None:
        return given, taken
    share = len(s.delta_layers) / s.num_layers
    return given + share * (s.delta.inputs - given), taken + share * (s.delta.outputs - taken)


def latent_up(k: LayerKind) -> list[tuple[float, float, float]]:
    """Returns products that project latents up to heads."""
    s, rows, m = k.shape, k.tokens / k.cp, k.shape.latent
    assert m is not None
    of_queries = [(rows, m.query_rank, s.num_heads * s.head_dim / k.tp)] if m.query_rank else []
    return [*of_queries, (rows, m.kv_rank, s.num_heads * (m.nope_dim + m.value_dim) / k.tp)]


def gated(k: LayerKind, width: int) -> list[tuple[float, float, float]]:
    """Returns products of a gated MLP: gate and up together, then down."""
    rows, h = k.tokens / k.cp, k.shape.hidden_size
    return [(rows, h, 2 * width / k.tp), (rows, width / k.tp, h)]


def attention_flops(s: ModelShape, length: float) -> float:
    """Returns forward FLOPs per token of scores and their product with values, in the mean over the layers' windows.

    A delta net's are those of its chunks (`learner.model.delta.rule`), forward, and forward again in the backward pass.
    """
    widths = s.head_dim + (s.latent.value_dim if s.latent else s.head_dim)
    windows = s.windows or (0,)
    spans = [length / 2 if not w or w >= length else w - w * w / (2 * length) for w in windows]
    scores = 2 * s.num_heads * widths * sum(spans) / len(spans)
    if s.delta is None:
        return scores
    m, share = s.delta, len(s.delta_layers) / s.num_layers
    of_value_head = 2 * m.key_dim * m.value_dim * 3 + m.chunk * (m.key_dim + 3 * m.value_dim)
    chunks = m.value_heads * of_value_head + m.key_heads * 4 * m.chunk * m.key_dim
    return scores + share * (9 / 7 * chunks - scores)  # 4.5 passes where attention has 3.5


Matrix = tuple[float, float, float]
"""(rows, columns, number of such matrices)."""


def orthogonal_seconds(matrix: Matrix, rate: float, gpu: Gpu, c: Constants, size: float) -> float:
    """Returns seconds of the Newton-Schulz iteration over matrices [m, n], the shorter side first: X X', its square,
    and its product with X. ``rate`` and ``size`` as in `product_seconds`."""
    rows, columns, count = matrix
    m, n = sorted((rows, columns))
    products = ((m, n, m), (m, m, m), (m, m, n))
    return count * NEWTON_SCHULZ_STEPS * sum(product_seconds(*one, rate, gpu, c, size) for one in products)


def matrices(s: ModelShape, ep: int) -> tuple[list[Matrix], list[Matrix]]:
    """Returns the matrices of all layers but the experts', and those of a rank's share of experts, each whole."""
    sparse, h = len(s.moe_layers), s.hidden_size
    dense = [*_attention_matrices(s), *_delta_net_matrices(s), *_gated(h, s.dense_width, s.num_layers - sparse)]
    if not sparse:
        return dense, []
    dense += [(s.num_experts, h, sparse), *_gated(h, s.shared_width, sparse)]
    return dense, [*_gated(h, s.expert_width, sparse * s.num_experts / ep)]


def _gated(hidden: int, width: int, count: float) -> Iterator[Matrix]:
    """Yields gate, up and down of ``count`` MLPs."""
    if width:
        yield width, hidden, 3 * count


def _attention_matrices(s: ModelShape) -> Iterator[Matrix]:
    h, layers, m = s.hidden_size, s.num_layers - len(s.delta_layers), s.latent
    heads = s.num_heads * s.head_dim
    if m is None:
        yield heads, h, layers * (2 + s.output_gate)  # queries, their gates, and the output
        yield s.num_kv_heads * s.head_dim, h, 2 * layers
        return
    if m.query_rank:
        yield m.query_rank, h, layers
    yield heads, m.query_rank or h, layers
    yield m.kv_rank + m.rope_dim, h, layers
    yield s.num_heads * (m.nope_dim + m.value_dim), m.kv_rank, layers
    yield h, s.num_heads * m.value_dim, layers


def _delta_net_matrices(s: ModelShape) -> Iterator[Matrix]:
    if (m := s.delta) is None:
        return
    layers = len(s.delta_layers)
    yield m.key_heads * m.key_dim, s.hidden_size, 2 * layers  # queries and keys
    yield m.outputs, s.hidden_size, 3 * layers  # values, their gates, and the output
    yield m.value_heads, s.hidden_size, 2 * layers


PROBABILITY, COUNT = 4, 8  # bytes of an expert's probability, and of a count of tokens
LOGPROBS = 4  # float32 numbers per token that the output layer's ranks reduce: maxima, sums, logits, entropies


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Numbers of a token that are gathered and scattered in one direction through a layer."""

    gathered: float
    scattered: float

    @property
    def both(self) -> float:
        """The sum of gathered and scattered numbers."""
        return self.gathered + self.scattered


def forward_columns(shape: ModelShape, *, sparse: bool) -> Columns:
    """Returns the columns of the forward pass of a layer with or without experts."""
    inputs, outputs, up, rotary = _sizes(shape, sparse)
    return Columns(gathered=inputs + up + rotary, scattered=outputs)


def backward_columns(shape: ModelShape, *, sparse: bool) -> Columns:
    """Returns the columns of the backward pass. Rotary keys are not a product's input: only their gradient is sent."""
    inputs, outputs, up, rotary = _sizes(shape, sparse)
    return Columns(gathered=inputs + outputs + up, scattered=inputs + up + rotary)


def _sizes(shape: ModelShape, sparse: bool) -> tuple[float, float, float, float]:
    """Returns sizes of a layer's gathered inputs, scattered outputs, latents that it projects up, and rotary keys.

    Experts get their tokens by the all-to-all; shared ones are a block like a dense MLP.
    """
    mlp = 0 if sparse and not shape.shared_width else 1
    h, m = shape.hidden_size, shape.latent
    if m is None:
        return h * (mlp + 1.0), h * (mlp + 1.0), 0.0, 0.0
    return h * float(mlp), h * (mlp + 1.0), float((m.query_rank or 0) + m.kv_rank), float(m.rope_dim)


def head_gathers(*, float32: bool) -> int:
    """Returns the times a token's hidden states are gathered: a float32 head keeps them for its backward pass."""
    return 1 if float32 else 2


def replicated(shape: ModelShape, layers: float, sparse: float, *, last: bool) -> float:
    """Counts parameters that all ranks of a tensor-parallel group hold whole: norms, routers, down-projections."""
    h, m = shape.hidden_size, shape.latent
    each = 2.0 * h + (2 * shape.head_dim if shape.qk_norm == "head" else 0)
    if m is not None:
        rank = (m.query_rank or 0) + m.kv_rank
        each += h * (rank + m.rope_dim) + rank
    gates = h if shape.shared_gate else 0
    return each * layers + sparse * (shape.num_experts * h + gates) + h * last


_ALONE = {"moe_act"}
"""Modules that torch's layers recompute expert by expert, unless a grouped product takes all experts together."""


def peak_beyond_activations(learner: LearnerSection, shape: ModelShape, rank: Rank) -> float:
    """Returns the most bytes that a pass of ``rank`` holds, besides the activations that its layers keep."""
    size, d = BYTES[learner.dtype], learner.dims
    kinds = {n: (n in shape.moe_layers, n in shape.delta_layers) for n in rank.layers}
    unlike = {(kinds[n], shape.windows[n] if shape.windows else 0): n for n in rank.layers}.values()
    most = max((_one(learner, shape, rank, layer) for layer in unlike), default=0.0)
    hidden = rank.tokens * shape.hidden_size * size
    around = hidden if d.tp > 1 else 0.0  # megatron's buffer of sequence parallelism
    around += hidden / d.tp * _between_stages(learner, shape, rank)
    return max(most + _group(learner, shape, rank), _embedding(learner, shape, rank)) + around


def _between_stages(learner: LearnerSection, shape: ModelShape, rank: Rank) -> int:
    """Counts gradients that megatron's schedule holds during a backward pass: the received one of the stage's output,
    and the sent one of the last micro-batch's input. Recomputed whole layers count the first one themselves."""
    counted = learner.recompute.uniform is not None and not wants_transformer_engine(learner, shape)
    return (rank.stage > 0) + (rank.stage < learner.pp - 1 and not counted)


def forward_bytes(learner: LearnerSection, shape: ModelShape, rank: Rank) -> float:
    """Returns the most bytes that a pass without gradients holds: all tensors of one layer, kept or not."""
    return max((_created_bytes(learner, shape, rank, layer) for layer in rank.layers), default=0.0)


def _one(learner: LearnerSection, shape: ModelShape, rank: Rank, layer: int) -> float:
    """Returns bytes that ``layer`` recomputes for its backward pass, and that its larger half holds in addition."""
    if wants_transformer_engine(learner, shape):
        gradients = _gradients(learner, shape, layer, matrices=2)
        return 2 * _created_bytes(learner, shape, rank, layer) + max(gradients, _embedding(learner, shape, rank))
    parts = halves(learner, shape, layer, rank.longest)
    if (
        learner.recompute.uniform is not None
    ):  # the layer's input is kept already, and the gradient of its output takes the input's place
        again, attention = sum(parts.values()), parts["attention"]
    else:
        frees = freed(learner, shape, layer, rank.longest)
        alone = set() if uses_grouped_gemm(learner, shape) else _ALONE
        again = attention = sum(frees.get(module, 0.0) for module in {*learner.recompute.parts} - alone)
    mlp = (_experts if layer in shape.moe_layers else _dense)(learner, shape, rank, layer)
    gradients = sum(_attention(shape, layer)) * BYTES[learner.dtype] / learner.tp
    gradients += delta_bytes(learner, shape, layer)
    scores = probabilities(learner, shape, layer, rank.longest)
    return max(rank.tokens * again + mlp, rank.tokens * (attention + gradients + 2 * scores))


def _experts(learner: LearnerSection, shape: ModelShape, rank: Rank, layer: int) -> float:
    """Returns bytes that a layer with experts holds besides those it keeps. The forward pass has rows when sorted, when
    they arrive, when they leave the experts and when sorted back. The backward pass has the gradients of outputs and
    inputs, those of all experts' weights, which return together, and one expert's products.

    A grouped product takes all experts together, with concatenated weights: first four products as wide as experts, six
    with biases. Gradients of two products and of the weights follow (tests/unit/options/test_bytes.py measures it)."""
    d, size = learner.dims, BYTES[learner.dtype]
    rows = rank.tokens * shape.experts_per_token / d.tp
    one = rows * shape.hidden_size * size
    apart = d.ep * d.etp > 1
    forward = 2 * one * (1 + d.etp) if apart else one
    forward += rank.tokens * shape.hidden_size / d.tp * size if shape.shared_width else 0.0
    if uses_grouped_gemm(learner, shape):
        inside = rows * shape.expert_width * size
        together = shape.expert_bias or shape.stacked_experts
        first = one * d.etp + (6 if shape.expert_bias else 4) * inside + _gradients(learner, shape, layer, matrices=3)
        last = 2 * one * d.etp + 2 * inside + _gradients(learner, shape, layer, matrices=3 if together else 5)
        return max(forward, first, last)
    gradients = _gradients(learner, shape, layer, matrices=3)
    products = 8 * rows * shape.expert_width * d.ep / shape.num_experts * size
    return max(forward, 2 * one * d.etp + gradients + products)


def _dense(learner: LearnerSection, shape: ModelShape, rank: Rank, layer: int) -> float:
    """Returns bytes that a dense layer holds besides those it keeps: gradients of gate and up, or of their weights.
    Before these, sequence parallelism gathers the output's gradient, next to those of down's input and weight."""
    size = BYTES[learner.dtype]
    product, one = shape.dense_width / learner.tp * rank.tokens * size, _gradients(learner, shape, layer, matrices=1)
    gathered = rank.tokens * shape.hidden_size * size + product + one if learner.tp > 1 else 0.0
    return max(2 * product, 2 * one, gathered)


def _gradients(learner: LearnerSection, shape: ModelShape, layer: int, *, matrices: int) -> float:
    """Returns bytes of the gradients that coexist before they are accumulated: of ``matrices`` of a dense ``layer``, or
    of all its experts."""
    d, size = learner.dims, BYTES[learner.dtype]
    if layer in shape.moe_layers:
        apart = shape.stacked_experts and not uses_grouped_gemm(learner, shape)
        matrices *= 2 if apart else 1  # separate gradients are then stacked
        return matrices * shape.hidden_size * shape.expert_width * shape.num_experts / d.ep / d.etp * size
    return matrices * shape.hidden_size * shape.dense_width / d.tp * size


def _embedding(learner: LearnerSection, shape: ModelShape, rank: Rank) -> float:
    """Returns bytes of the embedding's gradient."""
    return shape.hidden_size * shape.vocab_size / learner.tp * BYTES[learner.dtype] if rank.stage == 0 else 0.0


def _group(learner: LearnerSection, shape: ModelShape, rank: Rank) -> float:
    """Returns bytes of the layers that are recomputed together with the computing one (``recompute.uniform``)."""
    together = (learner.recompute.uniform or 1) - 1
    if not together:
        return 0.0
    most = max((activation_bytes(learner, shape, layer, rank.longest) for layer in rank.layers), default=0.0)
    return together * most * rank.tokens


def _created_bytes(learner: LearnerSection, shape: ModelShape, rank: Rank, layer: int) -> float:
    """Returns bytes of all tensors that ``rank`` creates while it computes one layer, kept or not."""
    d, hidden = learner.dims, shape.hidden_size
    per_token = 4.0 * hidden + sum(_attention(shape, layer))  # inputs and outputs of both norms
    if layer in shape.moe_layers:
        chosen = shape.experts_per_token
        per_token += chosen * (4 * hidden * d.etp + 3 * shape.expert_width)  # rows sent, arrived, left, combined
        per_token += 3 * shape.shared_width + 2 * shape.num_experts
    else:  # sequence parallelism gathers the MLP's input
        per_token += 3 * shape.dense_width + hidden * (d.tp if d.tp > 1 else 0)
    plain = probabilities(learner, shape, layer, rank.longest)
    return rank.tokens * (per_token / d.tp * BYTES[learner.dtype] + plain + delta_bytes(learner, shape, layer))


def _attention(shape: ModelShape, layer: int) -> Iterator[float]:
    """Yields elements per token of queries, keys, values and the output, before and after rotation; or the outputs and
    inputs of a delta net's linears."""
    heads = shape.num_heads
    if shape.delta is not None and layer in shape.delta_layers:
        yield shape.delta.inputs + shape.delta.outputs
        return
    if shape.output_gate:
        yield 2 * heads * shape.head_dim  # the projected gate, and its product with the output
    if (latent := shape.latent) is None:
        yield (2 * heads + 2 * shape.num_kv_heads) * shape.head_dim  # q, k, v and the output
        yield (heads + shape.num_kv_heads) * shape.head_dim  # rotated q and k
        return
    yield (latent.query_rank or 0) + latent.kv_rank + latent.rope_dim
    yield heads * (2 * (latent.nope_dim + latent.rope_dim) + 2 * latent.value_dim)


Seconds = dict[str, float]


@lru_cache(maxsize=4096)
def layer_seconds(k: LayerKind) -> Mapping[str, float]:
    """Returns seconds of one layer by term: forward, backward and recomputation."""
    sparse = len(k.shape.moe_layers)
    if not (sparse if k.sparse else k.shape.num_layers - sparse):
        return {}
    forward, full, c = _forward(k), "full" in k.again, k.constants
    out = {}
    for name, seconds in forward.items():
        out[name] = seconds * (1 + _backward(k, name) * (not k.scored))
    again = forward if full else _parts_again(k, forward)
    out["computed again"] = sum(seconds for name, seconds in again.items() if name not in _MESSAGES)
    for name in _MESSAGES & again.keys():
        out[name] += again[name]
    out["all-to-all"] = out.get("all-to-all", 0.0) * (1 - min(1.0, k.overlap * c.hidden))
    launches = c.host * (0.5 if k.graphs else 1.0) * (1.0 if k.sparse else 0.5)
    launches *= 1 if k.scored else 3 + full
    busy = sum(out.values())
    out["host"] = (busy**4 + launches**4) ** (1 / 4) - busy  # launches hide while they are shorter than the GPU's work
    return out


_MESSAGES = {"all-to-all", "tensor parallel", "context parallel"}


def _backward(k: LayerKind, name: str) -> float:
    """Returns seconds of a term's backward pass divided by those of its forward pass."""
    if name == "tensor parallel":
        columns = (backward_columns(k.shape, sparse=k.sparse).both, forward_columns(k.shape, sparse=k.sparse).both)
        return columns[0] / columns[1]
    return 2.5 if name == "attention" else 1.0 if name in _MESSAGES else 2.0


def _parts_again(k: LayerKind, forward: Mapping[str, float]) -> Mapping[str, float]:
    """Returns forward seconds of the parts of a layer that are computed again."""
    out: Seconds = {}
    between = forward["between products"]
    if "core_attn" in k.again:
        out["attention"] = forward["attention"]
    if "layernorm" in k.again or "moe_act" in k.again:
        out["between products"] = 0.2 * between
    if "mla_up_proj" in k.again and k.shape.latent is not None:
        out["linears"] = sum(products(k, latent_up(k)))
    if not k.sparse and "mlp" in k.again:
        out["linears"] = out.get("linears", 0.0) + sum(products(k, gated(k, k.shape.dense_width)))
    if k.sparse and "moe" in k.again:
        out |= {name: forward[name] for name in ("experts", "all-to-all") if name in forward}
        out["between products"] = 0.5 * between
    if k.sparse and ({"moe", "shared_experts"} & k.again) and k.shape.shared_width:
        out["linears"] = out.get("linears", 0.0) + sum(products(k, gated(k, k.shape.shared_width)))
    if k.sparse and "experts" in k.again:  # torch's layers compute gate and up again
        out["experts"] = forward["experts"] * 2 / 3
    return out


def _forward(k: LayerKind) -> Seconds:
    s, c, gpu = k.shape, k.constants, k.gpu
    rows = k.tokens / k.cp
    own = rows / k.tp
    hbm = gpu.hbm * GB * MEMORY
    rate = product_rate(gpu, _unquantized(k), c) / c.gemm * c.attention
    out: Seconds = {
        "linears": sum(products(k, linears(k))),
        "attention": attention_flops(s, k.length) * own / rate,
        "between products": c.passes * own * s.hidden_size * k.size / hbm,
    }
    if k.tp > 1:
        sent = rows * forward_columns(s, sparse=k.sparse).both * k.size
        out["tensor parallel"] = sent * _per_byte(k)
    if k.cp > 1:
        near = k.tp * k.cp <= gpu.domain
        link = (gpu.nvlink if near else gpu.network) * GB * c.links
        kept: float = s.num_kv_heads * s.head_dim * 2 if s.latent is None else 2 * s.num_heads * s.head_dim
        if s.delta is not None:  # an exchange each way, in place of keys and values
            share = len(s.delta_layers) / s.num_layers
            kept += share * (s.delta.inputs + s.delta.outputs - kept)
        out["context parallel"] = (
            0.3 * rows * kept * k.size * (k.cp - 1) / k.tp / link
        )  # a ring, mostly hidden by attention
    if k.sparse:
        _add_experts(k, own, out)
    return out


def _add_experts(k: LayerKind, own: float, out: Seconds) -> None:
    """Adds products of the experts, passes over memory between them, and messages in both directions."""
    s, c, gpu = k.shape, k.constants, k.gpu
    local, chosen = s.num_experts / k.ep, s.experts_per_token
    rows = own * chosen * k.etp * (c.imbalance if k.natural else 1.0)
    width, hidden = s.expert_width / k.etp, s.hidden_size
    size, rate, each = BYTES_READ[k.precision], product_rate(gpu, k.precision, c), rows / local
    out["experts"] = local * (
        product_seconds(each, hidden, 2 * width, rate, gpu, c, size)
        + product_seconds(each, width, hidden, rate, gpu, c, size)
    )
    columns = 6 * hidden + 4 * width + (2 * hidden + 14 * width if s.expert_bias else 0)
    cast = 2 * (hidden + width) if k.precision == "float8" else 0  # both inputs read, and written twice
    out["between products"] += rows * k.size * (columns + cast) / (gpu.hbm * GB * MEMORY)
    group = k.ep * k.etp
    if group > 1:
        nodes = max(1.0, group / gpu.domain)
        copies = float(chosen) if k.dispatcher == "alltoall" else nodes * (1 - (1 - 1 / nodes) ** chosen)
        moved = own * (hidden * k.size + PROBABILITY / 2) * (c.imbalance if k.natural else 1.0)  # PROBABILITY: one way
        slow = c.plain if k.dispatcher == "alltoall" else 1.0
        far = moved * copies * (1 - 1 / nodes) / (gpu.network * GB)
        near = moved * chosen * k.etp * (1 - 1 / group) / (gpu.nvlink * GB)
        # Counts are gathered only on the way to the experts, not in the backward pass.
        counts = k.ep * s.num_experts * COUNT / 2 / (gpu.network if nodes > 1 else gpu.nvlink) / GB / c.links
        out["all-to-all"] = 2 * max(far, near) / c.links / slow + counts


def _per_byte(k: LayerKind) -> float:
    """Returns seconds per byte that a tensor-parallel group gathers or scatters; a rank already has its own share."""
    return (k.tp - 1) / k.tp / (k.gpu.nvlink * GB * k.constants.links)


def _unquantized(k: LayerKind) -> str:
    """Returns the precision of attention and the output layer, which no recipe computes in float8."""
    return "float32" if k.precision == "float32" else "bfloat16"


def embedding_seconds(k: LayerKind) -> Mapping[str, float]:
    """Returns seconds of the first stage's embedding: its sums are scattered, and their gradient is gathered."""
    if k.tp == 1:
        return {}
    whole = k.tokens / k.cp * k.shape.hidden_size * k.size
    return {"tensor parallel": whole * (1 if k.scored else 2) * _per_byte(k)}


@lru_cache(maxsize=4096)
def head_seconds(k: LayerKind, drafts: int) -> Mapping[str, float]:
    """Returns seconds of the last stage's output layer, log-probs and draft layers like ``k``, forward and backward.

    If the output layer is computed again ("head"), its products are in float32 (``learner.head_dtype``), and norms of
    the logits' gradients ("norms") multiply once more.
    """
    s, c, rows = k.shape, k.constants, k.tokens / k.cp
    again, norms = "head" in k.again, "norms" in k.again
    rate, size = product_rate(k.gpu, "float32" if again else _unquantized(k), c), 4.0 if again else k.size
    times = (1 if k.scored else 3 + again) + (again and norms)
    logits = product_seconds(rows, s.hidden_size, s.outputs / k.tp, rate, k.gpu, c, size) * times
    read = ((3 if k.scored else 6) + 3 * norms) * rows * s.outputs / k.tp * 4 / (k.gpu.hbm * GB * MEMORY)
    out = {"output layer": (logits + read) * (1 + drafts)}
    if k.tp > 1:
        whole = rows * s.hidden_size * k.size * (1 if k.scored else 1 + head_gathers(float32=again))
        reduced = 2 * rows * LOGPROBS * 4  # an all-reduce sends twice its bytes
        out["tensor parallel"] = (whole + reduced) * (1 + drafts) * _per_byte(k)
    if drafts:
        merge = 3 * product_seconds(rows, 2 * s.hidden_size, s.hidden_size / k.tp, rate, k.gpu, c, k.size)
        out["draft layers"] = drafts * (sum(layer_seconds(k).values()) + merge)
    return out
