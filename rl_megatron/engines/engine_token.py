"""Requires the run's token in every request to an engine server, on every path. Runs inside the server.

The engines' own checks leave paths open. vLLM's leaves all outside of /v1 and /inference, so also /collective_rpc and
weight updates. SGLang's leaves /metrics and paths that begin with /health. It takes its key from a command line.
Every user of the node can read that, but only its user can read a process's environment. Standard library only.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

VARIABLE = "RL_MEGATRON_ENGINE_TOKEN"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def authorization(token: str) -> Mapping[str, str]:
    """Returns the header of every request to a server that requires ``token``."""
    return {"Authorization": f"Bearer {token}"}


class AuthMiddleware:
    """An ASGI middleware that answers requests without the token of `VARIABLE` with 401. Raises KeyError if unset."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app, self._wanted = app, authorization(os.environ[VARIABLE])["Authorization"].encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on requests with the token, and messages that are not requests."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._wanted):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # sent before the connection is accepted: status 403
        else:
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
