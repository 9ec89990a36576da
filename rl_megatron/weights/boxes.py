"""Boxes of a tensor: plain integers."""

from __future__ import annotations

Box = tuple[tuple[int, int], ...]
"""Half-open (start, stop) of each tensor dim."""
Shape = tuple[int, ...]
"""Size of each tensor dim."""
