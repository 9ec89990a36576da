"""Requires the run's token in every request to an engine server, whatever its path. Runs inside the server.

The engines' own checks leave paths open: vLLM's all paths outside of /v1 and /inference, so also /collective_rpc and
the weight updates; SGLang's /metrics and paths that begin with /health. SGLang also takes its key from a command line,
which every user of the node can read; only its own user can read a process's environment. Standard library alone.
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
    """The header of every request to a server that requires ``token``."""
    return {"Authorization": f"Bearer {token}"}


class AuthMiddleware:
    """ASGI middleware: answers requests without the token of `VARIABLE` with status 401. Raises KeyError if unset."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app, self._wanted = app, authorization(os.environ[VARIABLE])["Authorization"].encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on requests with the token, and what is not a request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._wanted):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # before it is accepted: status 403
        else:
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
