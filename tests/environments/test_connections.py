"""Connections to servers of environments, of which uvicorn closes those that are idle for 5 seconds."""

from __future__ import annotations

import asyncio
import time

import pytest
from json_server import JsonServer


@pytest.mark.parametrize(("idle", "connections"), [(1.0, 1), (4.9, 2)])
async def test_a_connection_is_not_used_again_when_its_server_may_be_closing_it(
    idle: float, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        taken += 1
        while line := await reader.readline():
            if line == b"\r\n":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    server = JsonServer(f"http://127.0.0.1:{port}")
    assert await server.ask_object("GET", "/tool") == {}
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + idle)  # the model takes its turn
    assert await server.ask_object("GET", "/tool") == {}
    monkeypatch.undo()
    await server.close()
    listening.close()
    assert taken == connections
