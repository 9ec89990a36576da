"""Floating-point operations of a model's steps, and peaks of known GPUs: the share of a peak that a run uses (MFU).

A multiplication and an addition are two. Counted are the matrix products of a model's parameters and of attention, with
the keys that a position attends to. Of experts, those that a token chose are counted: the model's work whatever
computes it. Norms, activations, rotary angles, softmax, the optimizer, padding and recomputation are left out. So are
gradients of frozen weights, and a policy's value layer (algorithm.critic.backbone=policy), which has one output. PaLM
(arXiv:2204.02311, appendix B) defines MFU so, but counts every key as attended to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.feature import AdapterLayouts, adapter_layouts
from rl_megatron.models.shape import LatentAttention, ModelShape
from rl_megatron.weights.layouts.families import megatron_layout
from rl_megatron.weights.layouts.learner import elements

PASSES = 3
"""Forward passes that a training step costs: the backward pass has two products for each of the forward's."""
WHOLE = LearnerSection()
"""All weights of the model are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """A GPU's dense peak, 1e12 FLOP/s, without sparsity; ``float8`` is None where the GPU has none, and ``float32`` is
    that outside of tensor cores. ``mxfp8``: it multiplies float8 with a scale for each 32 values, as Blackwell does.

    ``names`` are parts of the name that CUDA gives it. Sources, all NVIDIA's: the data sheets of A100 (June 2021), H100
    (2024) and H200 (2024). For H100 NVL and H200 NVL they are the halves of their sparse figures. B200 at 1,000 W and
    GB200 at 1,200 W are from the Blackwell architecture brief (2024). B300 is from the pages of DGX B300 and GB300
    NVL72 (2025). H20 has no public data sheet: its peak is what resellers print.
    """

    names: Sequence[str]
    bfloat16: float
    float8: float | None
    float32: float
    mxfp8: bool = False


PEAKS: Sequence[Peak] = (  # the first that fits
    Peak(names=("A100",), bfloat16=312.0, float8=None, float32=19.5),
    Peak(names=("H100 PCIe", "H800 PCIe"), bfloat16=756.0, float8=1513.0, float32=51.0),
    Peak(names=("H100 NVL", "H200 NVL"), bfloat16=835.5, float8=1671.0, float32=60.0),
    Peak(names=("H100", "H200", "H800", "GH200"), bfloat16=989.5, float8=1979.0, float32=67.0),
    Peak(names=("H20",), bfloat16=148.0, float8=296.0, float32=44.0),
    Peak(names=("GB200", "GB300"), bfloat16=2500.0, float8=5000.0, float32=80.0, mxfp8=True),
    Peak(names=("B200", "B300"), bfloat16=2250.0, float8=4500.0, float32=75.0, mxfp8=True),
)


@cache
def find_peak(name: str) -> Peak | None:
    """Returns the peak of the GPU that CUDA calls ``name``; None if it is not in the table, or a part of one (MIG)."""
    words = name.replace("-", " ").split()
    if "MIG" in words:
        return None
    return next((peak for peak in PEAKS if any(_has(words, known.split()) for known in peak.names)), None)


def seconds_at_peak(
    shape: ModelShape, gpus: Sequence[str], learner: LearnerSection = WHOLE
) -> Callable[[Iterable[int]], float] | None:
    """Says how many seconds training on sequences of these lengths takes ``gpus``, by name, at their bfloat16 peak.

    Over the seconds that it took it is the MFU. None if there is no GPU, or the peak of one is not known.
    """
    known = [peak for name in gpus if (peak := find_peak(name)) is not None]
    if not known or len(known) < len(gpus):
        return None
    together = sum(peak.bfloat16 for peak in known) * 1e12
    return lambda lengths: training_flops(shape, lengths, learner) / together


def training_flops(shape: ModelShape, lengths: Iterable[int], learner: LearnerSection = WHOLE) -> float:
    """Returns FLOPs of forward and backward over sequences of ``lengths``, with causal attention and no recomputation.

    Frozen weights under adapters have no gradients, whatever the learner computes on the way to the adapters'
    (docs/sft.md), nor have frozen routers. Attention's products and the adapters' own have all passes. Draft layers are
    counted if ``shape`` has them trained.
    """
    batch = _Batch.of(shape, lengths)
    weights, pairs = batch.tokens * _weights(shape), _between_positions(shape, batch)
    if (adapters := adapter_layouts(learner)) is not None:
        return (PASSES - 1) * weights + PASSES * (pairs + batch.tokens * _adapters(shape, adapters))
    still = batch.tokens * len(shape.moe_layers) * _router(shape) if learner.router.frozen else 0.0
    return PASSES * (weights + pairs) - still + len(shape.drafted) * _draft(shape, batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Positions, and by window the (query, key) pairs of causal attention."""

    tokens: int
    pairs: Mapping[int, float]

    @classmethod
    def of(cls, shape: ModelShape, lengths: Iterable[int]) -> _Batch:
        each = list(lengths)
        return cls(tokens=sum(each), pairs={w: sum(_pairs(n, w) for n in each) for w in {0, *shape.windows}})


