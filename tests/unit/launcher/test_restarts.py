"""Which restarts of a server count, and the waits before them."""

from __future__ import annotations

import asyncio
import errno
from itertools import chain, repeat
from typing import Any

import pytest

from launcher.processes import restarts
from rl_megatron.errors import EngineError
from rl_megatron.rollout.servers.http import OutOfFiles, Server
from rl_megatron.rollout.servers.replicas import Health
from tests.processes.launcher.test_supervisor import LIMIT, REQUEST, bed, running


@pytest.mark.parametrize(("calm", "left"), [(0.0, Health.HEALTHY), (3600.0, Health.GONE)])
async def test_restarts_before_a_server_ran_for_long_do_not_count(
    calm: float, left: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "CALM_SECONDS", calm)
    with running(4) as fakes:
        async with bed(fakes[:1], fakes[1:], restarts=2) as it:
            await it.push(4)
            replica = it.engine.replicas.all[0]
            for died in (1, 2, 3):
                await it.engine.generate(REQUEST)
                it.places[-1].why.set_result("killed")
                async with asyncio.timeout(LIMIT):
                    while len(replica.ended) < died or replica.health not in (Health.HEALTHY, Health.GONE):
                        await asyncio.sleep(0.001)
            assert replica.health is left
            assert it.engine.metrics()["engine/restarts"] == (3 if left is Health.HEALTHY else 2)


@pytest.mark.parametrize(
    ("answers", "seconds", "said"),
    [
        ([None, 503, 200], 60.0, None),
        ([None, 503, "ends"], 60.0, "ended with status 3"),
        ([None], 0.2, TimeoutError("nothing")),
        ([503, None], 1.0, TimeoutError("nothing")),
        ([503], 1.0, TimeoutError("status 503")),
    ],
    ids=["it comes up", "it ends", "it is silent", "it falls silent", "it is busy"],
)
async def test_a_server_that_comes_up_is_asked_again_where_it_does_not_answer(
    answers: list[int | str | None], seconds: float, said: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the connection and answers nothing, as one whose loop still loads a model. The last answer stays."""
    monkeypatch.setattr(restarts, "ANSWER_SECONDS", 0.05 if None in answers else 60.0)
    monkeypatch.setattr(restarts, "_LOOK_SECONDS", 0.01)
    left, ended = chain(answers, repeat(answers[-1])), asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.readline():
            if request == b"\r\n" and (answer := next(left)) is not None:
                if answer == "ends":
                    if not ended.done():
                        ended.set_result("ended with status 3")
                    break
                writer.write(f"HTTP/1.1 {answer} So\r\nContent-Length: 0\r\n\r\n".encode())
        writer.close()

    async def ends() -> str:
        return str(await ended)

    async with await asyncio.start_server(serve, "127.0.0.1") as listening:
        host, port = listening.sockets[0].getsockname()
        server = Server(f"http://{host}:{port}", token=None, timeout_seconds=60.0)
        try:
            answered: object = await restarts.until_serving(server, ends(), seconds)
        except TimeoutError as error:
            answered = error
        finally:
            await server.close()
    assert str(answered) == str(said)


def test_waits_double_to_a_minute() -> None:
    assert [restarts.wait_before(number) for number in (0, 1, 6, 7, 5000)] == [0.5, 1.0, 32.0, 60.0, 60.0]


FAULT, FULL = EngineError("answered nothing"), OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(
    ("faults", "waits", "raised"),
    [
        ([], [0.5], None),
        ([FAULT], [0.5, 1.0], None),
        ([FAULT] * 3, [0.5, 1.0, 2.0], EngineError),
        ([FAULT, FULL], [0.5, 1.0], OutOfFiles),
    ],
    ids=["it starts", "again", "in vain", "no file is left"],
)
def test_a_server_is_started_again_as_often_as_it_may_be(
    faults: list[Exception], waits: list[float], raised: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, waited, seen, made = [*faults], list[float](), list[Exception](), 0

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    async def start() -> str:
        if left:
            raise left.pop(0)
        return "serves"

    async def again() -> None:
        nonlocal made
        made += 1

    def brought_up() -> str:
        limits: Any = {"name": "judge", "most": 3, "made": lambda: made}
        return asyncio.run(restarts.brought_up(start, again=again, failed=seen.append, ended=FAULT, **limits))

    monkeypatch.setattr("launcher.processes.restarts.asyncio.sleep", sleep)
    if raised is None:
        assert brought_up() == "serves"
    else:
        with pytest.raises(raised, match=r"answered nothing|start of judge: this process has no open file left"):
            brought_up()
    assert (waited, made, left) == (waits, len(waits), [])
    assert seen == [one for one in faults if one is FAULT]
