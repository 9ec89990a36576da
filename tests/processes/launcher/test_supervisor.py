"""Servers that die, hang, do not come up, or that somebody else runs, with real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launcher.processes.guards import GuardProcess, GuardSpec, ServerSite, start_guard
from launcher.servers import supervisor as restarts
from launcher.servers.pool import ServerLauncher, ServerPool
from launcher.servers.supervisor import FailedServer, ServerState, Supervisor
from launcher.servers.supervisor import StartedServer as StartedServer
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.engines import replicas as replicas_
from rl_megatron.engines import requests as attempts
from rl_megatron.engines.adapter import ServerInfo, UnknownWeights
from rl_megatron.engines.engine import ServerEngine
from rl_megatron.engines.http import ResponseTimeout, Server
from rl_megatron.engines.local.adapter import EmbeddedAdapter
from rl_megatron.engines.replicas import Health, Replica
from rl_megatron.errors import AllReplicasLost, EngineError
from rl_megatron.interfaces import Launcher, RunComponents
from rl_megatron.models.tiny import TinySizes, make_tiny_model, tiny_shape
from rl_megatron.weights.layouts.families import read_shape
from tests.unit.rollout.test_engine_servers import REQUEST, SECTION, Fake, Words, push, running

LIMIT = 300.0


@dataclass(kw_only=True)
class Place:
    """A fake server that ends when the test says so."""

    fake: Fake
    server: Server
    fatal: tuple[type[Exception], ...] = (ResponseTimeout, UnknownWeights)
    why: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    was_ended: bool = False

    async def wait_for_exit(self) -> str:
        return await asyncio.shield(self.why)

    async def end(self) -> None:
        self.was_ended = True


@dataclass(kw_only=True)
class Bed:
    """An engine of fakes, looked after; ``spare`` ones take the places of the dead."""

    engine: ServerEngine
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
    engine = ServerEngine(Words(), [p.server for p in places], section, max_length=8, vocab_size=10)

    async def restart(replica: Replica) -> ServerState:
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

    supervisor = Supervisor(engine=engine, section=section, restart=restart, push_current=refit)
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
async def test_requests_of_a_dead_server_are_answered_once_by_a_refitted(fakes: list[Fake], replicas: int) -> None:
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
        go, pushing = stuck(fakes[0], "/load"), asyncio.create_task(self_healing(it, 5))
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
        with contextlib.suppress(AllReplicasLost):
            await it.push(version)
            return


@pytest.mark.parametrize(("replicas", "most"), [(1, 2), (2, 2), (1, 0)])
async def test_a_server_that_dies_again_and_again_is_given_up(fakes: list[Fake], replicas: int, most: int) -> None:
    """Without restarts the first death is the last, whose log the run's end has."""
    why = "killed; its log ends with: out of memory"
    async with bed(fakes[:replicas], [], restarts=most) as it:
        await it.push(4)
        it.places[0].why.set_result(why)
        await it.reach(0, Health.GONE)
        assert it.engine.metrics() == {"engine/healthy": replicas - 1, "engine/restarts": most}
        if replicas == 2:
            assert (await it.engine.generate(REQUEST))[0].spans == ((0, 4),)
            return
        with pytest.raises(EngineError, match=f"no Words server is left:\n{'no more ports' if most else why}"):
            await it.engine.generate(REQUEST)


async def test_a_start_that_the_system_refuses_is_one_failed_try(fakes: list[Fake]) -> None:
    """Its log is on a file system that does not answer, or there are no more processes or ports."""
    async with bed(fakes[:1], fakes[2:]) as it:
        await it.push(4)
        it.faults.append(OSError(errno.ESTALE, "Stale file handle", "vllm_0.log"))
        it.places[0].why.set_result("killed")
        assert (await it.engine.generate(REQUEST))[0].spans == ((0, 4),)
        assert it.engine.metrics() == {"engine/healthy": 1, "engine/restarts": 2}


