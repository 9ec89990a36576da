"""Servers that die, hang and come back, with real HTTP: requests are answered once, by weights that are served."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launcher.processes import restarts
from launcher.servers.pool import ServedEngines
from launcher.servers.supervisor import Standing, Supervisor
from rl_megatron.config.io import load_config
from rl_megatron.errors import EngineError, ReplicasLost
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.rollout.servers import attempts
from rl_megatron.rollout.servers import replicas as replicas_
from rl_megatron.rollout.servers.adapter import Description, ForeignWeights
from rl_megatron.rollout.servers.engine import ServedEngine
from rl_megatron.rollout.servers.http import NoAnswer, Server
from rl_megatron.rollout.servers.replicas import Health, Replica
from rl_megatron.weights.layouts.families import read_shape
from tests.unit.rollout.test_engine_servers import REQUEST, SECTION, Fake, Words, push, running

LIMIT = 300.0


@dataclass(kw_only=True)
class Place:
    """A fake server that ends when the test says so."""

    fake: Fake
    server: Server
    fatal: tuple[type[Exception], ...] = (NoAnswer, ForeignWeights)
    why: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    was_ended: bool = False

    async def ended(self) -> str:
        return await asyncio.shield(self.why)

    async def end(self) -> None:
        self.was_ended = True


@dataclass(kw_only=True)
class Bed:
    """An engine of fakes, looked after; ``spare`` ones take the places of the dead."""

    engine: ServedEngine
    supervisor: Supervisor
    places: list[Place]
    spare: list[Fake]
    version: int = 0
    faults: list[OSError] = field(default_factory=list)
    """What the next starts raise."""
    may_start: asyncio.Event = field(default_factory=asyncio.Event)

    async def push(self, version: int) -> None:
        self.version = version
        await push(self.engine, version)

    async def reach(self, number: int, health: Health) -> None:
        await until(lambda: self.engine.replicas.all[number].health is health)


@contextlib.asynccontextmanager
async def bed(fakes: list[Fake], spare: list[Fake], **changes: Any) -> AsyncIterator[Bed]:
    """Changes are those of the section. Restarts wait for nothing, and retries hardly."""
    section = SECTION.model_copy(update={"restarts": 2, **changes})

    def place(fake: Fake) -> Place:
        return Place(fake=fake, server=Server(fake.url, token="t", timeout_seconds=section.timeout_seconds))

    places = [place(fake) for fake in fakes]
    engine = ServedEngine(Words(), [p.server for p in places], section, max_length=8, vocab_size=10)

    async def restart(replica: Replica) -> Standing:
        await it.may_start.wait()
        if it.faults:
            raise it.faults.pop()
        if not it.spare:
            raise EngineError("no more ports")
        it.places.append(place(it.spare.pop(0)))
        return it.places[-1]

    async def refit(url: str) -> None:
        if it.version and engine.weights.stale(url):
            await engine.weights.load(Path("weights"), it.version, only=url)
            await engine.weights.commit(it.version, only=url)

    supervisor = Supervisor(engine=engine, section=section, restart=restart, refit=refit)
    it = Bed(engine=engine, supervisor=supervisor, places=[*places], spare=spare)
    it.may_start.set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attempts, "_WAIT", 0.01)
        patch.setattr(restarts, "_FIRST_WAIT", 0.0)
        async with supervisor.watched(places):
            yield it
        await engine.close()


@pytest.fixture
def fakes() -> Iterator[list[Fake]]:
    with running(3) as some:
        yield some


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT):
        while not true():
            await asyncio.sleep(0.001)


def stuck(fake: Fake, path: str) -> threading.Event:
    """``path`` is answered by nobody until the event is set."""
    go, plain = threading.Event(), fake.answer

    def answer(asked: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        if asked == path:
            go.wait(LIMIT)
        return plain(asked, body, number)

    fake.answer = answer
    return go


@pytest.mark.parametrize("replicas", [1, 2])
async def test_requests_of_a_server_that_dies_are_answered_once_by_what_was_refitted(
    fakes: list[Fake], replicas: int
) -> None:
    """By another replica, or, where there is none, by the new server; all by the version that is served."""
    async with bed(fakes[:replicas], fakes[2:], timeout_seconds=1000.0) as it:
        await it.push(4)
        go = stuck(fakes[0], "/generate")
        requests = [asyncio.create_task(it.engine.generate(REQUEST)) for _ in range(6)]
        await until(lambda: "/generate" in fakes[0].asked)
        if replicas == 2:
            it.may_start.clear()  # the other answers them before there is a new server
        it.places[0].why.set_result("killed")
        answers = await asyncio.gather(*requests)
        it.may_start.set()
        assert [[c.spans for c in answer] for answer in answers] == [[((0, 4),)]] * 6
        await it.reach(0, Health.HEALTHY)
        assert it.places[0].was_ended
        orders = [path for path in fakes[2].asked if path != "/health"]
        assert orders[:4] == ["/pause", "/load", "/resume", "/relabel"]
        assert fakes[2].label == "4@t"
        assert it.engine.metrics() == {"engine/healthy": replicas, "engine/restarts": 1}
        go.set()


@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_server_that_dies_of_a_push_gets_the_new_version(fakes: list[Fake], replicas: int) -> None:
    """The push goes on with the others; where there is none, with the new server, for which requests wait."""
    async with bed(fakes[:replicas], fakes[2:], timeout_seconds=1000.0) as it:
        await it.push(4)
        go = stuck(fakes[0], "/load")
        pushing = asyncio.create_task(self_healing(it, 5))
        await until(lambda: fakes[0].asked.count("/load") == 2)
        waiting = asyncio.create_task(it.engine.generate(REQUEST))
        it.places[0].why.set_result("killed")
        await pushing
        assert (await waiting)[0].spans == ((0, 5),)
        await it.reach(0, Health.HEALTHY)
        assert fakes[2].label == "5@t"
        assert (await it.engine.generate(REQUEST))[0].spans == ((0, 5),)
        go.set()


async def self_healing(it: Bed, version: int) -> None:
    """A push as ServedWeights makes it."""
    while True:
        with contextlib.suppress(ReplicasLost):
            await it.push(version)
            return


@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_server_that_dies_again_and_again_is_given_up(fakes: list[Fake], replicas: int) -> None:
    async with bed(fakes[:replicas], []) as it:
        await it.push(4)
        it.places[0].why.set_result("killed; its log ends with: out of memory")
        await it.reach(0, Health.GONE)
        assert it.engine.metrics() == {"engine/healthy": replicas - 1, "engine/restarts": 2}
        if replicas == 2:
            assert (await it.engine.generate(REQUEST))[0].spans == ((0, 4),)
            return
        with pytest.raises(EngineError, match="no Words server is left:\nno more ports"):
            await it.engine.generate(REQUEST)


async def test_a_start_that_the_system_refuses_is_one_failed_try(fakes: list[Fake]) -> None:
    """Its log is on a file system that does not answer, or there are no more processes or ports."""
    async with bed(fakes[:1], fakes[2:]) as it:
        await it.push(4)
        it.faults.append(OSError(errno.ESTALE, "Stale file handle", "vllm_0.log"))
        it.places[0].why.set_result("killed")
        assert (await it.engine.generate(REQUEST))[0].spans == ((0, 4),)
        assert it.engine.metrics() == {"engine/healthy": 1, "engine/restarts": 2}


async def test_without_restarts_the_run_ends_with_the_end_of_the_log(fakes: list[Fake]) -> None:
    async with bed(fakes[:1], fakes[2:], restarts=0) as it:
        await it.push(4)
        it.places[0].why.set_result("killed; its log ends with: out of memory")
        await it.reach(0, Health.GONE)
        with pytest.raises(EngineError, match="no Words server is left:\nkilled; its log ends with: out of memory"):
            await it.engine.generate(REQUEST)


async def test_a_run_continues_with_the_servers_that_are_left(fakes: list[Fake]) -> None:
    async with bed(fakes[:2], [], restarts=1) as it:
        await it.push(4)
        it.places[0].why.set_result("killed; its log ends with: the node lost power")
        await it.reach(0, Health.GONE)
        assert (await it.engine.generate(REQUEST))[0].spans == ((0, 4),)


@pytest.mark.parametrize("path", ["/health", "/generate"])
async def test_a_server_that_hangs_is_ended_and_its_requests_go_elsewhere(
    fakes: list[Fake], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not well when asked, or is, but makes no token of the request that it has."""
    limits = {} if path == "/health" else {"timeout_seconds": 1.5}
    if path == "/health":
        monkeypatch.setattr(replicas_, "HEALTH_SECONDS", 1.5)
    async with bed(fakes[:1], fakes[2:], **limits) as it:
        await it.push(4)
        go = stuck(fakes[0], "/generate")
        health = stuck(fakes[0], "/health") if path == "/health" else go
        assert (await it.engine.generate(REQUEST))[0].spans == ((0, 4),)
        assert it.places[0].was_ended
        assert fakes[2].asked.count("/generate") == 1
        said = "it hangs or was stopped" if path == "/health" else "made no token in rollout.server.timeout_"
        assert said in it.engine.replicas.all[0].reason
        go.set()
        health.set()


