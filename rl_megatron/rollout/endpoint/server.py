"""The endpoint of a run's conversations: an HTTP server on loopback, in the event loop."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from rl_megatron.rollout.endpoint.app import Application
from rl_megatron.rollout.endpoint.keys import Keys, RequestCounts
from rl_megatron.rollout.endpoint.served import Served

logger = logging.getLogger(__name__)

_CLOSING_SECONDS = 2
_BACKLOG = 1024
_HEAD_SECONDS = 30.0  # from a connection's beginning, or a head's, until that head is there


class Endpoint:
    """Serves conversations under a key each on 127.0.0.1, from the first one on until its event loop ends, or `stop`.

    Its methods are called in that event loop.
    """

    def __init__(self) -> None:
        self._keys = Keys()
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._base_url = ""

    def open(self, conversation: Served) -> tuple[str, str]:
        """``(base_url, api_key)``, at which the conversation is until `close`."""
        if self._serving is None or self._serving.done():
            self._listen()
        return self._base_url, self._keys.open(conversation)

    def requests(self, api_key: str) -> RequestCounts:
        """What clients asked for so far in the key's conversation, which is open."""
        return self._keys.requests(api_key)

    def close(self, api_key: str) -> None:
        """End a key's conversation. What is being sampled for it is given up."""
        self._keys.close(api_key)

    def _listen(self) -> None:
        """The kernel keeps clients until they are served."""
        # With the protocol named, asyncio sets TCP_NODELAY; without it an answer's second packet waits 40 ms.
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listening.bind(("127.0.0.1", 0))
            listening.listen(_BACKLOG)
        except OSError:
            listening.close()
            raise
        self._base_url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        config = uvicorn.Config(
            Application(self._keys),
            lifespan="off",
            ws="none",
            http=BoundedProtocol,
            proxy_headers=False,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=_CLOSING_SECONDS,
            backlog=BoundedProtocol.backlog(),
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(_serve(self._server, listening), name="endpoint")

    async def stop(self) -> None:
        """Stop listening; requests under way have 2 seconds."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving


async def _serve(server: uvicorn.Server, listening: socket.socket) -> None:
    with listening:
        try:
            await server.serve(sockets=[listening])
        except Exception:  # its clients find nobody there
            logger.exception("the endpoint ends")


class BoundedProtocol(H11Protocol):
    """Closes connections that ask nothing, which need no key to be there, and those whose next head never ends.

    So many may come that the process has no file left: beyond their share each new one takes the place of another.
    """

    files_share = 4
    """Connections have at most one in this many of the process's files."""

    @classmethod
    def max_connections(cls) -> int:
        """Returns how many connections there may be, idle and busy."""
        return _most_files() // cls.files_share

    @staticmethod
    def backlog() -> int:
        """Returns how many connections asyncio may accept before it counts the first: at most a quarter of the files,
        which are left where half of them are counted connections."""
        return min(_BACKLOG, _most_files() // 4)

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late: asyncio.TimerHandle | None = self.loop.call_later(_HEAD_SECONDS, self._close_unasked)
        if len(self.connections) > self.max_connections():
            self._make_room()

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_waiting():
            self._in_time()
        elif self._late is None:  # for the rest of this head; between requests uvicorn itself counts
            self._late = self.loop.call_later(_HEAD_SECONDS, self._close_unasked)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        super().connection_lost(exc)

    def _is_waiting(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete  # uvicorn's, of the last request

    def _make_room(self) -> None:
        """Close a connection on which no request is being answered: this one, if there is no other."""
        others = (other for other in self.connections if isinstance(other, BoundedProtocol) and other is not self)
        idle = (other for other in others if other._is_waiting() and not other.transport.is_closing())
        next(idle, self).transport.close()

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _close_unasked(self) -> None:
        self._late = None
        if self._is_waiting():
            self.transport.close()


def _most_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


class _Server(uvicorn.Server):
    """Leaves the process's signals to the run, whose Ctrl-C uvicorn would take."""

    @contextmanager
    @override
    def capture_signals(self) -> Iterator[None]:
        yield
