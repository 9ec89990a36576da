"""Formats of quantised weights for engine servers: which tensors are quantised, their scales, and config.json's entry.

fp8 is DeepSeek-V3's checkpoint (`block_scales`). int8 is compressed-tensors' "int-quantized" with a scale for each
output channel (vllm-project/compressed-tensors; vLLM's CompressedTensorsW8A8Int8): ``x.weight`` beside
``x.weight_scale``, float32 [rows, 1]. Both have the engine quantise activations token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_megatron.errors import ConfigError, SyncError
from rl_megatron.weights.boxes import Shape
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.formats.block_scales import BLOCK, SCALES, is_quantised, quantization_config
from rl_megatron.weights.formats.quantize import dequantise, quantise, quantise_rows

_BAND = 2**24  # elements that are widened at once

Stored = Mapping[str, tuple[DType, Shape]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format. Each ``block`` has a scale; it gives rows and columns, None for all columns."""

    dtype: DType
    suffix: str  # what a weight's name gets for its scales
    block: tuple[int, int | None]
    quantise: Callable[[Tensor], tuple[Tensor, Tensor]]
    config: Callable[[Mapping[str, Shape]], dict[str, Any]]

    def edges(self, shape: Shape) -> tuple[int, int]:
        """Rows and columns of a block of a matrix."""
        rows, columns = self.block
        return rows, shape[1] if columns is None else columns

    def write(self, name: str, values: Tensor, weight: Tensor, scales: Tensor) -> float:
        """Quantise ``values`` [r, c] into ``weight`` and ``scales``. Returns the relative error, in Frobenius norms.

        Raises SyncError that names a tensor with NaN or infinite values.
        """
        edges = self.edges(tuple(values.shape))
        step = max(_BAND // values.shape[1] // BLOCK, 1) * BLOCK
        squares, errors = 0.0, 0.0
        for low in range(0, len(values), step):
            band, at = values[low : low + step].float(), low // edges[0]
            whole = float(torch.linalg.vector_norm(band, dtype=torch.float64))
            if not whole < float("inf"):
                raise SyncError(f"{name} has values that are NaN or infinite: the learner's weights are broken")
            numbers, factors = self.quantise(band)
            weight[low : low + step].copy_(numbers)
            scales[at : at + len(factors)].copy_(factors)
            off = dequantise(numbers, factors, (0, 0), edges).sub_(band)
            squares += whole**2
            errors += float(torch.linalg.vector_norm(off, dtype=torch.float64)) ** 2
        return (errors / squares) ** 0.5 if squares else 0.0


def stored(shapes: Mapping[str, Shape], dtype: DType, kind: Format | None) -> Stored:
    """The tensors of a file that holds a model of ``shapes`` in ``dtype``, the widest first, so that each is aligned.

    Raises ConfigError for stacked experts, which neither format supports.
    """
    out: dict[str, tuple[DType, Shape]] = {}
    for name, shape in shapes.items():
        if kind is None or not is_quantised(name, shape):
            out[name] = (dtype, shape)
        else:
            rows, columns = kind.edges(shape)
            out[name] = (kind.dtype, shape)
            out[name + kind.suffix] = (DType.F32, (-(-shape[0] // rows), -(-shape[1] // columns)))
        if kind is not None and len(shape) > 2:
            raise ConfigError(
                f"rollout.server.quantization: {name} {list(shape)} is not a matrix, and stacked experts cannot be "
                "quantised. "
                "Set rollout.server.quantization=none"
            )
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
    "fp8": Format(dtype=DType.F8_E4M3, suffix=SCALES, block=(BLOCK, BLOCK), quantise=quantise, config=_blocked),
    "int8": Format(dtype=DType.I8, suffix="_scale", block=(1, None), quantise=quantise_rows, config=_by_channel),
}
"""The format of each rollout.server.quantization."""
