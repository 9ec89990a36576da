"""Streams between the controller and ranks on other nodes: TCP, authenticated both ways by the job's token.

Neither side reads a message, which is a pickle, before the other proved with an HMAC-SHA256 over both sides' random
numbers that it has the token. What follows is as private as the network that it travels: the allocation's own.
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
_SILENCE_SECONDS = 60  # unanswered bytes on the way for so long end a stream: the other node is gone
_TCP_USER_TIMEOUT = 18  # Linux; socket has no name for it before Python 3.12


class NotProven(ConnectionError):
    """The other side of a stream does not have the job's token."""


def listen(host: str, *, backlog: int) -> socket.socket:
    """A socket that listens on a free port of one address, never of all."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(backlog)
    return listener


def accept(accepted: socket.socket, token: bytes) -> Connection:
    """The controller's end, once the other side proved itself. Raises OSError, NotProven among them, and hangs up."""
    return _proven(accepted, token, ours=b"controller", theirs=b"rank")


def connect(host: str, port: int, token: bytes) -> tuple[Connection, str]:
    """A rank's end, once the controller proved itself, and this machine's address on the way there. Raises OSError."""
    stream = socket.create_connection((host, port), timeout=HANDSHAKE_SECONDS)
    address = str(stream.getsockname()[0])
    return _proven(stream, token, ours=b"rank", theirs=b"controller"), address


def _proven(stream: socket.socket, token: bytes, *, ours: bytes, theirs: bytes) -> Connection:
    """Both send a random number, then what only the token makes of the pair and their role."""
    try:
        stream.settimeout(HANDSHAKE_SECONDS)
        nonce = secrets.token_bytes(PROOF_BYTES)
        stream.sendall(nonce)
        challenge = _exactly(stream, PROOF_BYTES)
        if ours == b"rank":  # the side that came speaks first: a stranger learns nothing of the token
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
    """What ``role`` answers to the random number ``asked``, having asked with ``asking``."""
    return hmac.new(token, b"|".join((b"rl_megatron", role, asked, asking)), hashlib.sha256).digest()


def _exactly(stream: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = stream.recv(count - len(data))
        if not part:
            raise NotProven("the other side hung up before it proved that it has this job's token")
        data += part
    return data