@pytest.mark.parametrize("slow", ["a queue", "no health"])
async def test_a_server_that_makes_tokens_is_healthy_however_long_a_request_takes(
    fakes: list[Fake], slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request waits behind others; or the server is too busy to say that it is well. Looks come thrice a limit."""
    go, made, limits = threading.Event(), list[int](), dict[str, float]()
    if slow == "a queue":
        limits = {"timeout_seconds": 3.0}
    else:
        monkeypatch.setattr(replicas_, "HEALTH_SECONDS", 3.0)

    def answer(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        if path == "/made":
            made.append(number)
            if len(made) == 5:
                go.set()
            return 200, {"made": len(made)}
        if path == "/generate" or (path == "/health" and slow == "no health"):
            go.wait(LIMIT)
        return 200, {"label": fakes[0].label}

    async with bed(fakes[:1], [], **limits) as it:
        await it.push(4)
        fakes[0].answer = answer
        assert (await it.engine.generate(REQUEST))[0].spans == ((0, 4),)
        assert it.engine.metrics() == {"engine/healthy": 1, "engine/restarts": 0}


async def test_a_failed_request_is_no_death_where_the_server_says_that_it_is_well(fakes: list[Fake]) -> None:
    plain = fakes[0].answer
    fakes[0].answer = lambda path, body, number: (
        (500, {}) if path == "/generate" and fakes[0].asked.count(path) == 1 else plain(path, body, number)
    )
    async with bed(fakes[:1], []) as it:
        await it.push(4)
        assert (await it.engine.generate(REQUEST))[0].spans == ((0, 4),)
        assert it.engine.metrics() == {"engine/healthy": 1, "engine/restarts": 0}


async def test_all_attempts_at_a_server_whose_death_is_known_only_afterwards_do_not_count(fakes: list[Fake]) -> None:
    fakes[0].answer = lambda path, body, number: (503 if path == "/generate" else 200, {})
    go = stuck(fakes[0], "/health")
    async with bed(fakes[:1], fakes[2:]) as it:
        await it.push(4)
        request = asyncio.create_task(it.engine.generate(REQUEST))
        await until(lambda: fakes[0].asked.count("/generate") == 4)
        await until(lambda: not it.places[0].server.in_flight)  # the last attempt has failed too
        it.places[0].why.set_result("killed")
        assert (await request)[0].spans == ((0, 4),)
        assert fakes[2].asked.count("/generate") == 1
        go.set()


async def test_a_server_of_somebody_else_that_came_back_with_other_weights_is_refitted(fakes: list[Fake]) -> None:
    async with bed(fakes[:1], fakes[:1]) as it:
        await it.push(4)
        fakes[0].label = "default"
        assert (await it.engine.generate(REQUEST))[0].spans == ((0, 4),)
        assert "'default'" in it.engine.replicas.all[0].reason
        assert fakes[0].label == "4@t"


class Described(Words):
    async def describe(self, server: Server) -> Description:
        await server.get("/version")
        architecture = "Qwen3MoeForCausalLM"
        return Description(version="1", dtype="float32", architecture=architecture, max_length=1000, problems=())


async def test_a_server_by_address_that_was_out_of_reach_serves_again_once_it_is_refitted(
    fakes: list[Fake], tmp_path: Path
) -> None:
    """Between a broken connection and its next answer it was started again, by somebody else."""
    fake, gone = fakes[0], list[int]()
    model = make_tiny_model(TinySizes(), tmp_path / "cache", seed=0)
    config = load_config("tiny_cpu", ["rollout=vllm", f"rollout.server.addresses={fake.url}"])

    def answer(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        if path == "/generate" and not gone:
            gone.append(number)
            fake.label = "default"
            raise ConnectionAbortedError
        return 200, {"label": fake.label}

    fake.answer = answer
    servers = ServedEngines(config, Described(), model, tmp_path, read_shape(model))
    async with servers.running(tmp_path / "mirror" / "model.safetensors") as engine:

        async def refit(url: str) -> None:
            if engine.weights.stale(url):
                await engine.weights.load(Path("weights"), 4, only=url)
                await engine.weights.commit(4, only=url)

        await push(engine, 4)
        servers.refit = refit
        assert (await engine.generate(REQUEST))[0].spans == ((0, 4),)
        assert engine.metrics() == {"engine/healthy": 1, "engine/restarts": 1}
        assert fake.asked.count("/load") == 2


async def test_a_supervisor_that_fails_is_no_endless_wait(fakes: list[Fake]) -> None:
    engine = ServedEngine(
        Words(), [Server(fakes[0].url, token="t", timeout_seconds=60.0)], SECTION, max_length=8, vocab_size=10
    )
    waiting: Awaitable[object] = asyncio.ensure_future(engine.replicas.some(engine.replicas.healthy))
    await asyncio.sleep(0)
    engine.replicas.fail(RuntimeError("a fault of ours"))
    with pytest.raises(RuntimeError, match="a fault of ours"):
        await waiting
