"""Random weights in place of a checkpoint's: a function of the seed, a tensor's name and an element's place in it.

So every rank of every layout fills its own boxes, and all hold the same model.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from rl_megatron.weights.boxes import Box, Shape

STD = 0.02
"""Standard deviation of matrices, as Hugging Face's ``initializer_range``; norms are 1, other vectors 0."""
_BAND = 2**22  # elements drawn at once
_WORD = 2**32 - 1


class MadeUp:
    """The tensors of a model folder that has no weights, by ``shapes``. Read as an `HFFolder`."""

    def __init__(self, folder: Path, shapes: Mapping[str, Shape], seed: int) -> None:
        self.folder, self._shapes, self._seed = folder, dict(shapes), seed

    def shapes(self) -> dict[str, Shape]:
        """The shape of every tensor by name."""
        return self._shapes

    def read(self, name: str, box: Box) -> Tensor:
        """A box of one tensor, float32, on the CPU."""
        sizes = tuple(stop - start for start, stop in box)
        if len(sizes) < 2:
            return torch.full(sizes, float("norm" in name))
        drawn = torch.empty(math.prod(sizes[:-1]), sizes[-1])
        rows, columns = self._rows(name, box), torch.arange(*box[-1])
        for low in range(0, len(rows), step := max(1, _BAND // sizes[-1])):
            places = rows[low : low + step, None] * self._shapes[name][-1] + columns
            drawn[low : low + step] = _uniform(places, zlib.crc32(name.encode(), self._seed & _WORD))
        return drawn.view(sizes)

    def _rows(self, name: str, box: Box) -> Tensor:
        """The numbers of the box's rows in the tensor, flattened but for its last axis: int64."""
        rows = torch.zeros(1, dtype=torch.int64)
        for size, edge in zip(self._shapes[name][:-1], box[:-1], strict=True):
            rows = (rows[:, None] * size + torch.arange(*edge)).view(-1)
        return rows


class Untrained(MadeUp):
    """Adapters by peft's names before the first step, as peft draws them: A uniform up to 1 / sqrt(in), B 0."""

    @override
    def read(self, name: str, box: Box) -> Tensor:
        if ".lora_B." in name:
            return torch.zeros([stop - start for start, stop in box])
        return super().read(name, box).mul_(1 / (STD * math.sqrt(3 * self.shapes()[name][-1])))


def _uniform(places: Tensor, key: int) -> Tensor:
    """Values of mean 0 and deviation `STD` for int64 ``places``: 24 bits of a hash of 32.

    The hash is lowbias32 (github.com/skeeto/hash-prospector) of both halves of a place, in turn.
    """
    word = _mixed(_mixed((places & _WORD) ^ key) ^ (places >> 32))
    return (word >> 8).to(torch.float32).mul_(2.0**-23).sub_(1.0).mul_(STD * math.sqrt(3))


def _mixed(word: Tensor) -> Tensor:
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & _WORD
    word = ((word ^ (word >> 15)) * 0x735A2D97) & _WORD
    return word ^ (word >> 15)
