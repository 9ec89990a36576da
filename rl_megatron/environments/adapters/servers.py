"""Servers of environments: where one may be, and requests of JSON to it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import httpx2

from rl_megatron.config.sections.services import SERVICE
from rl_megatron.errors import ConfigError
from rl_megatron.http.client import KEEP_ALIVE_SECONDS, describe_transport, new_client, read_bounded
from rl_megatron.http.urls import is_loopback, split_url
from rl_megatron.services import ServiceAddress, Services

MOST_BYTES = 1 << 22  # of one answer
_KEY = "environment.options.url"


class ServerFailed(Exception):
    """A server did not answer, or what it answered is no answer; the text names both."""


def check_url(url: str) -> None:
    """Raises ConfigError for a URL that cannot be used, and for one whose answers others could write: rewards come
    from there, so it is on loopback, behind TLS, or a service of the run."""
    given = f"{_KEY}={url!r:.200}"
    parts = split_url(url, key=_KEY, example="http://127.0.0.1:port")
    if f"{parts.scheme}:" == SERVICE and parts.path:
        return
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"{given}: write it as http://127.0.0.1:port, https://host, or service:<name>")
    if parts.username is not None:
        raise ConfigError(f"{_KEY}: remove user name and password from the URL; it is written to logs")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ConfigError(
            f"{given}: {parts.hostname} is not on loopback, and without TLS others on the network could write its "
            "rewards; have the run start the server (service:<name>), give an https:// URL, or a port of 127.0.0.1 "
            "that is forwarded"
        )


async def server_address(url: str, services: Services) -> ServiceAddress:
    """Where ``url``, which is checked, is now, without a slash at its end; waits and raises as `Services.located`."""
    address = await services.located(url)
    return replace(address, url=address.url.rstrip("/"))


class JsonServer:
    """Requests of one trajectory, whose cookies it keeps. It follows no redirects and uses no proxies; its
    user's limits bound the waits."""

    def __init__(self, address: ServiceAddress) -> None:
        self._url = address.url
        headers = {"Accept-Encoding": "identity", **address.headers}
        self._client = new_client(headers=headers, limits=httpx2.Limits(keepalive_expiry=KEEP_ALIVE_SECONDS))

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
