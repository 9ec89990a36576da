"""A server that closes idle connections just as a request is sent on one."""

from __future__ import annotations

import asyncio

import pytest

from rl_megatron.rollout.servers.http import AttemptFailed, Broken, Server, Unreachable

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n7"


def answers(*, method: str, dies: bool) -> tuple[list[int | type[AttemptFailed]], int]:
    """What two requests find at a server that answers the first one of each connection and closes it at the second,
    where it may also stop listening, and how many connections it took."""
    taken = 0

    async def run() -> list[int | type[AttemptFailed]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal taken
            taken += 1
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ANSWER)
            await reader.readuntil(b"\r\n\r\n")
            if dies:
                listening.close()
            writer.close()

        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        server = Server(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", token=None, timeout_seconds=30.0)
        found: list[int | type[AttemptFailed]] = []
        try:
            for _ in range(2):
                try:
                    found.append(await (server.get("/tokens") if method == "GET" else server.post("/tokens")))
                except AttemptFailed as error:
                    found.append(type(error))
        finally:
            await server.close()
            listening.close()
        return found

    return asyncio.run(run()), taken


def test_what_changes_nothing_is_asked_again_on_a_new_connection() -> None:
    assert answers(method="GET", dies=False) == ([7, 7], 2)


def test_a_server_that_died_of_it_is_not_there_the_second_time() -> None:
    assert answers(method="GET", dies=True) == ([7, Unreachable], 1)


@pytest.mark.parametrize("dies", [False, True])
def test_a_request_that_may_have_acted_is_not_repeated(dies: bool) -> None:
    assert answers(method="POST", dies=dies) == ([7, Broken], 1)
