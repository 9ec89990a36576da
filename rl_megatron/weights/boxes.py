"""Boxes of a tensor, and their algebra: plain integers."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

Box = tuple[tuple[int, int], ...]
"""Half-open (start, stop) of each tensor dim."""
Shape = tuple[int, ...]
"""Size of each tensor dim."""


def whole_box(shape: Sequence[int]) -> Box:
    """The box of all elements of a tensor."""
    return tuple((0, size) for size in shape)


def volume(box: Box) -> int:
    """Elements of a box."""
    return prod(high - low for low, high in box)


def intersect(a: Box, b: Box) -> Box | None:
    """The elements that are in both; None where there are none."""
    cut = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return cut if all(low < high for low, high in cut) else None


def shift(cut: Box, source: Box, target: Box) -> Box:
    """The box of a part of ``source`` in another tensor, whose box ``target`` holds the same elements."""
    return tuple((low - s + t, high - s + t) for (low, high), (s, _), (t, _) in zip(cut, source, target, strict=True))
