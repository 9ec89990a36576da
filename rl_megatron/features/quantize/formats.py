"""Quantizes weights for engine servers: a scale of each block, numbers of each box.

Scales of fp8 are powers of two: vLLM with DeepGEMM, and SGLang on Blackwell, round scales up to these after a load.
Otherwise they would quantize a second time. A learner rank quantizes its own boxes: scales once a version, numbers as
they are packed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor
from typing_extensions import override

from rl_megatron.errors import SyncError, WeightError
from rl_megatron.feature import Encoder
from rl_megatron.features.quantize.encoding import BLOCKS, Blocks, ScaledLayout
from rl_megatron.weights.boxes import Box, Shape, intersect, shift
from rl_megatron.weights.formats.quantize import (
    LARGEST_FP8,
    LARGEST_INT8,
    block_maxima,
    dequantize,
    divide,
    powers_of_two,
    scales_to,
    to_float8,
    to_int8,
)
from rl_megatron.weights.routes.ends import view

_BAND = 2**24  # elements that are widened together


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFormat:
    """One format. ``scales`` computes blocks' scales from their largest absolute values; ``round`` makes numbers."""

    blocks: Blocks
    scales: Callable[[Tensor], Tensor]
    round: Callable[[Tensor], Tensor]

    def maxima(self, values: Tensor, start: Sequence[int], shape: Shape) -> Tensor:
        """Returns the largest absolute value in each block that ``values`` [r, c] touch, float32; NaN is the largest.

        ``values`` are a box that begins at ``start`` of a weight of ``shape``.
        """
        return block_maxima(values, start, self.blocks.edges(shape))

    def fill(self, out: Tensor, values: Tensor, scales: Tensor, start: Sequence[int], shape: Shape) -> None:
        """Writes the numbers of a box of a weight that has ``scales``."""
        edges = self.blocks.edges(shape)
        for low, high in _bands(values):
            at = start[0] + low, start[1]
            out[low:high].copy_(self.round(divide(values[low:high], scales, at, edges)))

    def change(
        self, numbers: Tensor, values: Tensor, scales: Tensor, start: Sequence[int], shape: Shape
    ) -> tuple[float, float]:
        """Returns the squared Frobenius norms of a box, and of its change by quantization."""
        edges, squares, errors = self.blocks.edges(shape), 0.0, 0.0
        for low, high in _bands(values):
            band = values[low:high].float()
            off = dequantize(numbers[low:high], scales, (start[0] + low, start[1]), edges).sub_(band)
            squares += float(torch.linalg.vector_norm(band, dtype=torch.float64)) ** 2
            errors += float(torch.linalg.vector_norm(off, dtype=torch.float64)) ** 2
        return squares, errors

    def write(self, name: str, values: Tensor, weight: Tensor, scales: Tensor) -> tuple[float, float]:
        """Quantizes ``values`` [r, c] into ``weight`` and ``scales``. Returns the norms of `change`.

        Raises SyncError that names a tensor with NaN or infinite values.
        """
        shape = tuple(values.shape)
        maxima = self.maxima(values, (0, 0), shape)
        if not bool(maxima.isfinite().all()):
            raise non_finite_error(name)
        scales.copy_(self.scales(maxima))
        self.fill(weight, values, scales, (0, 0), shape)
        return self.change(weight, values, scales, (0, 0), shape)


def non_finite_error(name: str) -> SyncError:
    """Returns the error for a tensor with NaN or infinite values."""
    return SyncError(f"{name} has values that are NaN or infinite: the learner's weights are broken")


