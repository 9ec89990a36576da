"""Reserves ports for a server that binds them some seconds later.

Systems assign ephemeral ports from 32768 upwards (Linux's ip_local_port_range): a free port found there may be taken by
the next connection. So these ports are below that range, and are held until the server uses them.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Iterator

_LOW, _HIGH = 20_000, 32_000
_ATTEMPTS = 100


BLOCK = 16
"""Neighbouring ports that a server gets: for requests, its ranks' store, and what its engine adds."""


def any_port(number: int = 0, count: int = 1) -> int:
    """The first of a block of ports that are rarely in use, for another node.

    ``count`` callers with different ``number``s below that get different ports.
    """
    blocks = (_HIGH - _LOW) // BLOCK
    return _LOW + BLOCK * (secrets.randbelow(blocks // count) * count + number)


@contextlib.contextmanager
def held_ports(host: str) -> Iterator[int]:
    """Hold a block of ports of ``host``, an address of this machine or "" for all of them, and yield the first.

    A server can still bind one of them if it sets SO_REUSEADDR, as servers do: Linux then lets two sockets share a
    port while at most one of them listens. Raises OSError if all tried ports are taken.
    """
    for attempt in range(_ATTEMPTS):
        port = any_port()
        with contextlib.ExitStack() as stack:
            try:
                for number in range(port, port + BLOCK):
                    _take(stack.enter_context(socket.socket()), host, number)
            except OSError:
                if attempt == _ATTEMPTS - 1:
                    raise
                continue
            yield port
            return


def free_port(host: str) -> int:
    """A port of ``host``, as in `held_ports`, that is free at this moment. Raises OSError."""
    with held_ports(host) as port:
        return port


def _take(held: socket.socket, host: str, port: int) -> None:
    """Bind the port exclusively, then allow a socket with SO_REUSEADDR to share it."""
    held.bind((host, port))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
