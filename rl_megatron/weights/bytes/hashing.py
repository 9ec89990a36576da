"""Computes 64-bit digests of boxes: XXH3 for bytes in CPU memory, a sum in torch for bytes on a GPU.

They detect corruption, not forgery. XXH3 (Cyan4973/xxHash) reads cached bytes several times as fast as memory delivers
them, so hash a piece of at most `PIECE_BYTES` right after it was copied. Both ends of a move must use one kind.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

PIECE_BYTES = 256 * 2**10  # fits a core's second-level cache together with its copy
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_WIDENED = 2**22  # words of a GPU's tensor that are 8 bytes wide at once, three times
_KEY = -7046029254386353131  # odd, 2**64 over the golden ratio


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's elements in order: a view if CPU memory holds them contiguously, else a copy."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def digest(data: memoryview) -> int:
    """The digest of bytes, as an unsigned number."""
    from xxhash import xxh3_64_intdigest  # engines' environments may lack it: they receive weights without digests

    return xxh3_64_intdigest(data)


def tensor_digests(tensors: Iterable[Tensor]) -> Tensor:
    """[number of tensors] int64 on their device, without waiting for it. Takes one of them after the other.

    A tensor's digest is the sum of its mixed words, each times an odd number of its position, modulo 2**64. One wrong
    word always changes it; several, or words that changed places, change it except in about one case in 2**63.
    """
    return torch.stack([_sum_of_words(tensor.detach().contiguous().view(-1).view(torch.uint8)) for tensor in tensors])


def _sum_of_words(data: Tensor) -> Tensor:
    size = next(size for size in _WORDS if data.numel() % size == 0)
    words = (data if data.storage_offset() % size == 0 else data.clone()).view(_WORDS[size])
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for first in range(0, len(words), _WIDENED):
        some = words[first : first + _WIDENED].to(torch.int64, copy=True)
        places = torch.arange(first + 1, first + 1 + len(some), device=data.device)
        total += _mix(some, 29).mul_(_mix(places, 31).bitwise_or_(1)).sum()
    return total


def _mix(numbers: Tensor, shift: int) -> Tensor:
    """Mix bits in place, one to one. Otherwise differences in the high bits alone, as of two signs, could cancel in the
    sum."""
    numbers.mul_(_KEY)
    return numbers.bitwise_xor_(numbers >> shift)
