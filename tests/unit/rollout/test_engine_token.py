"""A server requires the token from every request: no path or method reaches the app without it."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from rl_megatron.rollout.servers import engine_token
from rl_megatron.rollout.servers.engine_token import EngineToken
from rl_megatron.rollout.servers.http import Server
from tests.unit.rollout.test_engine_servers import running

TOKEN = "3f9a"
GOOD = [(b"host", b"here"), (b"authorization", b"Bearer 3f9a")]
STRANGERS = [[], [(b"authorization", b"Bearer 3f9")], [(b"authorization", b"3f9a")], [(b"authorization", b"Bearer ")]]


def said(kind: str, headers: list[tuple[bytes, bytes]], method: str = "POST", path: str = "/x") -> list[Any]:
    """What the server says to one request; the app behind it says ``in``."""
    out: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send("in")

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("it reads what a stranger sends")

    async def send(message: Any) -> None:
        out.append(message)

    scope = {"type": kind, "headers": headers, "method": method, "path": path}
    asyncio.run(EngineToken(app)(scope, receive, send))
    return out


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(engine_token.VARIABLE, TOKEN)


@pytest.mark.parametrize("path", ["/health", "/metrics", "/collective_rpc", "/v1/models"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_no_path_and_no_method_is_open(method: str, path: str) -> None:
    assert said("http", GOOD, method, path) == ["in"]
    for headers in STRANGERS:
        start, body = said("http", headers, method, path)
        assert (start["status"], body["body"]) == (401, b"")


def test_a_stranger_gets_no_socket_either() -> None:
    assert said("websocket", GOOD) == ["in"]
    assert [one["type"] for one in said("websocket", [])] == ["websocket.close"]


def test_a_server_that_was_given_no_token_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said("lifespan", []) == ["in"]
    monkeypatch.delenv(engine_token.VARIABLE)
    with pytest.raises(KeyError, match=engine_token.VARIABLE):
        said("http", GOOD)


def test_a_server_that_answers_strangers_is_known() -> None:
    with running(1) as (fake,):
        server = Server(fake.url, token="t", timeout_seconds=5.0)
        for status, opened in ((200, True), (401, False), (403, False), (404, True)):
            fake.answer = lambda path, body, number, status=status: (status, {})
            assert asyncio.run(server.open_to_strangers()) is opened
        assert set(fake.asked) == {"/openapi.json"}
