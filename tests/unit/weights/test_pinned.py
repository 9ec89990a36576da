"""Pinned memory in pieces: bounded by what is taken at once, however sizes differ, and no byte is two's."""

from __future__ import annotations

import random

import pytest
import torch

from rl_megatron.weights.bytes.pinned import Extent, Pinned

SLAB = 2**16


class Moment:
    """A copy that is done only when somebody waits for it."""

    def __init__(self, *, done: bool) -> None:
        self.done = done

    def query(self) -> bool:
        return self.done


class Stream:
    def wait_event(self, event: Moment) -> None:
        event.done = True


def test_ragged_steps_pin_what_the_fullest_takes_and_no_two_pieces_share_a_byte() -> None:
    draw, memory, stream = random.Random(3), Pinned(SLAB), Stream()
    most = 0
    for _ in range(300):  # steps, of other micro-batches each
        sizes = [draw.randrange(1, 3 * SLAB // 2) for _ in range(draw.randrange(1, 12))]
        held: list[tuple[int, list[Extent]]] = []
        for number, size in enumerate(sizes):
            extents = memory.take(size, stream)  # type: ignore[arg-type]
            rest = size
            for extent in extents:
                part = memory.of(extent)
                assert len(part) == extent[1] - extent[0]
                part.fill_(number)
                rest -= len(part)
            assert -512 < rest <= 0
            held.append((number, extents))
        most = max(most, sum(-(-size // 512) * 512 for size in sizes))
        draw.shuffle(held)
        for number, extents in held:
            assert all(bool((memory.of(extent) == number).all()) for extent in extents)
            memory.give(extents, Moment(done=draw.random() < 0.5))  # type: ignore[arg-type]
        assert memory.num_bytes == -(-most // SLAB) * SLAB


def test_what_is_still_copied_is_written_only_after_it_was_waited_for() -> None:
    memory, stream = Pinned(SLAB), Stream()
    first = memory.take(SLAB, stream)  # type: ignore[arg-type]
    copying = Moment(done=False)
    memory.give(first, copying)  # type: ignore[arg-type]
    second = memory.take(512, stream)  # type: ignore[arg-type]
    assert copying.done
    assert second == [(0, 512)]
    assert memory.num_bytes == SLAB


@pytest.mark.parametrize("size", [1, 511, 512, SLAB, SLAB + 1])
def test_a_piece_may_be_larger_than_a_slab(size: int) -> None:
    memory = Pinned(SLAB)
    extents = memory.take(size, Stream())  # type: ignore[arg-type]
    assert torch.cat([memory.of(extent) for extent in extents])[:size].numel() == size
    assert memory.num_bytes == -(-size // SLAB) * SLAB
