"""Servers that somebody else runs: their token rotates, and a resume waits for them. With real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from launcher.processes import restarts
from launcher.servers.pool import ServedEngines
from rl_megatron.config.io import load_config
from rl_megatron.errors import EngineError
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.rollout.servers import attempts
from rl_megatron.rollout.servers.engine import ServedEngine
from rl_megatron.rollout.servers.replicas import Health
from rl_megatron.weights.layouts.families import read_shape
from tests.processes.launcher.test_supervisor import Described, until
from tests.unit.rollout.test_engine_servers import REQUEST, Fake, push, running


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_WAIT", 0.01)
    monkeypatch.setattr(restarts, "_FIRST_WAIT", 0.01)


def attached(folder: Path, fakes: list[Fake], *keys: str, resumes: bool = False) -> ServedEngines:
    model = make_tiny_model(TinySizes(), folder / "cache", seed=0)
    of_server = (f"addresses={','.join(fake.url for fake in fakes)}", *keys)
    config = load_config("tiny_cpu", ["rollout=vllm", *(f"rollout.server.{key}" for key in of_server)])
    return ServedEngines(config, Described(), model, folder, read_shape(model), resumes=resumes)


async def pushed(servers: ServedEngines, engine: ServedEngine, version: int) -> None:
    """Serve a version, also on servers that come back."""

    async def refit(url: str) -> None:
        if engine.weights.stale(url):
            await engine.weights.load(Path("weights"), version, only=url)
            await engine.weights.commit(version, only=url)

    await push(engine, version)
    servers.refit = refit


@pytest.mark.parametrize(("refusal", "health"), [(401, 401), (403, 403), (403, 200)])
async def test_a_new_token_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int, health: int
) -> None:
    """Both servers refuse the one of before, ``health`` their health check. The file is late the second time."""
    token, taken = tmp_path / "token", "first"
    token.write_text(taken)

    def answering(fake: Fake) -> None:
        plain = fake.answer

        def answer(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
            status = health if path == "/health" else refusal
            return plain(path, body, number) if fake.tokens[number] == taken else (status, "token expired")

        fake.answer = answer

    with running(2) as fakes:
        for fake in fakes:
            answering(fake)
        servers = attached(tmp_path, fakes, f"token_file={token}")
        async with servers.running(tmp_path / "mirror" / "model.safetensors") as engine:
            await pushed(servers, engine, 4)
            monkeypatch.setattr(attempts, "_RETRIES", 0)
            taken = "second"
            token.write_text(taken)
            assert (await engine.generate(REQUEST))[0].spans == ((0, 4),)
            assert engine.metrics() == {"engine/healthy": 2, "engine/restarts": 0}
            taken = "third"
            request = engine.generate(REQUEST)
            answering_late = asyncio.create_task(request)
            await until(lambda: not engine.replicas.healthy())
            advice = (
                f"it refuses the token of rollout.server.token_file={token}: write one that it takes into that file"
            )
            said = [f'{fake.url}/generate: status {refusal}: "token expired"; {advice}' for fake in fakes]
            assert [replica.reason for replica in engine.replicas.all] == said
            token.write_text(taken)
            assert (await answering_late)[0].spans == ((0, 4),)
            await until(lambda: len(engine.replicas.healthy()) == 2)
            assert engine.metrics() == {"engine/healthy": 2, "engine/restarts": 2}


BUSY = r'/health: status 503: "it loads"'


@pytest.mark.parametrize(("resumes", "busy"), [(False, 2), (True, 3), (True, 999)])
async def test_one_that_is_away_ends_a_run_but_no_resume(tmp_path: Path, *, resumes: bool, busy: int) -> None:
    """It may be started again at the same time as the job, and says then that it is not ready."""
    with running(1) as (fake,):
        plain = fake.answer
        fake.answer = lambda path, body, number: plain(path, body, number) if number >= busy else (503, "it loads")
        servers = attached(tmp_path, [fake], "start_seconds=0.3", resumes=resumes)
        late = rf"(?s)no Words server is left:\n.* does not serve after rollout\.server\.start_seconds=0\.3: .*{BUSY}$"
        why = late if resumes else r'^rollout\.engine=vllm: .*status 503: "it loads"$'
        with contextlib.nullcontext() if (resumes, busy) == (True, 3) else pytest.raises(EngineError, match=why):
            async with servers.running(tmp_path / "mirror" / "model.safetensors") as engine:
                await pushed(servers, engine, 4)
                assert engine.metrics()["engine/healthy"] == 1
                assert engine.metrics()["engine/restarts"] > 0


async def test_one_that_connects_but_is_silent_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "ANSWER_SECONDS", 0.1)
    over, asked = threading.Event(), list[str]()

    def silent(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        if number < 3:  # so it counts as away
            return 503, "it loads"
        asked.append(path)
        if asked == ["/health"]:
            over.wait(60.0)
        return plain(path, body, number)

    with running(1) as (fake,):
        plain, fake.answer = fake.answer, silent
        try:
            servers = attached(tmp_path, [fake], "start_seconds=30", resumes=True)
            async with servers.running(tmp_path / "mirror" / "model.safetensors") as engine:
                await pushed(servers, engine, 4)
                assert engine.metrics()["engine/healthy"] == 1
                assert asked[:2] == ["/health", "/health"]
        finally:
            over.set()


async def test_a_resume_goes_on_with_those_that_are_left(tmp_path: Path) -> None:
    """One does not come back, and is asked at the same time as the others, which may take minutes."""
    together, waited = threading.Event(), list[bool]()

    def late(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        waited.append(together.wait(10.0))
        return 503, "it loads"

    def other(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        together.set()
        return plain(path, body, number)

    with running(2) as fakes:
        plain = fakes[1].answer
        fakes[0].answer, fakes[1].answer = late, other
        servers = attached(tmp_path, fakes, "start_seconds=0.1", "restarts=1", resumes=True)
        async with servers.running(tmp_path / "mirror" / "model.safetensors") as engine:
            await pushed(servers, engine, 4)
            assert (await engine.generate(REQUEST))[0].spans == ((0, 4),)
            first = engine.replicas.all[0]
            await until(lambda: first.health is Health.GONE)
            assert re.search(BUSY, first.reason)
            assert (await engine.generate(REQUEST))[0].spans == ((0, 4),)
    assert all(waited)
