"""Quantises weights for engine servers: a scale of each block, numbers of each box.

Scales of fp8 are powers of two: vLLM with DeepGEMM, and SGLang on Blackwell, round scales up to such after a load, and
would quantise a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rl_megatron.errors import SyncError
from rl_megatron.features.quantise.scales import BLOCKS, Blocks
from rl_megatron.weights.boxes import Shape
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

_BAND = 2**24  # elements that are widened at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format. ``scales`` makes blocks' scales of their largest absolute values; ``round`` makes numbers."""

    blocks: Blocks
    scales: Callable[[Tensor], Tensor]
    round: Callable[[Tensor], Tensor]

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


FORMATS: Mapping[str, Format] = {
    "fp8": Format(
        blocks=BLOCKS["fp8"],
        scales=lambda maxima: powers_of_two(scales_to(LARGEST_FP8, maxima)),
        round=to_float8,
    ),
    "int8": Format(blocks=BLOCKS["int8"], scales=partial(scales_to, LARGEST_INT8), round=to_int8),
}
"""By rollout.server.quantization, where that is not none."""
