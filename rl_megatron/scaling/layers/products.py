"""Seconds of matrix products, and the products of a layer. No torch.

They run at a share of the peak that grows with their rows and their narrower side, or at the speed of memory if that is
slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import pow

from rl_megatron.models.shape import ModelShape
from rl_megatron.scaling.constants import MEMORY, Constants
from rl_megatron.scaling.hardware import GB, Gpu

BYTES_READ = {"float32": 4.0, "bfloat16": 2.0, "float8": 1.0}
"""Bytes of an element that a product reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
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
        return BYTES_READ[self.precision] if self.precision == "float32" else 2.0

    def __hash__(self) -> int:
        """Of what differs between layouts of one model, whose hash takes longer, and between the constants of a fit: of
        equal hashes each table of results has to compare all."""
        own = (self.sparse, self.tp, self.ep, self.etp, self.cp, self.tokens, self.dispatcher, self.again, self.scored)
        return hash((own, self.constants))


def product_seconds(rows: float, wide: float, deep: float, rate: float, gpu: Gpu, c: Constants, size: float) -> float:
    """Of a product of [rows, wide] and [wide, deep] at ``rate`` FLOP/s, ``size`` bytes an element of what is read."""
    narrow = min(wide, deep)
    computed = 2 * rows * wide * deep / rate * (1 + c.tile / rows) * (1 + c.tile / narrow)
    moved = (wide * deep * size + rows * (wide * size + max(2.0, size) * deep)) / (gpu.hbm * GB * MEMORY)
    return max(computed, moved)


def rate_of(gpu: Gpu, precision: str, constants: Constants) -> float:
    """FLOP/s that large products reach. The clocks of GPUs with few watts for their peak fall (`Constants.power`).

    Float32 is multiplied as such, not as TF32, outside of the tensor cores.
    """
    peak = gpu.peak
    if precision == "float32":
        return peak.float32 * 1e12 * constants.gemm
    share = pow(min(1.0, gpu.watts / peak.bfloat16 / _AMPLE), constants.power)
    if precision == "float8" and peak.float8 is not None:
        return peak.float8 * 1e12 * constants.gemm_fp8 * share
    return peak.bfloat16 * 1e12 * constants.gemm * share


_AMPLE = 700 / 989.5  # W for a TFLOP/s: an H100's


def products(k: LayerKind, sizes: Sequence[tuple[float, float, float]]) -> Iterator[float]:
    """Seconds of each product of such (rows, wide, deep)."""
    rate, size = rate_of(k.gpu, k.precision, k.constants), BYTES_READ[k.precision]
    for rows, wide, deep in sizes:
        yield product_seconds(rows, wide, deep, rate, k.gpu, k.constants, size)


def linears(k: LayerKind) -> list[tuple[float, float, float]]:
    """Products of a layer without its experts, as (rows, wide, deep) of a rank."""
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
    """Columns that the first linear of grouped-query attention or of a delta net gives, and that its last one takes:
    the mean over layers."""
    gates = s.num_heads if s.output_gate else 0
    given, taken = float((s.num_heads + gates + 2 * s.num_kv_heads) * s.head_dim), float(s.num_heads * s.head_dim)
    if s.delta is None:
        return given, taken
    share = len(s.delta_layers) / s.num_layers
    return given + share * (s.delta.inputs - given), taken + share * (s.delta.outputs - taken)


def latent_up(k: LayerKind) -> list[tuple[float, float, float]]:
    """Products that project latents up to heads."""
    s, rows, m = k.shape, k.tokens / k.cp, k.shape.latent
    assert m is not None
    of_queries = [(rows, m.query_rank, s.num_heads * s.head_dim / k.tp)] if m.query_rank else []
    return [*of_queries, (rows, m.kv_rank, s.num_heads * (m.nope_dim + m.value_dim) / k.tp)]


def gated(k: LayerKind, width: int) -> list[tuple[float, float, float]]:
    """Products of a gated MLP: gate and up together, then down."""
    rows, h = k.tokens / k.cp, k.shape.hidden_size
    return [(rows, h, 2 * width / k.tp), (rows, width / k.tp, h)]


def attention_flops(s: ModelShape, length: float) -> float:
    """Forward FLOPs of scores and their product with the values, for a token, the mean over the layers' windows.

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
