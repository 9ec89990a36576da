"""Streams open only between two ends that have the token; then tensors of every kind arrive unchanged over them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch

from launcher import wire
from tests.completions import completion, plain

TOKEN = b"t" * wire.TOKEN_BYTES


def accepted(client: Callable[[str, int], None]) -> Connection | Exception:
    """What the controller's side makes of a client."""
    with wire.listen("127.0.0.1", backlog=1) as listener:
        thread = threading.Thread(target=client, args=listener.getsockname())
        thread.start()
        stream, _ = listener.accept()
        try:
            return asyncio.run(wire.accept(stream, TOKEN))
        except OSError as error:
            return error
        finally:
            thread.join(20)


def test_both_sides_with_the_token_talk() -> None:
    got = []

    def client(host: str, port: int) -> None:
        connection, address = wire.connect(host, port, TOKEN, seconds=0)
        connection.send_bytes(b"x" * 1_000_000)
        got.append((connection.recv_bytes(), address))

    with wire.listen("127.0.0.1", backlog=1) as listener:
        thread = threading.Thread(target=client, args=listener.getsockname())
        thread.start()
        connection = asyncio.run(wire.accept(listener.accept()[0], TOKEN))
        assert connection.recv_bytes() == b"x" * 1_000_000
        connection.send_bytes(b"back")
        thread.join(20)
    assert got == [(b"back", "127.0.0.1")]


def test_it_listens_on_one_address_alone() -> None:
    with wire.listen("127.0.0.1", backlog=1) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", listener.getsockname()[1]), timeout=5)


def test_another_token_is_refused_on_both_sides() -> None:
    seen: list[Exception] = []

    def client(host: str, port: int) -> None:
        try:
            wire.connect(host, port, b"u" * wire.TOKEN_BYTES, seconds=0)
        except OSError as error:
            seen.append(error)

    assert isinstance(accepted(client), wire.NotProven)
    assert isinstance(seen[0], wire.NotProven)


class Bomb:
    """A pickle that leaves a trace where it is read."""

    went_off = False

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _explode, ()


def _explode() -> None:
    Bomb.went_off = True


def test_a_pickle_without_a_proof_is_never_read() -> None:
    def client(host: str, port: int) -> None:
        with socket.create_connection((host, port)) as stream:
            data = pickle.dumps(Bomb())
            stream.sendall(len(data).to_bytes(4, "big") + data + b"\0" * 100)

    assert isinstance(accepted(client), OSError)
    assert not Bomb.went_off
    pickle.loads(pickle.dumps(Bomb()))
    assert Bomb.went_off  # had it been read

    def client(host: str, port: int) -> None:
        with socket.create_connection((host, port)) as stream:
            asked = stream.recv(wire.PROOF_BYTES)
            stream.sendall(asked + asked)

    assert isinstance(accepted(client), wire.NotProven)


