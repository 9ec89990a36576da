"""A share: what one data-parallel rank is sent for one pass, as one array of bytes without a pickle.

It has a header in JSON, the numbers of the rows that the pass takes, and columns of rows, each array at a multiple of 8
bytes. `sent` writes it, and `held` reads it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Share: TypeAlias = NDArray[np.uint8]
"""What one data-parallel rank is sent for one pass."""

Pieces: TypeAlias = tuple[Sequence[NDArray[Any]], np.dtype[Any], tuple[int, ...]]
"""Arrays that are sent as one, its dtype and its shape."""

_ALIGNMENT = 8


def share_of(head: dict[str, Any], every: Sequence[Pieces]) -> Share:
    """Header and arrays in one array of bytes."""
    text = json.dumps({**head, "arrays": [(dtype.str, shape) for _, dtype, shape in every]}).encode()
    sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in every]
    place = 8 + _room_for(len(text))
    out = np.zeros(place + sum(map(_room_for, sizes)), np.uint8)
    out[:8].view(np.int64)[0] = len(text)
    out[8 : 8 + len(text)] = np.frombuffer(text, np.uint8)
    for (arrays, dtype, shape), size in zip(every, sizes, strict=True):
        np.concatenate(arrays, out=out[place : place + size].view(dtype).reshape(shape), casting="unsafe")
        place += _room_for(size)
    return out


def opened(share: Share) -> tuple[dict[str, Any], list[NDArray[Any]]]:
    """Header and arrays, which use the share's memory."""
    length = int(share[:_ALIGNMENT].view(np.int64)[0])
    head = json.loads(share[_ALIGNMENT : _ALIGNMENT + length].tobytes())
    place, arrays = _ALIGNMENT + _room_for(length), []
    for dtype, shape in head["arrays"]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays.append(share[place : place + size].view(dtype).reshape(shape))
        place += _room_for(size)
    return head, arrays


def layers_in(share: Share) -> int:
    """The MoE layers of the routes that it brings; 0 if it brings none."""
    head, arrays = opened(share)
    return next((a.shape[1] for name, a in zip(_names(head), arrays, strict=True) if name == "routes"), 0)


def of_layers(share: Share, layers: Sequence[int]) -> Share:
    """The share with the routes of these MoE layers alone, of all that it has."""
    head, arrays = opened(share)
    cut = [a[:, list(layers)] if name == "routes" else a for name, a in zip(_names(head), arrays, strict=True)]
    return share_of({**head, "is_cut": True}, [([array], array.dtype, array.shape) for array in cut])


def _names(head: dict[str, Any]) -> list[str]:
    """What each array is."""

    def of_blocks() -> Iterator[str]:
        for forms in head["blocks"]:
            yield from ("rows", "lengths", *(name for name, (form, _) in forms.items() if form != "copy"))

    return ["rows", "counts", *head["spare"], *of_blocks()]


def _room_for(size: int) -> int:
    """Bytes that an array of ``size`` bytes takes."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
