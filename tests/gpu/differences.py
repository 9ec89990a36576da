"""How far numbers are from their reference: what is not finite is infinitely far."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def largest(errors: Iterable[float]) -> float:
    """The largest by its size. Python's max passes over a NaN that is not the first."""
    return max((abs(error) if math.isfinite(error) else math.inf for error in errors), default=0.0)


def worst(found: Any, wanted: Any) -> float:
    """The largest difference of numbers in lists of one form."""
    if isinstance(found, list):
        assert len(found) == len(wanted)
        return largest(worst(a, b) for a, b in zip(found, wanted, strict=True))
    return largest([found - wanted])
