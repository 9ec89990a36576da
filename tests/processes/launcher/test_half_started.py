"""Servers that do not come up: their error is raised, guards and processes end, ports and places are free again."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launcher.processes.guards import GuardProcess, Order, start_guard
from launcher.servers.pool import ServedEngines, ServedLauncher
from launcher.servers.site import Site
from launcher.servers.supervisor import Failed
from launcher.servers.supervisor import Started as Server
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import EngineError
from rl_megatron.interfaces import Launcher, Roles
from rl_megatron.models.tiny import TinySizes, make_tiny_model, tiny_shape
from rl_megatron.rollout.servers.embedded.adapter import EmbeddedAdapter
from rl_megatron.rollout.servers.engine import ServedEngine
from rl_megatron.rollout.servers.http import Server as HttpServer
from rl_megatron.weights.layouts.families import read_shape

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

    async def start(self, order: Order) -> GuardProcess:
        self.ports.add(int(order.command[order.command.index("--port") + 1]))
        command = (sys.executable, "-c", PORT + self._code, *order.command[1:])
        self.guards.append(await start_guard(replace(order, command=command)))
        return self.guards[-1]

    async def fails(self, order: Order) -> GuardProcess:
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

    async def start(order: Order) -> GuardProcess:
        ready.append(all(map(_listens, started.ports)))
        return await started.start(order)

    sites = [[Site(start=start, number=n, count=3, gpus=(gpu,))] for n, gpu in enumerate(gpus)]
    launcher = ServedLauncher(cast("Launcher", None), model, tmp_path, read_shape(model), sites)
    async with asyncio.timeout(300.0):
        engines = launcher._servers(config, EmbeddedAdapter(read_shape(model)))
        async with contextlib.AsyncExitStack() as running:
            servers = await engines._start_all(running, tmp_path)
            assert {one.server.answers for one in servers} == {tmp_path}  # which their nodes see
    assert ready == [True, alone, alone]


async def check_that_the_first_fails(folder: Path, sites: list[list[Site]], why: str, *, resumes: bool) -> None:
    """Of two servers: that ends a first start; in a resume the second serves."""
    config = load_config("tiny_cpu", ("rollout=local", "rollout.server.replicas=2"))
    model = make_tiny_model(TinySizes(), folder / "cache", seed=0)
    shape = read_shape(model)
    launcher = ServedLauncher(cast("Launcher", None), model, folder, shape, sites, resumes=resumes)
    servers = launcher._servers(config, EmbeddedAdapter(shape))
    async with asyncio.timeout(300.0), contextlib.AsyncExitStack() as running:
        with contextlib.nullcontext() if resumes else pytest.raises(EngineError, match=why):
            first, second = await servers._start_all(running, folder)
            assert re.match(why, cast("Failed", first).why)
            assert [guard.process.returncode for guard in cast("Server", second).guards] == [None]


@pytest.mark.parametrize("resumes", [False, True])
async def test_a_server_that_dies_while_it_starts_ends_a_run_and_is_left_to_its_supervisor_in_a_resume(
    tmp_path: Path, *, resumes: bool
) -> None:
    sites = [[Site(start=Started(each).start, number=n, count=2)] for n, each in enumerate((ENDS, OPEN))]
    why = r"(?s)^http.* ended with status 3; .*local_0\.log ends with:\n  its log"
    await check_that_the_first_fails(tmp_path, sites, why, resumes=resumes)


@pytest.mark.parametrize(("resumes", "ends_late"), [(False, False), (True, False), (True, True)])
async def test_a_server_that_dies_while_others_start_is_as_one_that_dies_while_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, resumes: bool, ends_late: bool
) -> None:
    """It was ready, and no supervisor watches it before all are; it may still be ending when the others are ready."""
    lives, ready, start_ready, end = Started(OPEN), asyncio.Event(), ServedEngines._start_ready, Server.end
    up, both = list[Server](), asyncio.Event()
    why = r"(?s)^http.* ended with status -9; .*local_0\.log ends with:"

    async def told(*given: Any) -> Any:
        up.append(await start_ready(*given))
        (ready if len(up) == 1 else both).set()
        return up[-1]

    async def late_end(server: Server) -> None:
        await both.wait()
        for _ in range(10):  # turns of the loop, in which the second sees who is ready
            await asyncio.sleep(0)
        await end(server)

    async def late(order: Order) -> GuardProcess:
        await ready.wait()
        (first,) = lives.guards
        first.process.kill()
        await first.wait()
        return await lives.start(order)

    sites = [[Site(start=each, number=n, count=2)] for n, each in enumerate((lives.start, late))]
    monkeypatch.setattr(ServedEngines, "_start_ready", told)
    if ends_late:
        monkeypatch.setattr(Server, "end", late_end)
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
        "it ends",
        "it is silent",
        "it is open to strangers",
        "it is another program",
        "its second node does not start",
    ],
)
async def test_nothing_is_left_of_a_server_that_is_restarted_and_does_not_come_up(
    tmp_path: Path, code: str, nodes: int, seconds: float, why: str
) -> None:
    model = make_tiny_model(TinySizes(), tmp_path / "cache", seed=0)
    keys = ("rollout=local", "rollout.server.replicas=1", "train.max_staleness=1", "rollout.server.restarts=1")
    config, started = load_config("tiny_cpu", (*keys, f"rollout.server.start_seconds={seconds}")), Started(code)
    sites = [Site(start=start) for start in (started.start, started.fails)[:nodes]]

    async with asyncio.timeout(300.0):
        adapter, section = EmbeddedAdapter(read_shape(model)), config.rollout.server
        servers = ServedEngines(config, adapter, model, tmp_path, read_shape(model), [sites])
        died = Failed(server=HttpServer("http://127.0.0.1:1", token=None, timeout_seconds=1.0), why="it died")
        engine = ServedEngine(adapter, [died.server], section, max_length=8, vocab_size=10)
        async with contextlib.AsyncExitStack() as running, servers._kept(running, tmp_path, engine, [died]):
            with pytest.raises(EngineError, match=why):
                await engine.weights.served_somewhere()
            (guard,) = started.guards
            assert guard.process.returncode is not None
            for port in started.ports:
                with socket.socket() as free:
                    free.bind(("127.0.0.1", port + 1))  # of its block, and nobody connected to it
        await engine.close()


async def test_a_server_that_cannot_start_is_named_while_learners_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which takes minutes, and may fail too."""
    ended: list[str] = []

    @contextlib.asynccontextmanager
    async def running(self: object, path: Path) -> AsyncIterator[SimpleNamespace]:
        raise EngineError("its log ends with: unrecognized arguments")
        yield

    class Learners(Launcher):
        @contextlib.asynccontextmanager
        async def start(self, config: RunConfig, tell: object = None) -> AsyncIterator[Roles]:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("learners")
            yield cast("Roles", None)

    monkeypatch.setattr(ServedEngines, "running", running)
    launcher = ServedLauncher(Learners(), tmp_path, tmp_path, tiny_shape(TinySizes()))
    with pytest.raises(EngineError, match="unrecognized arguments"):
        async with asyncio.timeout(60.0), launcher.start(load_config("tiny_cpu", ["rollout=vllm"])):
            pass
    assert ended == ["learners"]
