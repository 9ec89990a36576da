"""Messages over a stream: tensors of every kind arrive unchanged, in separate memory; a broken stream raises."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from launcher.wire import messages
from tests.completions import completion, plain

TENSORS = {
    "routes": torch.randint(0, 255, (3000, 4, 8), dtype=torch.uint8),
    "wide": torch.randint(0, 384, (3000, 2, 8), dtype=torch.int16),
    "mask": torch.rand(9000) < 0.5,
    "half": torch.randn(5000).bfloat16(),
    "strided": torch.randn(300, 200)[::2, 5:100],
    "small": torch.arange(3),
    "none": torch.zeros(0, 4),
    "one": torch.tensor(2.5),
}


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = Pipe()
    with ours, theirs:
        yield ours, theirs


def over(ends: tuple[Connection, Connection], value: object) -> object:
    sender = threading.Thread(target=messages.send, args=(ends[0], messages.pack(value)))
    sender.start()
    try:
        return messages.unpack(messages.receive(ends[1]))
    finally:
        sender.join()


def test_values_arrive_as_they_were_one_after_the_other(ends: tuple[Connection, Connection]) -> None:
    for value in (TENSORS, ("score", (1, [TENSORS["routes"]] * 2)), None):
        found = over(ends, value)
        if value is TENSORS:
            for name, tensor in TENSORS.items():
                assert found[name].dtype == tensor.dtype, name
                assert torch.equal(found[name], tensor), name
                found[name].zero_()  # can be written, and is nobody else's
            assert TENSORS["routes"].any()
        elif value is not None:
            assert found[:1] == ("score",)
            first, second = found[1][1]
            assert first is second  # what is the same tensor stays one
            assert torch.equal(first, TENSORS["routes"])
        else:
            assert found is None


def test_a_views_own_bytes_travel_and_no_others() -> None:
    rows = torch.zeros(1_000_000, dtype=torch.uint8)[:5000]
    pickled, buffers = messages.pack([rows, TENSORS["small"], rows[:7]])
    assert [len(b) for b in buffers] == [5000]
    assert len(pickled) < 2000


def test_tensors_are_not_copied_to_be_sent() -> None:
    tensor = torch.zeros(10_000, dtype=torch.uint8)
    _, (buffer,) = messages.pack(tensor)
    tensor[7] = 3
    assert buffer[7] == 3


def test_columns_arrive_read_only_and_the_small_ones_inside_the_pickle(ends: tuple[Connection, Connection]) -> None:
    sent = [completion(range(count)) for count in (5000, 3, 0)]
    _, buffers = messages.pack(sent)
    assert [len(b) for b in buffers] == [20_000] * 2
    found: Any = over(ends, sent)
    assert list(map(plain, found)) == list(map(plain, sent))
    assert not any(column.flags.writeable for one in found for column in (one.token_ids, one.logprobs))


@pytest.mark.parametrize("before", [1, 12, 20, 30, -1000])
def test_a_stream_that_ends_inside_a_message_says_so(ends: tuple[Connection, Connection], before: int) -> None:
    ours, theirs = ends
    os.write(ours.fileno(), b"".join(messages.parts(messages.pack(TENSORS["routes"])))[:before])
    ours.close()
    with pytest.raises(EOFError, match="inside a message"):
        messages.receive(theirs)


@pytest.mark.parametrize("size", [5, 4096, 10_000_000])
def test_messages_in_pieces_of_any_size_are_the_same(size: int) -> None:
    sent = [messages.pack(value) for value in (TENSORS, None, [TENSORS["routes"]] * 3, "text")] + [messages.STACKS]
    stream = memoryview(b"".join(part for message in sent for part in messages.parts(message)))
    coming, found = messages.Incoming(), []
    for i in range(0, len(stream), size):
        found += coming.fed(stream[i : i + size])
    assert not coming.inside
    assert found == sent