@pytest.mark.parametrize("says", [b"", b"x"])
def test_all_of_a_handshake_has_one_limit(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the other side sends a byte of it, or if it says nothing."""
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.1)

    def client(host: str, port: int) -> None:
        with socket.create_connection((host, port), 0.02) as stream, contextlib.suppress(ConnectionError):
            said = b"-"
            while said:
                stream.sendall(says)
                with contextlib.suppress(TimeoutError):
                    said = stream.recv(100)

    assert isinstance(accepted(client), TimeoutError)


def test_a_stream_lasts_while_the_other_side_lives_and_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 seconds, in which a suspended rank answers for its node alone: 64 MB for it wait."""
    monkeypatch.setattr(wire, "_SILENCE_SECONDS", 6)
    with wire.listen("127.0.0.1", backlog=1) as listener, ThreadPoolExecutor() as pool:
        connecting = pool.submit(wire.connect, *listener.getsockname(), TOKEN, seconds=0)
        with asyncio.run(wire.accept(listener.accept()[0], TOKEN)) as ours, connecting.result(60)[0] as theirs:
            sending = pool.submit(ours.send_bytes, bytes(64 << 20))
            assert not wait([ours], timeout=12)
            assert theirs.recv_bytes() == bytes(64 << 20)
            sending.result(60)


def test_an_idle_stream_is_probed_on_both_sides() -> None:
    """In a network namespace whose link went down, with 6 s in place of 60, the stream ended after 6 s."""
    with wire.listen("127.0.0.1", backlog=1) as listener, ThreadPoolExecutor() as pool:
        connecting = pool.submit(wire.connect, *listener.getsockname(), TOKEN, seconds=0)
        with asyncio.run(wire.accept(listener.accept()[0], TOKEN)) as ours, connecting.result(60)[0] as theirs:
            for end in (ours, theirs):
                with socket.socket(fileno=os.dup(end.fileno())) as stream:
                    assert stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                    names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                    idle, between, count = (stream.getsockopt(socket.IPPROTO_TCP, name) for name in names)
                    assert idle + between * count == 60


def test_a_rank_tries_until_it_is_heard(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And says why, each reason once."""
    monkeypatch.setattr(wire, "_PAUSE_SECONDS", 0.0)
    with wire.listen("127.0.0.1", backlog=1) as listener, ThreadPoolExecutor() as pool:
        listener.settimeout(20)
        where = listener.getsockname()
        connecting = pool.submit(wire.connect, *where, TOKEN, seconds=600)
        for _ in range(3):
            listener.accept()[0].close()
        with asyncio.run(wire.accept(listener.accept()[0], TOKEN)) as ours, connecting.result(60)[0] as theirs:
            theirs.send_bytes(b"here")
            assert ours.recv_bytes() == b"here"
    said = capsys.readouterr().err.splitlines()  # the stream ended, was reset, or both
    before = f"no connection to the controller at {where[0]}:{where[1]} yet: "
    reasons = [line.partition("; tried again for ")[0].removeprefix(before) for line in said]
    assert all(line.startswith(before) for line in said)
    assert 0 < len(reasons) == len(set(reasons))
    with pytest.raises(ConnectionRefusedError):
        wire.connect(*where, TOKEN, seconds=600)


@pytest.mark.parametrize(("number", "tries"), [(errno.EHOSTUNREACH, 2), (errno.ENETUNREACH, 2), (errno.EACCES, 1)])
def test_a_rank_tries_again_where_its_network_is_late(number: int, tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = [OSError(number, "no way"), ConnectionRefusedError("no way")]

    def refused(*_: object, **__: object) -> socket.socket:
        raise refusals.pop(0)

    monkeypatch.setattr(wire, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("socket.create_connection", refused)
    with pytest.raises(OSError, match="no way"):
        wire.connect("10.0.0.1", 1, TOKEN, seconds=600)
    assert len(refusals) == 2 - tries


# Messages over a stream: tensors of every kind arrive unchanged, in separate memory; a broken stream raises.
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
    sender = threading.Thread(target=wire.send, args=(ends[0], wire.pack(value)))
    sender.start()
    try:
        return wire.unpack(wire.receive(ends[1]))
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


def test_a_views_own_bytes_travel_uncopied() -> None:
    rows = torch.zeros(1_000_000, dtype=torch.uint8)[:5000]
    pickled, buffers = wire.pack([rows, TENSORS["small"], rows[:7]])
    assert [len(b) for b in buffers] == [5000]
    assert len(pickled) < 2000
    tensor = torch.zeros(10_000, dtype=torch.uint8)
    _, (buffer,) = wire.pack(tensor)
    tensor[7] = 3
    assert buffer[7] == 3


def test_columns_arrive_read_only_and_the_small_ones_inside_the_pickle(ends: tuple[Connection, Connection]) -> None:
    sent = [completion(range(count)) for count in (5000, 3, 0)]
    _, buffers = wire.pack(sent)
    assert [len(b) for b in buffers] == [20_000] * 2
    found: Any = over(ends, sent)
    assert list(map(plain, found)) == list(map(plain, sent))
    assert not any(column.flags.writeable for one in found for column in (one.token_ids, one.logprobs))


@pytest.mark.parametrize("before", [1, 12, 20, 30, -1000])
def test_a_stream_that_ends_inside_a_message_says_so(ends: tuple[Connection, Connection], before: int) -> None:
    ours, theirs = ends
    os.write(ours.fileno(), b"".join(wire.parts(wire.pack(TENSORS["routes"])))[:before])
    ours.close()
    with pytest.raises(EOFError, match="inside a message"):
        wire.receive(theirs)


@pytest.mark.parametrize("size", [5, 4096, 10_000_000])
def test_messages_in_pieces_of_any_size_are_the_same(size: int) -> None:
    sent = [wire.pack(value) for value in (TENSORS, None, [TENSORS["routes"]] * 3, "text")] + [wire.STACKS]
    stream = memoryview(b"".join(part for message in sent for part in wire.parts(message)))
    coming, found = wire.Incoming(), []
    for i in range(0, len(stream), size):
        found += coming.fed(stream[i : i + size])
    assert not coming.inside
    assert found == sent
