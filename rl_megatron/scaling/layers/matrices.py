"""Matrices that Muon orthogonalises, and the seconds that it takes (`learner.muon`). No torch."""

from __future__ import annotations

from collections.abc import Iterator

from rl_megatron.models.shape import ModelShape
from rl_megatron.options.optimizer import NEWTON_SCHULZ_STEPS
from rl_megatron.scaling.constants import Constants
from rl_megatron.scaling.hardware import Gpu
from rl_megatron.scaling.layers.products import product_seconds

Matrix = tuple[float, float, float]
"""Rows and columns, and how many there are."""


def orthogonal_seconds(matrix: Matrix, rate: float, gpu: Gpu, c: Constants, size: float) -> float:
    """Of the Newton-Schulz iteration over matrices [m, n], the shorter side first: X X', its square, and
    its product with X. ``rate`` and ``size`` as of `product_seconds`."""
    rows, columns, count = matrix
    m, n = sorted((rows, columns))
    products = ((m, n, m), (m, m, m), (m, m, n))
    return count * NEWTON_SCHULZ_STEPS * sum(product_seconds(*one, rate, gpu, c, size) for one in products)


def matrices(s: ModelShape, ep: int) -> tuple[list[Matrix], list[Matrix]]:
    """Those of all layers but the experts', and those of a rank's share of the experts, each whole."""
    sparse, h = len(s.moe_layers), s.hidden_size
    dense = [*_of_attention(s), *_of_delta_nets(s), *_gated(h, s.dense_width, s.num_layers - sparse)]
    if not sparse:
        return dense, []
    dense += [(s.num_experts, h, sparse), *_gated(h, s.shared_width, sparse)]
    return dense, [*_gated(h, s.expert_width, sparse * s.num_experts / ep)]


def _gated(hidden: int, width: int, count: float) -> Iterator[Matrix]:
    """Gate, up and down of ``count`` MLPs."""
    if width:
        yield width, hidden, 3 * count


def _of_attention(s: ModelShape) -> Iterator[Matrix]:
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


def _of_delta_nets(s: ModelShape) -> Iterator[Matrix]:
    if (m := s.delta) is None:
        return
    layers = len(s.delta_layers)
    yield m.key_heads * m.key_dim, s.hidden_size, 2 * layers  # queries and keys
    yield m.outputs, s.hidden_size, 3 * layers  # values, their gates, and the output
    yield m.value_heads, s.hidden_size, 2 * layers