def _bands(values: Tensor) -> Iterator[tuple[int, int]]:
    """Yields rows [low, high) that are widened together."""
    step = max(_BAND // max(values.shape[1], 1), 1)
    for low in range(0, len(values), step):
        yield low, min(low + step, len(values))


FORMATS: Mapping[str, EngineFormat] = {
    "fp8": EngineFormat(
        blocks=BLOCKS["fp8"],
        scales=lambda maxima: powers_of_two(scales_to(LARGEST_FP8, maxima)),
        round=to_float8,
    ),
    "int8": EngineFormat(blocks=BLOCKS["int8"], scales=partial(scales_to, LARGEST_INT8), round=to_int8),
}
"""The format of each rollout.server.quantization except none."""


_REDUCED = 2**24  # scales that ranks compare in one call


class Quantizer(Encoder):
    """The scales of the weights with boxes in ``tensors`` on ``rank`` of ``layout``, for a version at a time.

    Scales are ``added``; numbers have no copy. Blocks that several ranks share have the scale of the whole block.
    Refers to the tensors' storage: change them in place.
    """

    def __init__(self, form: EngineFormat, layout: ScaledLayout, rank: int, tensors: Mapping[str, Tensor]) -> None:
        self._form, self._layout = form, layout
        self._boxes: defaultdict[str, dict[str, list[tuple[Box, Box]]]] = defaultdict(lambda: defaultdict(list))
        self._values = {name: tensor.detach() for name, tensor in tensors.items()}
        self._wholes: dict[str, tuple[int, int]] = {}
        for one, name, param in layout.held(rank):
            rows, columns = layout.shapes[one.hf]
            self._wholes[name] = rows, columns
            self._boxes[name][param].append((one.box, one.hf_box))
        grids = {name: layout.blocks.grid(shape) for name, shape in self._wholes.items()}
        devices = {tensor.device for tensor in self._values.values()}
        device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        self._flat = torch.ones(sum(map(prod, grids.values())), device=device)
        pieces = self._flat.split([prod(grid) for grid in grids.values()])
        self._grids = {name: piece.view(grid) for (name, grid), piece in zip(grids.items(), pieces, strict=True)}
        self.added = {name + layout.blocks.suffix: grid for name, grid in self._grids.items()}
        self.changes: dict[str, tuple[float, float]] = {}

    @override
    def begin(self, reduce: Callable[[Tensor], object]) -> None:
        self.changes = {}
        self._flat.zero_()
        for name, boxes in self._boxes.items():
            whole, grid = self._wholes[name], self._grids[name]
            for param, held in boxes.items():
                for place, box in held:
                    maxima = self._form.maxima(view(self._values[param], place), _start(box), whole)
                    there = view(grid, self._layout.blocks.touched(box, whole))
                    there.copy_(torch.maximum(there, maxima.to(there.device)))
        self._flat.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # a maximum with NaN is undefined
        if self._layout.dims.world_size > 1:
            self._share(reduce)
        if not bool(self._flat.isfinite().all()):
            raise non_finite_error(next(name for name, grid in self._grids.items() if not bool(grid.isfinite().all())))
        self._flat.copy_(self._form.scales(self._flat))

    @override
    def pack(self, name: str, param: str, place: Box, out: Tensor) -> bool:
        if name not in self._grids:
            return False
        own, box = next(held for held in self._boxes[name][param] if intersect(held[0], place) == place)
        values, start = view(self._values[param], place), _start(shift(place, own, box))
        self._form.fill(out, values, self._grids[name].to(values.device), start, self._wholes[name])
        return True

    @override
    def encoded(self, name: str, box: Box, values: Tensor) -> Tensor | None:
        if name not in self._grids:
            return values if name in self.added else None
        out = torch.empty(values.shape, dtype=self.dtype, device=values.device)
        where = self._grids[name].to(values.device), _start(box), self._wholes[name]
        self._form.fill(out, values, *where)
        squares, errors = self._form.change(out, values, *where)
        before = self.changes.get(name, (0.0, 0.0))
        self.changes[name] = before[0] + squares, before[1] + errors
        return out

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the numbers."""
        found: torch.dtype = getattr(torch, self._form.blocks.dtype)
        return found

    @override
    def check(self, dtype_of: Callable[[str], torch.dtype]) -> None:
        wanted = dict.fromkeys(self._grids, self.dtype) | dict.fromkeys(self.added, torch.float32)
        for name, dtype in wanted.items():
            if dtype_of(name) != dtype:
                raise WeightError(f"{name}: it is sent as {dtype}, but the engine's ranks hold it as {dtype_of(name)}")

    def _share(self, reduce: Callable[[Tensor], object]) -> None:
        """Gives the blocks that several boxes share the largest maximum of any."""
        for names in _batches(self._layout):
            flat = torch.zeros(sum(map(prod, names.values())), device=self._flat.device)
            pieces = dict(zip(names, flat.split([prod(grid) for grid in names.values()]), strict=True))
            mine = [name for name in names if name in self._grids]
            for name in mine:
                pieces[name].copy_(self._grids[name].flatten())
            reduce(flat)
            for name in mine:
                self._grids[name].copy_(pieces[name].view_as(self._grids[name]))


def _batches(layout: ScaledLayout) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yields batches of the grids of weights that boxes cut inside blocks, the same on all ranks."""
    out: dict[str, tuple[int, ...]] = {}
    for name, grid in layout.cut_weights():
        out[name] = grid
        if sum(map(prod, out.values())) >= _REDUCED:
            yield out
            out = {}
    if out:
        yield out


def _start(box: Box) -> tuple[int, ...]:
    return tuple(low for low, _ in box)
