"""Opens TCP streams between the controller and ranks on other nodes, authenticated both ways by the job's token.

Neither side reads a message, which is a pickle, before the other has proved that it has the token, by an HMAC-SHA256
over both sides' random numbers. Messages are not encrypted: they are as private as the allocation's network.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import secrets
import socket
import sys
import time
from multiprocessing.connection import Connection

PROOF_BYTES = 32
TOKEN_BYTES = 32
HANDSHAKE_SECONDS = 10.0  # for all of it
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH)  # a node's network may come up after Slurm
_PAUSE_SECONDS = 1.0  # between two tries to connect
_SILENCE_SECONDS = 60  # without an answer of the other node's kernel end a stream on which nothing is on its way


class NotProven(ConnectionError):
    """The other side of a stream does not have the job's token."""


def listen(host: str, *, backlog: int) -> socket.socket:
    """A socket that listens on a free port of one address, never of all addresses."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(backlog)
    return listener


async def accept(accepted: socket.socket, token: bytes) -> Connection:
    """The controller's end, after authentication. Raises OSError, for example NotProven, after closing the stream."""
    return await _proven(accepted, token, ours=b"controller", theirs=b"rank")


def connect(host: str, port: int, token: bytes, *, seconds: float) -> tuple[Connection, str]:
    """A rank's end, after authentication, and this machine's address towards the controller. Raises OSError.

    Strangers can make the controller late: tries are repeated for ``seconds``, unless nothing listens there. Each new
    reason is printed to stderr, since the controller may end this process before they are over.
    """
    end, told = time.monotonic() + seconds, set[str]()
    while True:
        try:
            stream = socket.create_connection((host, port), timeout=HANDSHAKE_SECONDS)
            address = str(stream.getsockname()[0])
            return asyncio.run(_proven(stream, token, ours=b"rank", theirs=b"controller")), address
        except OSError as error:
            left, reason = end - time.monotonic(), str(error)
            passing = isinstance(error, TimeoutError | ConnectionError) or error.errno in _NO_ROUTE
            if isinstance(error, ConnectionRefusedError) or not passing or left < _PAUSE_SECONDS:
                raise
            if reason not in told:
                told.add(reason)
                again = f"tried again for {left:.0f} s"
                print(f"no connection to the controller at {host}:{port} yet: {reason}; {again}", file=sys.stderr)
        time.sleep(_PAUSE_SECONDS)


async def _proven(stream: socket.socket, token: bytes, *, ours: bytes, theirs: bytes) -> Connection:
    """Authenticate: both send a random number, then an HMAC of both numbers and their role."""
    loop = asyncio.get_running_loop()
    try:
        stream.setblocking(False)
        nonce = secrets.token_bytes(PROOF_BYTES)
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            await loop.sock_sendall(stream, nonce)
            challenge = await _exactly(stream, PROOF_BYTES)
            if ours == b"rank":  # the connecting side proves itself first, so that a stranger learns nothing
                await loop.sock_sendall(stream, _proof(token, ours, challenge, nonce))
            if not hmac.compare_digest(await _exactly(stream, PROOF_BYTES), _proof(token, theirs, nonce, challenge)):
                raise NotProven("the other side does not have this job's token")
            if ours == b"controller":
                await loop.sock_sendall(stream, _proof(token, ours, challenge, nonce))
        stream.setblocking(True)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _probe(stream)
    except BaseException as error:
        stream.close()
        if isinstance(error, TimeoutError):
            late = f"the other side did not prove within {HANDSHAKE_SECONDS:g} s that it has this job's token"
            raise TimeoutError(late) from error
        raise
    return Connection(stream.detach())


def _probe(stream: socket.socket) -> None:
    """Have the kernel find a lost node. No TCP_USER_TIMEOUT: it ends streams of nodes that live but do not read."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_SECONDS // 2)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENCE_SECONDS // 6)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _proof(token: bytes, role: bytes, asked: bytes, asking: bytes) -> bytes:
    """The proof by ``role`` for the random numbers ``asked`` (received) and ``asking`` (sent)."""
    return hmac.new(token, b"|".join((b"rl_megatron", role, asked, asking)), hashlib.sha256).digest()


async def _exactly(stream: socket.socket, count: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < count:
        part = await loop.sock_recv(stream, count - len(data))
        if not part:
            raise NotProven("the stream ended before the other side proved that it has this job's token")
        data += part
    return data
