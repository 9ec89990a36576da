"""Seconds of the embedded engine, which decodes in the learner's ranks with a plain torch model. No torch.

It computes all experts of a token's layer in dense products where that wastes little (`models.experts`), and else those
that some row chose, padded to the fullest.
"""

from __future__ import annotations

from collections.abc import Iterator

from rl_megatron.models.shape import ModelShape
from rl_megatron.scaling.constants import MEMORY
from rl_megatron.scaling.hardware import GB, Gpu
from rl_megatron.scaling.layers.products import LayerKind, linears, product_seconds, rate_of
from rl_megatron.scaling.machines.calibration import MachineEntry

_DENSE_WASTE_FLOPS = 12e6  # models.experts.MAX_DENSE_WASTE_FLOPS, which a test compares
_PADDED = 1.5  # rows of the grouped product over those that were chosen; assumed


def decode_parts(shape: ModelShape, gpu: Gpu, rows: float, context: float) -> float:
    """Seconds of the products of a token of ``rows`` sequences, and of the reads of their caches and states."""
    s, c, rate = shape, gpu.constants, rate_of(gpu, "float32", gpu.constants)

    def product(count: float, wide: float, deep: float) -> float:
        return product_seconds(max(1.0, count), wide, deep, rate, gpu, c, 4)

    h = s.hidden_size
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
    others = sum(product(*size) * times for kind, times in _kinds(s, gpu, rows) for size in linears(kind))
    return (
        others + sparse * experts + product(rows, h, s.vocab_size) + rows * _moved(s, context) / (gpu.hbm * GB * MEMORY)
    )


def _kinds(s: ModelShape, gpu: Gpu, rows: float) -> Iterator[tuple[LayerKind, int]]:
    """The layers without experts and with some, for a token of ``rows`` sequences on one process, and how many of each
    there are."""
    counts = {False: s.num_layers - len(s.moe_layers), True: len(s.moe_layers)}
    for sparse in (kind for kind, times in counts.items() if times):
        kind = LayerKind(
            shape=s,
            gpu=gpu,
            sparse=sparse,
            tp=1,
            ep=1,
            etp=1,
            cp=1,
            tokens=rows,
            length=1,
            precision="float32",
            dispatcher="alltoall",
            overlap=0.0,
            natural=False,
            again=frozenset(),
            graphs=False,
            scored=True,
            constants=gpu.constants,
        )
        yield kind, counts[sparse]


def _moved(s: ModelShape, context: float) -> float:
    """Bytes that a token of one sequence reads of the keys and values of ``context`` tokens, which layers that attend
    have, or as many as their window; and reads and writes of delta nets' states and last inputs. All are float32."""
    held = sum(min(context, (s.windows[n] if s.windows else 0) or context) for n in s.attention_layers)
    cache = 2.0 * s.num_kv_heads * s.widest_head * held
    if (net := s.delta) is not None:
        state = net.value_heads * net.key_dim * net.value_dim + net.mixed * (net.kernel - 1)
        cache += 2.0 * state * len(s.delta_layers)
    return 4 * cache


def decode_seconds(shape: ModelShape, gpu: Gpu, entry: MachineEntry, rows: float, context: float) -> float:
    """Of one token of ``rows`` sequences that had ``context`` tokens before it."""
    fixed = entry.decode_layer * shape.num_layers + entry.decode_token
    return fixed + entry.decode_products * decode_parts(shape, gpu, rows, context)
