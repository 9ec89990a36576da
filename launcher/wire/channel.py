"""Opens TCP streams between the controller and ranks on other nodes, authenticated both ways by the job's token.

Neither side reads a message, which is a pickle, before the other has proved that it has the token, by an HMAC-SHA256
over both sides' random numbers. Messages are not encrypted: they are as private as the allocation's network.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from multiprocessing.connection import Connection

PROOF_BYTES = 32
TOKEN_BYTES = 32
HANDSHAKE_SECONDS = 10.0
_SILENCE_SECONDS = 60  # bytes unacknowledged for so long end a stream: the other node is gone
_TCP_USER_TIMEOUT = 18  # Linux; socket has no name for it before Python 3.12


class NotProven(ConnectionError):
    """The other side of a stream does not have the job's token."""


def listen(host: str, *, backlog: int) -> socket.socket:
    """A socket that listens on a free port of one address, never of all addresses."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(backlog)
    return listener


def accept(accepted: socket.socket, token: bytes) -> Connection:
    """The controller's end, after authentication. Raises OSError, for example NotProven, after closing the stream."""
    return _proven(accepted, token, ours=b"controller", theirs=b"rank")


def connect(host: str, port: int, token: bytes) -> tuple[Connection, str]:
    """A rank's end, after authentication, and this machine's address towards the controller. Raises OSError."""
    stream = socket.create_connection((host, port), timeout=HANDSHAKE_SECONDS)
    address = str(stream.getsockname()[0])
    return _proven(stream, token, ours=b"rank", theirs=b"controller"), address


def _proven(stream: socket.socket, token: bytes, *, ours: bytes, theirs: bytes) -> Connection:
    """Authenticate: both send a random number, then an HMAC of both numbers and their role."""
    try:
        stream.settimeout(HANDSHAKE_SECONDS)
        nonce = secrets.token_bytes(PROOF_BYTES)
        stream.sendall(nonce)
        challenge = _exactly(stream, PROOF_BYTES)
        if ours == b"rank":  # the connecting side proves itself first, so that a stranger learns nothing
            stream.sendall(_proof(token, ours, challenge, nonce))
        if not hmac.compare_digest(_exactly(stream, PROOF_BYTES), _proof(token, theirs, nonce, challenge)):
            raise NotProven("the other side does not have this job's token")
        if ours == b"controller":
            stream.sendall(_proof(token, ours, challenge, nonce))
        stream.settimeout(None)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, _SILENCE_SECONDS * 1000)
    except BaseException:
        stream.close()
        raise
    return Connection(stream.detach())


def _proof(token: bytes, role: bytes, asked: bytes, asking: bytes) -> bytes:
    """The proof by ``role`` for the random numbers ``asked`` (received) and ``asking`` (sent)."""
    return hmac.new(token, b"|".join((b"rl_megatron", role, asked, asking)), hashlib.sha256).digest()


def _exactly(stream: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = stream.recv(count - len(data))
        if not part:
            raise NotProven("the other side hung up before it proved that it has this job's token")
        data += part
    return data
