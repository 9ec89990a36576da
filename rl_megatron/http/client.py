"""Requests to servers, without redirects and proxies. Responses of servers written by others are bounded."""

from __future__ import annotations

import asyncio
import functools
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import httpx2

T = TypeVar("T")

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 2.0  # uvicorn closes an idle connection after 5 s: a request must not coincide
_PASSING = (408, 429)  # statuses below 500 after which another attempt may succeed


class TryAgain(Exception):
    """An attempt failed, but another may succeed."""


def new_client(**options: Any) -> httpx2.AsyncClient:
    """Returns a client without time limits: its user's limits bound the waits. ``options`` are httpx's."""
    return httpx2.AsyncClient(timeout=None, trust_env=False, verify=_trusted(), **options)


async def read_bounded(response: httpx2.Response, limit: int) -> bytes:
    """Returns the undecoded body. Of a body over ``limit`` bytes it returns a beginning that is also longer."""
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > limit:
            break
    return bytes(body)


def describe_transport(error: httpx2.TransportError) -> str:
    """Returns the reason of a missing response, for a message."""
    return f"{type(error).__name__}: {error!s:.500}"


def quote_beginning(body: bytes) -> str:
    """Returns the beginning of a body, quoted for a message."""
    return repr(body[:80].decode(errors="replace"))


async def post_json(
    url: str, body: bytes, headers: Mapping[str, str], *, max_bytes: int, seconds: float, limit: str
) -> tuple[int, bytes]:
    """Sends one request on its own connection, which a cancellation closes. Returns status and `read_bounded` body.

    Raises TryAgain without a connection, and without a response in ``seconds``, which the message calls ``limit``.
    """
    always = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    try:
        async with (
            asyncio.timeout(seconds),
            new_client() as client,
            client.stream("POST", url, content=body, headers={**always, **headers}) as response,
        ):
            return response.status_code, await read_bounded(response, max_bytes)
    except TimeoutError as error:
        raise TryAgain(f"no answer within {limit}") from error
    except httpx2.TransportError as error:
        raise TryAgain(describe_transport(error)) from error


def check_status(status: int, body: bytes) -> None:
    """Raises TryAgain for status 408, 429 and 5xx, and ValueError for any other except 200."""
    if status == 200:
        return
    said = f"status {status}: {quote_beginning(body)}"
    if status in _PASSING or status >= 500:
        raise TryAgain(said)
    raise ValueError(said)


async def retried(attempt: Callable[[], Awaitable[T]], *, retries: int, wait: float, about: str | None = None) -> T:
    """Returns the result of ``attempt``, after at most ``retries`` more attempts, each after a wait that doubles.

    With ``about`` it logs each wait with this name. Raises the last TryAgain, with the number of attempts.
    """
    for left in range(retries, -1, -1):
        try:
            return await attempt()
        except TryAgain as error:
            if not left:
                raise TryAgain(f"{error}; attempts made: {retries + 1}") from error
            if about is not None:
                logger.warning("%s: %s; retrying in %g s", about, error, wait)
        await asyncio.sleep(wait)
        wait *= 2
    raise AssertionError("the last attempt returns or raises")


@functools.cache
def _trusted() -> ssl.SSLContext:
    """Returns the certificates of SSL_CERT_FILE or SSL_CERT_DIR, or otherwise the system's."""
    try:
        return httpx2.create_ssl_context()
    except OSError as error:  # http:// does not need them
        logger.warning("SSL_CERT_FILE or SSL_CERT_DIR cannot be read, and the system's certificates count: %s", error)
        return httpx2.create_ssl_context(trust_env=False)
