"""Seconds of the embedded engine, which decodes in the learner's ranks with a plain torch model. No torch.

It computes all experts of a token's layer in dense products where that wastes little (`models.experts`), and else those
that some row chose, padded to the fullest.
"""

from __future__ import annotations

from rl_megatron.models.shape import ModelShape
from rl_megatron.scaling.constants import MEMORY
from rl_megatron.scaling.hardware import GB, Gpu
from rl_megatron.scaling.layers.products import product_seconds, rate_of
from rl_megatron.scaling.machines.calibration import MachineEntry

_DENSE_WASTE_FLOPS = 12e6  # models.experts.MAX_DENSE_WASTE_FLOPS, which a test compares
_PADDED = 1.5  # rows of the grouped product over those that were chosen; assumed


def decode_parts(shape: ModelShape, gpu: Gpu, rows: float, context: float) -> float:
    """Seconds of the products of a token of ``rows`` sequences, and of the reads of their caches."""
    s, c, rate = shape, gpu.constants, rate_of(gpu, "float32", gpu.constants)

    def product(count: float, wide: float, deep: float) -> float:
        return product_seconds(max(1.0, count), wide, deep, rate, gpu, c, 4)

    h, wide = s.hidden_size, s.num_heads * s.head_dim
    layer = product(rows, h, wide + 2 * s.num_kv_heads * s.head_dim) + product(rows, wide, h)
    layer += 4.0 * 2 * s.num_kv_heads * s.head_dim * context * rows / (gpu.hbm * GB * MEMORY)
    sparse, k = len(s.moe_layers), s.experts_per_token
    experts = 0.0
    if sparse:
        wasted = 2 * rows * (s.num_experts - k) * 3 * h * s.expert_width
        if wasted <= _DENSE_WASTE_FLOPS:
            experts = product(rows, h, 2 * s.num_experts * s.expert_width)
            experts += product(rows, s.num_experts * s.expert_width, h)
        else:
            each = _PADDED * rows * k / s.num_experts
            experts = product(each, h, 2 * s.expert_width) + product(each, s.expert_width, h)
            experts = s.num_experts * (experts - 2 * c.operation) + 2 * c.operation
    dense = product(rows, h, 2 * s.dense_width) + product(rows, s.dense_width, h) if s.dense_width else 0.0
    return s.num_layers * layer + sparse * experts + (s.num_layers - sparse) * dense + product(rows, h, s.vocab_size)


def decode_seconds(shape: ModelShape, gpu: Gpu, entry: MachineEntry, rows: float, context: float) -> float:
    """Of one token of ``rows`` sequences that had ``context`` tokens before it."""
    fixed = entry.decode_layer * shape.num_layers + entry.decode_token
    return fixed + entry.decode_products * decode_parts(shape, gpu, rows, context)
