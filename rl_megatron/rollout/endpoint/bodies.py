"""What ASGI applications read and send: a whole body within limits, and a whole answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

import msgspec

from rl_megatron.rollout.endpoint.served import RequestRefused

MAX_BODY_BYTES = 32 * 2**20
_BODY_SECONDS = 30.0
_READ_ON = 4  # times as much is read and dropped, so that its client reads why

ReceivePart = Callable[[], Awaitable[MutableMapping[str, Any]]]
SendPart = Callable[[MutableMapping[str, Any]], Awaitable[None]]
R = TypeVar("R", bound=msgspec.Struct)


async def read_body(headers: Mapping[bytes, bytes], receive: ReceivePart) -> bytes:
    """The body of a request. Raises RequestRefused where it is too long, ends early or is not there in 30 seconds."""
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            return await _body(headers, receive)
    except TimeoutError as error:
        raise RequestRefused(408, f"the body was not there within {_BODY_SECONDS:g} s") from error


async def _body(headers: Mapping[bytes, bytes], receive: ReceivePart) -> bytes:
    parts, have, more = list[bytes](), 0, True
    said = headers.get(b"content-length", b"0")
    too_long = not said.isdigit() or int(said) > MAX_BODY_BYTES
    while more and have <= _READ_ON * MAX_BODY_BYTES:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise RequestRefused(400, "the body ended early")
        part, more = event.get("body", b""), event.get("more_body", False)
        have += len(part)
        too_long = too_long or have > MAX_BODY_BYTES
        if too_long:
            parts.clear()
        else:
            parts.append(part)
    if too_long:
        raise RequestRefused(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
    return b"".join(parts)


def read_request(body: bytes, kind: type[R]) -> R:
    """The request. Raises RequestRefused."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefused(400, f"the body is no request of this path: {error}") from error


def method_of(scope: Mapping[str, Any], methods: Mapping[str, str]) -> str:
    """The path of a request. Raises RequestRefused for one that is not in ``methods``, or by another method."""
    path: str = scope["path"]
    if (wanted := methods.get(path)) is None:
        raise RequestRefused(404, f"there is no {path!r:.100}; there are {', '.join(sorted(methods))}")
    if scope["method"] != wanted:
        raise RequestRefused(405, f"{path} takes {wanted}, not {scope['method']}")
    return path


async def respond(send: SendPart, status: int, headers: Mapping[bytes, bytes], parts: Iterable[bytes]) -> None:
    """SendPart an answer as one body."""
    body = b"".join(parts)
    length = {b"content-length": str(len(body)).encode()}
    await send({"type": "http.response.start", "status": status, "headers": [*{**headers, **length}.items()]})
    await send({"type": "http.response.body", "body": body})
