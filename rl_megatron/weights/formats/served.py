"""Formats of quantised weights for engine servers: which tensors are quantised, their scales, and config.json's entry.

fp8 is DeepSeek-V3's checkpoint (`block_scales`), with scales that are powers of two: vLLM with DeepGEMM, and SGLang on
Blackwell, round scales up to such after a load, and would quantise a second time. int8 is compressed-tensors'
"int-quantized" with a scale for each output channel (vllm-project/compressed-tensors; vLLM's
CompressedTensorsW8A8Int8): ``x.weight`` beside ``x.weight_scale``, float32 [rows, 1]. Both have the engine quantise
activations token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_megatron.errors import SyncError
from rl_megatron.weights.boxes import Shape
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.formats.quantise import (
    LARGEST_FP8,
    LARGEST_INT8,
    block_maxima,
    dequantise,
    divide,
    powers_of_two,
    scales_to,
    to_float8,
    to_int8,
)
from rl_megatron.weights.formats.scaled import BLOCKS, Blocks
from rl_megatron.weights.formats.schemes import SCALES, is_quantised, quantization_config

_BAND = 2**24  # elements that are widened at once

Stored = Mapping[str, tuple[DType, Shape]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format. ``scales`` makes blocks' scales of their largest absolute values; ``round`` makes numbers."""

    dtype: DType
    blocks: Blocks
    scales: Callable[[Tensor], Tensor]
    round: Callable[[Tensor], Tensor]
    config: Callable[[Mapping[str, Shape]], dict[str, Any]]

    def maxima(self, values: Tensor, start: Sequence[int], shape: Shape) -> Tensor:
        """The largest absolute value in each block that ``values`` [r, c] touch, float32; NaN is larger than any.

        ``values`` are a box that begins at ``start`` of a weight of ``shape``.
        """
        return block_maxima(values, start, self.blocks.edges(shape))

    def fill(self, out: Tensor, values: Tensor, scales: Tensor, start: Sequence[int], shape: Shape) -> None:
        """Write the numbers of a box of a weight that has ``scales``."""
        edges = self.blocks.edges(shape)
        for low, high in _bands(values):
            at = start[0] + low, start[1]
            out[low:high].copy_(self.round(divide(values[low:high], scales, at, edges)))

    def change(
        self, numbers: Tensor, values: Tensor, scales: Tensor, start: Sequence[int], shape: Shape
    ) -> tuple[float, float]:
        """The squared Frobenius norms of a box, and of what quantising changed in it."""
        edges, squares, errors = self.blocks.edges(shape), 0.0, 0.0
        for low, high in _bands(values):
            band = values[low:high].float()
            off = dequantise(numbers[low:high], scales, (start[0] + low, start[1]), edges).sub_(band)
            squares += float(torch.linalg.vector_norm(band, dtype=torch.float64)) ** 2
            errors += float(torch.linalg.vector_norm(off, dtype=torch.float64)) ** 2
        return squares, errors

    def write(self, name: str, values: Tensor, weight: Tensor, scales: Tensor) -> tuple[float, float]:
        """Quantise ``values`` [r, c] into ``weight`` and ``scales``. Returns what `change` does.

        Raises SyncError that names a tensor with NaN or infinite values.
        """
        shape = tuple(values.shape)
        maxima = self.maxima(values, (0, 0), shape)
        if not bool(maxima.isfinite().all()):
            raise not_finite(name)
        scales.copy_(self.scales(maxima))
        self.fill(weight, values, scales, (0, 0), shape)
        return self.change(weight, values, scales, (0, 0), shape)


def not_finite(name: str) -> SyncError:
    """The refusal of a tensor."""
    return SyncError(f"{name} has values that are NaN or infinite: the learner's weights are broken")


def _bands(values: Tensor) -> Iterator[tuple[int, int]]:
    """Rows [low, high) that are widened at once."""
    step = max(_BAND // max(values.shape[1], 1), 1)
    for low in range(0, len(values), step):
        yield low, min(low + step, len(values))


def stored(
    shapes: Mapping[str, Shape], dtype: DType, kind: Format | None, float32: Collection[str] = frozenset()
) -> Stored:
    """The tensors of a file that holds a model of ``shapes``, the widest first, so that each is aligned.

    They are in ``dtype`` but for those named in ``float32`` and those that ``kind`` quantises. Raises ConfigError for
    stacked experts, which neither format supports.
    """
    out: dict[str, tuple[DType, Shape]] = {}
    for name, shape in shapes.items():
        if kind is None or kind.blocks.kept(name, shape):
            out[name] = (DType.F32 if name in float32 else dtype, shape)
        else:
            out[name] = (kind.dtype, shape)
            out[name + kind.blocks.suffix] = (DType.F32, kind.blocks.grid(shape))
    return dict(sorted(out.items(), key=lambda item: -item[1][0].itemsize))


def _blocked(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    beside = [(name + SCALES, shape) for name, shape in shapes.items() if is_quantised(name, shape)]
    return quantization_config([*shapes.items(), *beside])


def _by_channel(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    number = {"num_bits": 8, "type": "int", "symmetric": True}
    matrices = [name for name, shape in shapes.items() if len(shape) == 2 and not is_quantised(name, shape)]
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**number, "strategy": "channel", "dynamic": False},
                "input_activations": {**number, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": sorted(name.removesuffix(".weight") for name in matrices),
    }


FORMATS: Mapping[str, Format | None] = {
    "none": None,
    "fp8": Format(
        dtype=DType.F8_E4M3,
        blocks=BLOCKS["fp8"],
        scales=lambda maxima: powers_of_two(scales_to(LARGEST_FP8, maxima)),
        round=to_float8,
        config=_blocked,
    ),
    "int8": Format(
        dtype=DType.I8,
        blocks=BLOCKS["int8"],
        scales=partial(scales_to, LARGEST_INT8),
        round=to_int8,
        config=_by_channel,
    ),
}
"""The format of each rollout.server.quantization."""
