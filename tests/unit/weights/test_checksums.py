"""Checksums that add up over boxes, against their definition in plain integers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_megatron.weights.checks import checksums
from rl_megatron.weights.checks.checksums import add, box_checksums, checksum

SHAPE = (24, 40)


def made(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(30).to(dtype)


def factors(count: int, shift: int) -> list[int]:
    """Splitmix64's steps by Python's integers."""
    out = []
    for i in range(1, count + 1):
        n = i * 0x9E3779B97F4A7C15 % 2**64
        n = (n ^ (n >> shift)) * 0xBF58476D1CE4E5B9 % 2**64
        out.append((n ^ (n >> 27)) | 1)
    return out


def test_it_is_the_sum_that_it_says() -> None:
    tensor = made()
    words = [row.numpy().tobytes() for row in tensor]
    rows, columns = factors(24, 29), factors(20, 31)
    expected = sum(
        rows[r] * columns[c] * int.from_bytes(row[8 * c : 8 * c + 8], "little")
        for r, row in enumerate(words)
        for c in range(20)
    )
    assert checksum(tensor, SHAPE) == expected % 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_boxes_add_up_however_a_tensor_is_cut(dtype: torch.dtype) -> None:
    tensor, whole = made(dtype), checksum(made(dtype), SHAPE)
    assert add(checksum(tensor[:7], SHAPE, (0, 0)), checksum(tensor[7:], SHAPE, (7, 0))) == whole
    assert add(checksum(tensor[:, :16], SHAPE, (0, 0)), checksum(tensor[:, 16:], SHAPE, (0, 16))) == whole
    assert checksum(tensor.t().contiguous().t(), SHAPE) == whole
    assert checksum(tensor.view(torch.uint8), (24, 40 * dtype.itemsize)) == whole


def test_of_vectors_and_of_three_dims() -> None:
    vector, cube = made(shape=(7,)), made(shape=(4, 6, 10))
    assert checksum(vector, (7,)) == checksum(vector[None], (1, 7)) != checksum(vector.flip(0), (7,))
    assert checksum(cube, (4, 6, 10)) == checksum(cube.reshape(4, 60), (4, 60))
    halves = checksum(cube[:, :2], (4, 6, 10), (0, 0, 0)), checksum(cube[:, 2:], (4, 6, 10), (0, 2, 0))
    assert add(*halves) == checksum(cube, (4, 6, 10))


@pytest.mark.parametrize("size", [8, 4, 2, 1])
def test_an_accelerator_has_the_same(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "_PIECE", 64)  # in pieces too
    kind = checksums._INTS[size]
    words = made().view(torch.uint8).view(kind)
    expected = checksums._on_cpu(words.numpy().view(checksums._WORDS[size]), 3, (5, 5 + words.shape[1]))
    found = checksums._on_device(words, 3, (5, 5 + words.shape[1]), checksums._FactorsOnDevice())
    assert int(found) % 2**64 == expected


def test_of_many_boxes_it_is_that_of_each() -> None:
    boxes = [(made()[low:], SHAPE, (low, 0)) for low in (0, 7)] + [
        (made(shape=(9,)), (9,), ()),
        (made()[:0], SHAPE, ()),
    ]
    assert box_checksums(iter(boxes)) == [checksum(*box) for box in boxes]
    assert box_checksums([]) == []


def test_what_corrupts_weights_changes_it() -> None:
    tensor = made(torch.bfloat16)
    whole, bits = checksum(tensor, SHAPE), tensor.view(torch.uint8)
    for place in torch.randint(bits.numel(), (50,)).tolist():
        wrong = bits.clone().view(-1)
        wrong[place] ^= 1 << place % 8
        assert checksum(wrong.view(24, 80).view(torch.bfloat16), SHAPE) != whole
    swapped_rows, swapped_columns = tensor.clone(), tensor.clone()
    swapped_rows[[3, 9]] = tensor[[9, 3]]
    swapped_columns[:, [0, 1]] = tensor[:, [1, 0]]
    others = [swapped_rows, swapped_columns, -tensor, tensor.roll(1, 0), torch.zeros_like(tensor)]
    assert len({whole, *(checksum(other, SHAPE) for other in others)}) == 6


def test_a_box_of_half_words_is_refused() -> None:
    tensor = made(torch.bfloat16)
    with pytest.raises(ValueError, match="columns 0 to 6 of \\(24, 40\\) are not whole words of 8 bytes"):
        checksum(tensor[:, :6], SHAPE, (0, 0))


def test_what_was_looked_at_can_be_freed() -> None:
    """Of a tensor that `Tensor.numpy` was asked of, it cannot."""
    tensor = torch.arange(12.0).view(3, 4)
    checksum(tensor, (3, 4))
    assert tensor.untyped_storage().resizable()
