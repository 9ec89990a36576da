"""Digests of boxes, against Python's integers and the xxHash authors' own numbers."""

from __future__ import annotations

import random
import struct

import pytest
import torch

from rl_megatron.weights.bytes import hashing
from rl_megatron.weights.bytes.hashing import bytes_of, digest, tensor_digests


def test_cpu_digests_are_xxh3() -> None:
    assert digest(bytes_of(torch.empty(0))) == 0x2D06800538D394C2  # XXH3_64bits of nothing, seed 0


def test_strided_boxes_have_the_digest_of_their_elements_in_order() -> None:
    whole = torch.arange(24, dtype=torch.float32).view(4, 6)
    box = whole[1:3, 2:5]
    assert digest(bytes_of(box)) == digest(bytes_of(box.clone())) != digest(bytes_of(whole[1:3, 1:4]))


def _by_integers(data: bytes) -> int:
    size = next(size for size in (8, 4, 2, 1) if len(data) % size == 0)
    mask, total = 2**64 - 1, 0
    letter = {8: "q", 4: "i", 2: "h", 1: "B"}[size]

    def shifted(number: int, by: int) -> int:  # as torch shifts int64: arithmetically
        signed = number - (number >> 63 << 64)
        return (number ^ (signed >> by)) & mask

    for i, (word,) in enumerate(struct.iter_unpack(letter, data), start=1):
        key = 0x9E3779B97F4A7C15
        total += shifted(word * key & mask, 29) * (shifted(i * key & mask, 31) | 1)
    return (total & mask) - ((total & mask) >> 63 << 64)


@pytest.mark.parametrize("length", [1, 2, 4, 8, 13, 22, 36, 4096])
def test_torch_digests_are_the_sum_they_say(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "_WIDENED", 5)  # in pieces too
    data = bytes(random.Random(length).randbytes(length))
    tensors = [torch.frombuffer(bytearray(b"x" * shift + data), dtype=torch.uint8)[shift:] for shift in (0, 1)]
    assert tensor_digests(tensors).tolist() == [_by_integers(data)] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torch_digests_see_every_flipped_bit_and_swapped_rows(dtype: torch.dtype) -> None:
    box = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)).to(dtype)
    changed = [box, box.flip(0), box.flip(1)]
    for at in range(box.nbytes * 8):
        other = box.clone()
        other.view(-1).view(torch.uint8)[at // 8] ^= 1 << at % 8
        changed.append(other)
    assert len(set(tensor_digests(changed).tolist())) == len(changed)