def _pairs(length: int, window: int) -> float:
    """Returns (query, key) pairs if positions see themselves and ``window`` - 1 before them; 0: all before."""
    full = min(length, window or length)
    return full * (full + 1) / 2 + (length - full) * full


@cache
def _weights(shape: ModelShape) -> float:
    """Returns forward FLOPs of the model's weights for one position."""
    return 2.0 * shape.hidden_size * shape.outputs + sum(
        _layer_flops(shape, sparse=layer in shape.moe_layers, delta=layer in shape.delta_layers)
        for layer in range(shape.num_layers)
    )


@cache
def _adapters(shape: ModelShape, adapters: AdapterLayouts) -> float:
    """Returns forward FLOPs of the adapters for one position, as products of their own."""
    held = elements(adapters.on_ranks(megatron_layout(shape)), 0)
    return 2.0 * (held.dense + held.experts * shape.experts_per_token / max(1, shape.num_experts))


def _draft(shape: ModelShape, batch: _Batch) -> float:
    """Returns training FLOPs of a draft layer: a linear that joins two hidden states, a layer as the decoder's last
    one, and the output matrix. The layer attends; the output matrix is detached."""
    last, hidden = shape.num_layers - 1, shape.hidden_size
    own = 4.0 * hidden * hidden + _layer_flops(shape, sparse=last in shape.moe_layers, delta=False)
    trained = batch.tokens * own + _attention(shape, batch, [last])
    return PASSES * trained + (PASSES - 1) * batch.tokens * 2.0 * hidden * shape.outputs


def _between_positions(shape: ModelShape, batch: _Batch) -> float:
    """Returns forward FLOPs without weights: of queries, keys and values; and of each value head's state in a delta
    net, a position at a time. These are what it knows of a key, what is written there, and what a query reads. Chunks
    compute more, which is no more of use than recomputation."""
    states = 0.0
    if m := shape.delta:
        states = 6.0 * m.value_heads * m.key_dim * m.value_dim * len(shape.delta_layers)
    return _attention(shape, batch, shape.attention_layers) + batch.tokens * states


def _attention(shape: ModelShape, batch: _Batch, layers: Iterable[int]) -> float:
    """Returns forward FLOPs of queries, keys and values of these layers."""
    value_dim = shape.latent.value_dim if shape.latent else shape.head_dim
    pairs = sum(batch.pairs[shape.windows[layer] if shape.windows else 0] for layer in layers)
    return 2 * pairs * shape.num_heads * (shape.head_dim + value_dim)


def _layer_flops(shape: ModelShape, *, sparse: bool, delta: bool) -> float:
    """Returns forward FLOPs of a layer's weights for one position."""
    hidden, m = shape.hidden_size, shape.latent
    queries = 3 * shape.num_heads if shape.output_gate else 2 * shape.num_heads
    attention = 2.0 * hidden * (queries + 2 * shape.num_kv_heads) * shape.head_dim
    if m is not None:
        attention = _latent(shape, m)
    if delta:
        attention = _delta_net(shape)
    if not sparse:
        return attention + 6.0 * hidden * shape.dense_width
    experts = 6.0 * hidden * shape.experts_per_token * shape.expert_width
    shared = 6.0 * hidden * shape.shared_width + (2.0 * hidden if shape.shared_gate else 0.0)
    return attention + _router(shape) + experts + shared


def _router(shape: ModelShape) -> float:
    """Returns forward FLOPs of a layer's router for one position."""
    return 2.0 * shape.hidden_size * shape.num_experts


def _delta_net(shape: ModelShape) -> float:
    """Returns forward FLOPs of its linears and the convolution."""
    m = shape.delta
    assert m is not None
    return 2.0 * shape.hidden_size * (m.inputs + m.outputs) + 2.0 * m.kernel * m.mixed


def _latent(shape: ModelShape, m: LatentAttention) -> float:
    """Returns forward FLOPs down into latents and out of the heads, and up from the latents."""
    hidden, heads = shape.hidden_size, shape.num_heads
    queries = heads * (m.nope_dim + m.rope_dim)
    down = hidden * (m.query_rank or queries) + hidden * (m.kv_rank + m.rope_dim) + heads * m.value_dim * hidden
    up = (m.query_rank or 0) * queries + m.kv_rank * heads * (m.nope_dim + m.value_dim)
    return 2.0 * (down + up)


def _has(words: Sequence[str], part: Sequence[str]) -> bool:
    """True if the words have ``part`` among them, one after the other."""
    return any(list(words[i : i + len(part)]) == list(part) for i in range(len(words)))