@pytest.mark.parametrize("path", ["/health", "/generate"])
async def test_a_server_that_hangs_is_left(fakes: list[Fake], path: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
        said = "it hangs or was stopped" if path == "/health" else "generated no token in rollout.server.timeout_"
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
    async def describe(self, server: Server) -> ServerInfo:
        await server.get("/version")
        architecture = "Qwen3MoeForCausalLM"
        return ServerInfo(version="1", dtype="float32", architecture=architecture, max_length=1000, problems=())


async def test_a_server_by_address_that_was_away_serves_again_once_refitted(fakes: list[Fake], tmp_path: Path) -> None:
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
    servers = ServerPool(config, Described(), model, tmp_path, read_shape(model))
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
    engine = ServerEngine(
        Words(), [Server(fakes[0].url, token="t", timeout_seconds=60.0)], SECTION, max_length=8, vocab_size=10
    )
    waiting: Awaitable[object] = asyncio.ensure_future(engine.replicas.wait_for_healthy(engine.replicas.healthy))
    await asyncio.sleep(0)
    engine.replicas.fail(RuntimeError("a fault of ours"))
    with pytest.raises(RuntimeError, match="a fault of ours"):
        await waiting


# Servers that do not come up: their error is raised, guards and processes end, ports and places are free again.
PORT = "import sys, time; port = int(sys.argv[sys.argv.index('--port') + 1])\n"
ENDS = "print('its log'); sys.exit(3)"
SILENT = "time.sleep(1000)"
OPEN = """
from http.server import BaseHTTPRequestHandler, HTTPServer

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"dtype": "float32", "architecture": "x", "max_length": 1}')

    do_POST = do_GET

HTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""
FOREIGN = OPEN.replace('{"dtype": "float32", "architecture": "x", "max_length": 1}', '{"openapi": "3.1.0"}')


class Started:
    """Guards that were started, of servers that run ``code`` instead of theirs; ``fails`` starts one that does not."""

    def __init__(self, code: str) -> None:
        self._code, self.guards, self.ports = code, list[GuardProcess](), set[int]()

    async def start(self, order: GuardSpec) -> GuardProcess:
        self.ports.add(int(order.command[order.command.index("--port") + 1]))
        command = (sys.executable, "-c", PORT + self._code, *order.command[1:])
        self.guards.append(await start_guard(replace(order, command=command)))
        return self.guards[-1]

    async def fails(self, order: GuardSpec) -> GuardProcess:
        raise OSError("no such node")


@pytest.mark.parametrize(("gpus", "alone"), [([0, 0, 0], True), ([0, 1, 2], False)])
async def test_servers_of_one_gpu_start_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: list[int], *, alone: bool
) -> None:
    """Each measures the memory that is left for its cache."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    model = make_tiny_model(TinySizes(), tmp_path / "cache", seed=0)
    keys = ("rollout=local", "rollout.server.replicas=3", "train.max_staleness=1")
    config, started, ready = load_config("tiny_cpu", keys), Started(OPEN), list[bool]()

    async def start(order: GuardSpec) -> GuardProcess:
        ready.append(all(map(_listens, started.ports)))
        return await started.start(order)

    sites = [[ServerSite(start=start, server_index=n, num_servers=3, gpus=(gpu,))] for n, gpu in enumerate(gpus)]
    launcher = ServerLauncher(cast("Launcher", None), model, tmp_path, read_shape(model), sites)
    async with asyncio.timeout(300.0):
        engines = launcher._servers(config, EmbeddedAdapter(read_shape(model)))
        async with contextlib.AsyncExitStack() as running:
            servers = await engines._start_all(running, tmp_path)
            assert {one.server.answers for one in servers} == {tmp_path}  # which their nodes see
    assert ready == [True, alone, alone]


async def check_that_the_first_fails(folder: Path, sites: list[list[ServerSite]], why: str, *, resumes: bool) -> None:
    """Of two servers: that ends a first start; in a resume the second serves."""
    config = load_config("tiny_cpu", ("rollout=local", "rollout.server.replicas=2"))
    model = make_tiny_model(TinySizes(), folder / "cache", seed=0)
    shape = read_shape(model)
    launcher = ServerLauncher(cast("Launcher", None), model, folder, shape, sites, resumes=resumes)
    servers = launcher._servers(config, EmbeddedAdapter(shape))
    async with asyncio.timeout(300.0), contextlib.AsyncExitStack() as running:
        with contextlib.nullcontext() if resumes else pytest.raises(EngineError, match=why):
            first, second = await servers._start_all(running, folder)
            assert re.match(why, cast("FailedServer", first).reason)
            assert [guard.process.returncode for guard in cast("StartedServer", second).guards] == [None]


@pytest.mark.parametrize("resumes", [False, True])
async def test_a_server_that_dies_as_it_starts_ends_a_run_but_not_its_resume(tmp_path: Path, *, resumes: bool) -> None:
    sites = [
        [ServerSite(start=Started(each).start, server_index=n, num_servers=2)] for n, each in enumerate((ENDS, OPEN))
    ]
    why = r"(?s)^http.* ended with status 3; .*local_0\.log ends with:\n  its log"
    await check_that_the_first_fails(tmp_path, sites, why, resumes=resumes)


@pytest.mark.parametrize(("resumes", "ends_late"), [(False, False), (True, False), (True, True)])
async def test_a_server_that_dies_while_others_start_is_as_one_that_dies_while_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, resumes: bool, ends_late: bool
) -> None:
    """It was ready, and no supervisor watches it before all are; it may still be ending when the others are ready."""
    lives, ready, start_ready, end = Started(OPEN), asyncio.Event(), ServerPool._start_ready, StartedServer.end
    up, both, ended, known = list[StartedServer](), asyncio.Event(), StartedServer.wait_for_exit, asyncio.Event()
    why = r"(?s)^http.* ended with status -9; .*local_0\.log ends with:"

    async def told(*given: Any) -> Any:
        up.append(await start_ready(*given))
        (ready if len(up) == 1 else both).set()
        return up[-1]

    async def told_end(server: StartedServer) -> str:
        how = await ended(server)
        known.set()
        return how

    async def late_end(server: StartedServer) -> None:
        await both.wait()
        for _ in range(10):  # turns of the loop, in which the second sees who is ready
            await asyncio.sleep(0)
        await end(server)

    async def late(order: GuardSpec) -> GuardProcess:
        await ready.wait()
        (first,) = lives.guards
        first.process.kill()
        await known.wait()  # its guard is gone at once; its own processes are searched for and ended meanwhile
        return await lives.start(order)

    sites = [[ServerSite(start=each, server_index=n, num_servers=2)] for n, each in enumerate((lives.start, late))]
    monkeypatch.setattr(ServerPool, "_start_ready", told)
    monkeypatch.setattr(StartedServer, "wait_for_exit", told_end)
    if ends_late:
        monkeypatch.setattr(StartedServer, "end", late_end)
    await check_that_the_first_fails(tmp_path, sites, why, resumes=resumes)


