"""Reserves ports for a server that binds them some seconds later.

Systems hand out ports of their own choice from 32768 upwards (Linux's ip_local_port_range): a port that was found there
and let go belongs to whoever opens a connection next. So these lie below, and are held until they are in use.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Iterator

_LOW, _HIGH = 20_000, 32_000
_ATTEMPTS = 100


def any_port(number: int = 0, count: int = 1) -> int:
    """The first of two neighbouring ports that few others take, for another node.

    Of ``count`` who ask, each with a ``number`` of its own below that, no two get the same.
    """
    pairs = (_HIGH - _LOW) // 2
    return _LOW + 2 * (secrets.randbelow(pairs // count) * count + number)


@contextlib.contextmanager
def held_ports(host: str) -> Iterator[int]:
    """The first of two neighbouring ports of ``host``, an address of this machine, that nobody is given meanwhile.

    A server that asks for one of them by its number gets it as long as it sets SO_REUSEADDR, as servers do: Linux lets
    two sockets share a port then while at most one of them listens. Raises OSError where all that are tried are taken.
    """
    for attempt in range(_ATTEMPTS):
        port = any_port()
        with contextlib.ExitStack() as stack:
            try:
                for number in (port, port + 1):
                    _take(stack.enter_context(socket.socket()), host, number)
            except OSError:
                if attempt == _ATTEMPTS - 1:
                    raise
                continue
            yield port
            return


def free_port(host: str) -> int:
    """A port of ``host`` that nobody has at this moment. Raises OSError."""
    with held_ports(host) as port:
        return port


def _take(held: socket.socket, host: str, port: int) -> None:
    """Bind it as its only owner, then let one that sets SO_REUSEADDR come beside it."""
    held.bind((host, port))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
