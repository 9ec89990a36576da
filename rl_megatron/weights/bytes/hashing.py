"""64-bit digests of boxes: XXH3 where the bytes lie in CPU memory, a sum in torch where they lie on a GPU.

They find corruption, not forgery. XXH3 (Cyan4973/xxHash) reads cached bytes several times as fast as memory delivers
them, so hash a piece of at most `PIECE_BYTES` right after it was copied. Both ends of a move must use one kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PIECE_BYTES = 256 * 2**10  # with its copy well inside a core's second-level cache
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_KEY = -7046029254386353131  # odd, 2**64 over the golden ratio


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's elements in order: a view where they lie so in CPU memory, else a copy."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def digest(data: memoryview) -> int:
    """Of bytes, as an unsigned number."""
    from xxhash import xxh3_64_intdigest  # engines' environments may lack it: they get their weights without digests

    return xxh3_64_intdigest(data)


def tensor_digests(tensors: Sequence[Tensor]) -> Tensor:
    """[len(tensors)] int64 on their device, without waiting for it.

    Of each tensor the sum of its words, mixed, each times an odd number of its place's own, modulo 2**64: one wrong
    word always changes it; several, or words that changed places, do but for about one case in 2**63.
    """
    return torch.stack([_sum_of_words(tensor.detach().contiguous().view(-1).view(torch.uint8)) for tensor in tensors])


def _sum_of_words(data: Tensor) -> Tensor:
    size = next(size for size in _WORDS if data.numel() % size == 0)
    aligned = data if data.storage_offset() % size == 0 else data.clone()
    words = _mixed(aligned.view(_WORDS[size]).to(torch.int64), 29)
    places = _mixed(torch.arange(1, len(words) + 1, device=data.device), 31)
    return (words * (places | 1)).sum()


def _mixed(numbers: Tensor, shift: int) -> Tensor:
    """One to one; a difference in the high bits alone, as of two signs, would else cancel out in a sum."""
    spread = numbers * _KEY
    return spread ^ (spread >> shift)
