"""Checks the URL of an environment's server, and sends requests of JSON to it; the examples beside it import it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import httpx2

from rl_megatron.errors import ConfigError
from rl_megatron.http.client import KEEP_ALIVE_SECONDS, describe_transport, new_client, read_bounded
from rl_megatron.http.urls import is_loopback, split_url

MOST_BYTES = 1 << 22  # of one answer
_KEY = "environment.options.url"


class ServerFailed(Exception):
    """A server did not answer, or what it answered is no answer; the text names both."""


def check_url(url: str) -> str:
    """Returns the URL without a slash at its end.

    Raises ConfigError for a URL that cannot be used, and for one whose answers others could write: rewards come from
    there, so it is on loopback or behind TLS.
    """
    given = f"{_KEY}={url!r:.200}"
    parts = split_url(url, key=_KEY, example="http://127.0.0.1:port")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"{given}: write it as http://127.0.0.1:port or https://host")
    if parts.username is not None:
        raise ConfigError(f"{_KEY}: remove user name and password from the URL; it is written to logs")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ConfigError(
            f"{given}: {parts.hostname} is not on loopback, and without TLS others on the network could write its "
            "rewards; give an https:// URL, or a port of 127.0.0.1 that is forwarded"
        )
    return url.rstrip("/")


class JsonServer:
    """Requests of one trajectory, whose cookies it keeps. It follows no redirects and uses no proxies; its
    user's limits bound the waits."""

    def __init__(self, url: str) -> None:
        self._url = url
        limits = httpx2.Limits(keepalive_expiry=KEEP_ALIVE_SECONDS)
        self._client = new_client(headers={"Accept-Encoding": "identity"}, limits=limits)

    async def ask(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        """Status and text of the answer. Raises ServerFailed without one, and for one that is too long."""
        where = f"{method} {self._url}{path}"
        try:
            async with self._client.stream(method, self._url + path, json=body) as response:
                answer = await read_bounded(response, MOST_BYTES)
        except httpx2.TransportError as error:
            raise ServerFailed(f"{where}: {describe_transport(error)}") from error
        if len(answer) > MOST_BYTES:
            raise ServerFailed(f"{where}: the answer is longer than {MOST_BYTES} bytes")
        return response.status_code, answer.decode(errors="replace")

    async def ask_object(self, method: str, path: str, body: object = None) -> Mapping[str, Any]:
        """The object of an answer of status 200. Raises ServerFailed for any other answer."""
        status, answer = await self.ask(method, path, body)
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(answer)
            if status == 200 and isinstance(value, dict):
                return value
        raise ServerFailed(
            f"{method} {self._url}{path}: status {status}, and not the object that is due: {answer!r:.300}"
        )

    async def close(self) -> None:
        """Close its connection."""
        await self._client.aclose()
