"""Streams open only between two ends that have the token; before that, nothing is unpickled."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import pickle
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait

import pytest

from launcher.wire import channel

TOKEN = b"t" * channel.TOKEN_BYTES


def accepted(client: Callable[[str, int], None]) -> Connection | Exception:
    """What the controller's side makes of a client."""
    with channel.listen("127.0.0.1", backlog=1) as listener:
        thread = threading.Thread(target=client, args=listener.getsockname())
        thread.start()
        stream, _ = listener.accept()
        try:
            return asyncio.run(channel.accept(stream, TOKEN))
        except OSError as error:
            return error
        finally:
            thread.join(20)


def test_both_sides_with_the_token_talk() -> None:
    got = []

    def client(host: str, port: int) -> None:
        connection, address = channel.connect(host, port, TOKEN, seconds=0)
        connection.send_bytes(b"x" * 1_000_000)
        got.append((connection.recv_bytes(), address))

    with channel.listen("127.0.0.1", backlog=1) as listener:
        thread = threading.Thread(target=client, args=listener.getsockname())
        thread.start()
        connection = asyncio.run(channel.accept(listener.accept()[0], TOKEN))
        assert connection.recv_bytes() == b"x" * 1_000_000
        connection.send_bytes(b"back")
        thread.join(20)
    assert got == [(b"back", "127.0.0.1")]


def test_it_listens_on_one_address_alone() -> None:
    with channel.listen("127.0.0.1", backlog=1) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", listener.getsockname()[1]), timeout=5)


def test_another_token_is_refused_on_both_sides() -> None:
    seen: list[Exception] = []

    def client(host: str, port: int) -> None:
        try:
            channel.connect(host, port, b"u" * channel.TOKEN_BYTES, seconds=0)
        except OSError as error:
            seen.append(error)

    assert isinstance(accepted(client), channel.NotProven)
    assert isinstance(seen[0], channel.NotProven)


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


def test_a_proof_made_up_is_refused() -> None:
    def client(host: str, port: int) -> None:
        with socket.create_connection((host, port)) as stream:
            asked = stream.recv(channel.PROOF_BYTES)
            stream.sendall(asked + asked)

    assert isinstance(accepted(client), channel.NotProven)


def test_one_who_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 0.1)

    def client(host: str, port: int) -> None:
        with socket.create_connection((host, port)) as stream:
            while stream.recv(100):
                pass

    assert isinstance(accepted(client), TimeoutError)


def test_all_of_a_handshake_has_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the other side sends a byte of it."""
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 0.1)

    def client(host: str, port: int) -> None:
        with socket.create_connection((host, port), 0.02) as stream, contextlib.suppress(ConnectionError):
            said = b"-"
            while said:
                stream.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    said = stream.recv(100)

    assert isinstance(accepted(client), TimeoutError)


def test_a_stream_lasts_while_the_other_side_lives_and_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 seconds, in which a suspended rank answers for its node alone: 64 MB for it wait."""
    monkeypatch.setattr(channel, "_SILENCE_SECONDS", 6)
    with channel.listen("127.0.0.1", backlog=1) as listener, ThreadPoolExecutor() as pool:
        connecting = pool.submit(channel.connect, *listener.getsockname(), TOKEN, seconds=0)
        with asyncio.run(channel.accept(listener.accept()[0], TOKEN)) as ours, connecting.result(60)[0] as theirs:
            sending = pool.submit(ours.send_bytes, bytes(64 << 20))
            assert not wait([ours], timeout=12)
            assert theirs.recv_bytes() == bytes(64 << 20)
            sending.result(60)


def test_an_idle_stream_is_probed_on_both_sides() -> None:
    """In a network namespace whose link went down, with 6 s in place of 60, the stream ended after 6 s."""
    with channel.listen("127.0.0.1", backlog=1) as listener, ThreadPoolExecutor() as pool:
        connecting = pool.submit(channel.connect, *listener.getsockname(), TOKEN, seconds=0)
        with asyncio.run(channel.accept(listener.accept()[0], TOKEN)) as ours, connecting.result(60)[0] as theirs:
            for end in (ours, theirs):
                with socket.socket(fileno=os.dup(end.fileno())) as stream:
                    assert stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                    names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                    idle, between, count = (stream.getsockopt(socket.IPPROTO_TCP, name) for name in names)
                    assert idle + between * count == 60


def test_a_rank_tries_again_until_the_controller_has_time_or_has_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says why, each reason once."""
    monkeypatch.setattr(channel, "_PAUSE_SECONDS", 0.0)
    with channel.listen("127.0.0.1", backlog=1) as listener, ThreadPoolExecutor() as pool:
        listener.settimeout(20)
        where = listener.getsockname()
        connecting = pool.submit(channel.connect, *where, TOKEN, seconds=600)
        for _ in range(3):
            listener.accept()[0].close()
        with asyncio.run(channel.accept(listener.accept()[0], TOKEN)) as ours, connecting.result(60)[0] as theirs:
            theirs.send_bytes(b"here")
            assert ours.recv_bytes() == b"here"
    said = capsys.readouterr().err.splitlines()  # the stream ended, was reset, or both
    before = f"no connection to the controller at {where[0]}:{where[1]} yet: "
    reasons = [line.partition("; tried again for ")[0].removeprefix(before) for line in said]
    assert all(line.startswith(before) for line in said)
    assert 0 < len(reasons) == len(set(reasons))
    with pytest.raises(ConnectionRefusedError):
        channel.connect(*where, TOKEN, seconds=600)


@pytest.mark.parametrize(("number", "tries"), [(errno.EHOSTUNREACH, 2), (errno.ENETUNREACH, 2), (errno.EACCES, 1)])
def test_a_rank_tries_again_where_its_nodes_network_is_late(
    number: int, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [OSError(number, "no way"), ConnectionRefusedError("no way")]

    def refused(*_: object, **__: object) -> socket.socket:
        raise refusals.pop(0)

    monkeypatch.setattr(channel, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("socket.create_connection", refused)
    with pytest.raises(OSError, match="no way"):
        channel.connect("10.0.0.1", 1, TOKEN, seconds=600)
    assert len(refusals) == 2 - tries