def _listens(port: int) -> bool:
    with socket.socket() as there:
        return there.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("code", "nodes", "seconds", "why"),
    [
        (ENDS, 1, 600, r"(?s)ended with status 3; .*local_0\.log ends with:\n  its log"),
        (SILENT, 1, 0.1, r"not ready after .*start_seconds=0.1 \(.health answered nothing\); .*ends with:"),
        (OPEN, 1, 600, "answers without the run's token"),
        (FOREIGN, 1, 600, r"answers as no server of .* does \(KeyError\('dtype'\)\); check what runs there"),
        (SILENT, 2, 600, "no such node"),
    ],
    ids=[
        *("it ends", "it is silent", "it is open to strangers", "it is another program"),
        "its second node does not start",
    ],
)
async def test_nothing_is_left_of_a_server_that_is_restarted_and_does_not_come_up(
    tmp_path: Path, code: str, nodes: int, seconds: float, why: str
) -> None:
    model = make_tiny_model(TinySizes(), tmp_path / "cache", seed=0)
    keys = ("rollout=local", "rollout.server.replicas=1", "train.max_staleness=1", "rollout.server.restarts=1")
    config, started = load_config("tiny_cpu", (*keys, f"rollout.server.start_seconds={seconds}")), Started(code)
    sites = [ServerSite(start=start) for start in (started.start, started.fails)[:nodes]]

    async with asyncio.timeout(300.0):
        adapter, section = EmbeddedAdapter(read_shape(model)), config.rollout.server
        servers = ServerPool(config, adapter, model, tmp_path, read_shape(model), [sites])
        died = FailedServer(server=Server("http://127.0.0.1:1", token=None, timeout_seconds=1.0), reason="it died")
        engine = ServerEngine(adapter, [died.server], section, max_length=8, vocab_size=10)
        async with contextlib.AsyncExitStack() as running, servers._supervised(running, tmp_path, engine, [died]):
            with pytest.raises(EngineError, match=why):
                await engine.weights.is_served_anywhere()
            (guard,) = started.guards
            assert guard.process.returncode is not None
            for port in started.ports:
                with socket.socket() as free:
                    free.bind(("127.0.0.1", port + 1))  # of its block, and nobody connected to it
        await engine.close()


async def test_a_server_that_cannot_start_is_named_early(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which takes minutes, and may fail too."""
    ended: list[str] = []

    @contextlib.asynccontextmanager
    async def running(self: object, path: Path) -> AsyncIterator[SimpleNamespace]:
        raise EngineError("its log ends with: unrecognized arguments")
        yield

    class Learners(Launcher):
        @contextlib.asynccontextmanager
        async def start(self, config: RunConfig, tell: object = None) -> AsyncIterator[RunComponents]:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("learners")
            yield cast("RunComponents", None)

    monkeypatch.setattr(ServerPool, "running", running)
    launcher = ServerLauncher(Learners(), tmp_path, tmp_path, tiny_shape(TinySizes()))
    with pytest.raises(EngineError, match="unrecognized arguments"):
        async with asyncio.timeout(60.0), launcher.start(load_config("tiny_cpu", ["rollout=vllm"])):
            pass
    assert ended == ["learners"]


# Servers that somebody else runs: their token rotates, and a resume waits for them. With real HTTP.
@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_WAIT", 0.01)
    monkeypatch.setattr(restarts, "_FIRST_WAIT", 0.01)


def attached(folder: Path, fakes: list[Fake], *keys: str, resumes: bool = False) -> ServerPool:
    model = make_tiny_model(TinySizes(), folder / "cache", seed=0)
    of_server = (f"addresses={','.join(fake.url for fake in fakes)}", *keys)
    config = load_config("tiny_cpu", ["rollout=vllm", *(f"rollout.server.{key}" for key in of_server)])
    return ServerPool(config, Described(), model, folder, read_shape(model), resumes=resumes)


async def pushed(servers: ServerPool, engine: ServerEngine, version: int) -> None:
    """Serve a version, also on servers that come back."""

    async def refit(url: str) -> None:
        if engine.weights.stale(url):
            await engine.weights.load(Path("weights"), version, only=url)
            await engine.weights.commit(version, only=url)

    await push(engine, version)
    servers.refit = refit


@pytest.mark.parametrize(("refusal", "health"), [(401, 401), (403, 403), (403, 200)])
async def test_a_token_that_rotates_ends_no_request(
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
            answering_late = asyncio.create_task(engine.generate(REQUEST))
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
