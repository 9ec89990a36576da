"""A server that writes the kernels that it recorded is not taken for dead, and one that dies of it ends no run."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.servers.kernels import ServerKernels, folder_of_server
from rl_megatron.rollout.servers.http import Server
from tests.unit.launcher.test_supervisor import bed, stuck, until
from tests.unit.rollout.test_engine_servers import REQUEST, Fake, Words, running


class Recording(Words):
    """Words whose server records kernels."""

    async def begin_profile(self, server: Server) -> None:
        await server.post("/start_profile")

    async def end_profile(self, server: Server) -> None:
        await server.post("/stop_profile")


@pytest.fixture
def fake() -> Iterator[Fake]:
    with running(1) as (one,):
        yield one


async def test_a_server_that_answers_nothing_while_it_writes_its_kernels_is_healthy(fake: Fake, tmp_path: Path) -> None:
    async with bed([fake], [], health_seconds=0.6) as it:
        await it.push(4)
        recorder = ServerKernels(Recording(), it.engine.replicas, tmp_path)
        await recorder.begin([0])
        written, healthy = stuck(fake, "/stop_profile"), stuck(fake, "/health")
        ending = asyncio.create_task(recorder.end(tmp_path / "kernels"))
        await until(lambda: "/stop_profile" in fake.asked)
        checks = fake.asked.count("/health")
        looked = checks + 6  # three that fail are a death
        await until(lambda: fake.asked.count("/health") >= looked or it.places[0].was_ended)
        place = folder_of_server(tmp_path, 0)
        place.mkdir(parents=True)
        (place / "trace.json.gz").write_bytes(gzip.compress(b"{}"))
        healthy.set()
        written.set()
        (kernels,) = await ending
        assert kernels.file == tmp_path / "kernels" / "server-0-0.json.gz"
        assert (await it.engine.generate(REQUEST))[0].spans == ((0, 4),)
        assert it.engine.metrics() == {"engine/healthy": 1, "engine/restarts": 0}
        assert not it.places[0].was_ended


async def test_after_it_has_written_it_may_hang_no_longer_than_others(fake: Fake, tmp_path: Path) -> None:
    async with bed([fake], [], health_seconds=0.6, restarts=0) as it:
        await it.push(4)
        recorder = ServerKernels(Recording(), it.engine.replicas, tmp_path)
        await recorder.begin([0])
        healthy = stuck(fake, "/health")
        plain = fake.answer
        fake.answer = lambda path, body, number: (500, {}) if path == "/stop_profile" else plain(path, body, number)
        assert await recorder.end(tmp_path / "kernels") == []
        await until(lambda: it.places[0].was_ended)
        assert "it hangs or was stopped" in it.engine.replicas.all[0].reason
        healthy.set()


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
async def test_a_server_that_is_lost_as_it_records_is_left_out(
    fake: Fake, path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = fake.answer

    def answer(asked: str, body: dict[str, object], number: int) -> tuple[int, object]:
        if asked == path:
            raise ConnectionAbortedError  # closes the connection without an answer
        return plain(asked, body, number)

    async with bed([fake], []) as it:
        await it.push(4)
        recorder = ServerKernels(Recording(), it.engine.replicas, tmp_path)
        fake.answer = answer
        await recorder.begin([0])
        assert await recorder.end(tmp_path / "kernels") == []
    assert "replica 0" in caplog.text
    assert "RemoteProtocolError" in caplog.text


async def test_an_engine_that_records_none_is_not_waited_for(
    fake: Fake, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with bed([fake], []) as it:
        await it.push(4)
        recorder = ServerKernels(Words(), it.engine.replicas, tmp_path)
        await recorder.begin([0])
        assert await recorder.end(tmp_path / "kernels") == []
    assert "replica 0 does not record its kernels: its engine's file has no begin_profile" in caplog.text
