"""Encodes routes, the experts that a model's routers chose, as compact arrays [positions, MoE layers, top_k].

A sequence of L tokens has L - 1 positions; position i is where token i is the input. A position costs
``MoE layers * top_k`` bytes, twice that above 256 experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_megatron.errors import DataError
from rl_megatron.types import Routes

_NARROW, _WIDE = np.dtype(np.uint8), np.dtype("<i2")


def routes_dtype(num_experts: int) -> torch.dtype:
    """The smallest dtype that holds an expert's number."""
    return torch.uint8 if num_experts <= 256 else torch.int16


def encode_routes(experts: NDArray[Any], *, num_experts: int) -> Routes:
    """Encode ``experts`` [positions, MoE layers, top_k] of any integer type. Raises DataError for an unknown expert."""
    if experts.ndim != 3:
        raise DataError(f"routes have shape {experts.shape}; it must be [positions, MoE layers, experts a token]")
    if experts.size and not 0 <= experts.min() <= experts.max() < num_experts:
        raise DataError(f"routes name experts {experts.min()} to {experts.max()}, but the model has {num_experts}")
    positions, layers, top_k = experts.shape
    narrow = _NARROW if num_experts <= 256 else _WIDE
    return Routes(data=experts.astype(narrow).tobytes(), shape=(positions, layers, top_k))


def decode_routes(routes: Routes) -> NDArray[Any]:
    """A read-only view, [positions, MoE layers, top_k]."""
    size = len(routes.data) // max(1, int(np.prod(routes.shape)))
    return np.frombuffer(routes.data, _NARROW if size <= 1 else _WIDE).reshape(routes.shape)


def joined_routes(ids: Sequence[str], lengths: Sequence[int], routes: Sequence[Routes | None]) -> Tensor | None:
    """[N, MoE layers, top_k] of all rows, one after the other; None where none has routes.

    ``ids`` are the prompts', for errors, ``lengths`` the rows' tokens. Raises DataError naming the prompt whose routes
    are missing, of the wrong length, or of another model's size.
    """
    if all(row is None for row in routes):
        return None
    arrays: list[NDArray[Any]] = []
    for prompt, length, row in zip(ids, lengths, routes, strict=True):
        if row is None:
            raise DataError(f"prompt {prompt!r}: a completion has no routes, but others of its batch have")
        array = decode_routes(row)
        wanted = (length - 1, *arrays[0].shape[1:]) if arrays else (length - 1, *array.shape[1:])
        if array.shape != wanted:
            raise DataError(
                f"prompt {prompt!r}: its routes have shape {array.shape}; [positions, MoE layers, experts a token] "
                f"must be {wanted}, for each of {length} tokens but the last"
            )
        arrays.append(array)
    return torch.from_numpy(np.concatenate(arrays))
