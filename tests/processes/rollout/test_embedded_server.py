"""A server of the in-process engine in a process of its own, requests that come all at once, and answers of loaders."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
import numpy as np
import psutil
import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from bench.streaming import Sleeping
from launcher.servers.engines import SERVERS
from launcher.servers.pool import ServerPool
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.engines import requests as attempts
from rl_megatron.engines.engine import GaugePoller, ServerEngine
from rl_megatron.engines.engine_token import VARIABLE, authorization
from rl_megatron.engines.http import Server
from rl_megatron.engines.local.adapter import EmbeddedAdapter
from rl_megatron.engines.local.engine import LocalEngine
from rl_megatron.engines.sglang.adapter import SGLangAdapter
from rl_megatron.errors import CorruptionError, EngineError
from rl_megatron.models.named import NAMED
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.observability import timeline
from rl_megatron.types import Completion, GenerationRequest
from rl_megatron.weights.boxes import whole_box
from rl_megatron.weights.checks.compare import ReportReader
from rl_megatron.weights.checks.reports import ChecksumReport
from rl_megatron.weights.layouts.families import hf_layout, read_shape
from rl_megatron.weights.routes.mirror import Mirror
from tests.completions import completion
from tests.processes.launcher.test_supervisor import Described
from tests.unit.rollout.test_engine_servers import REQUEST, SECTION, Fake, Words, engine_of, fakes, push
from tests.unit.rollout.test_local_engine import expected_by_version, load, newer, request

__all__ = ["fakes", "newer"]
TOKEN = "of-this-test"
LATE = replace(request("late", (3, 1), 2, seed=9, max_new_tokens=100), max_seconds=0.05)


@pytest.fixture(scope="module")
def model_folder(theirs: Qwen3MoeForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def urls(model_folder: Path) -> Iterator[list[str]]:
    """Of two servers."""
    ports, processes = [], []
    for _ in range(2):
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            ports.append(held.getsockname()[1])
        options = (
            f"--model {model_folder} --host 127.0.0.1 --port {ports[-1]} --dtype float32 --max-length 128 --slots 6"
        )
        arguments = [sys.executable, "-m", "rl_megatron.engines.local.server", *options.split()]
        processes.append(subprocess.Popen(arguments, env={**os.environ, VARIABLE: TOKEN}))
    found = [f"http://127.0.0.1:{port}" for port in ports]
    try:
        for url, process in zip(found, processes, strict=True):
            wait_for(url, process)
        yield found
    finally:
        for process in processes:
            process.terminate()
        assert {process.wait(30) for process in processes} <= {0, -15}


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + 600
    while time.monotonic() < ends and process.poll() is None:
        try:
            assert httpx2.get(f"{url}/health").status_code == 401  # it asks for the token, on every path
            return
        except httpx2.TransportError:
            continue
    raise AssertionError(f"the server is not ready: {process.poll()}")


async def describes_itself(adapter: EmbeddedAdapter, server: Server) -> None:
    described = await adapter.describe(server)
    assert (described.version, described.dtype, described.max_length) == (adapter.tested_version, "float32", 128)
    assert described.architecture == "Qwen3MoeForCausalLM"


async def scores(adapter: EmbeddedAdapter, server: Server, theirs: Qwen3MoeForCausalLM) -> None:
    """As transformers does."""
    scored = await adapter.score(server, [3, 1, 4, 1, 5])
    logprobs = theirs(torch.tensor([[3, 1, 4, 1, 5]])).logits[0].detach().log_softmax(-1)
    np.testing.assert_allclose(scored, logprobs[range(4), [1, 4, 1, 5]], rtol=0, atol=1e-4)


async def interrupted(engine: ServerEngine, asked: Sequence[GenerationRequest]) -> dict[str, Completion]:
    """What is known then of requests of one completion that have a token, by their ids."""
    await engine.collect_partials()
    known = {one.id: got for one in asked if (got := engine.partial_completion(one.id)) is not None}
    assert known
    assert known.keys() <= {one.id for one in asked if one.num_completions == 1}
    return known


def begins(whole: Completion, known: Completion | None) -> None:
    """What was known before the push is the beginning of what was answered."""
    if known is None:
        return
    made = len(known.token_ids)
    assert 0 < made <= len(whole.token_ids)
    assert known.token_ids.tolist() == whole.token_ids[:made].tolist()
    assert known.spans == ((0, 1),)


async def says_how_busy_it_is(
    adapter: EmbeddedAdapter, engine: ServerEngine, running: Sequence[asyncio.Future[Sequence[Completion]]]
) -> None:
    """Nine completions are in six slots, until each has some tokens, and the timeline says so."""
    (server,) = engine.servers
    timeline.taken()
    said: list[object] = []
    processes = set()
    async with GaugePoller(adapter, engine.replicas, 0.005).polling():
        while await adapter.tokens(server) < 60 or ("requests", {"running": 6, "waiting": 3}) not in said:
            assert not all(one.done() for one in running)
            kept = [span for span in timeline.taken()[0] if not span[0].thread]
            said += [(name, values) for _, name, _, _, values in kept]
            processes |= {lane.process for lane, *_ in kept}
    gauges = await adapter.gauges(server)
    assert (gauges.running, gauges.waiting) == (6, 3)
    assert processes == {"replica 0"}


async def test_a_push_while_requests_run_labels_every_token_with_the_weights_that_made_it(
    urls: list[str],
    model_folder: Path,
    theirs: Qwen3MoeForCausalLM,
    newer: Qwen3MoeForCausalLM,
    make_engine: Callable[[int], LocalEngine],
    tmp_path: Path,
) -> None:
    weights, mirror = make_engine(1), mirror_of(model_folder, tmp_path)
    shape, path = read_shape(model_folder), mirror.path
    asked = [request(f"p{n}", (n, 7, n), 1 + n % 2, seed=n, max_new_tokens=100) for n in range(6)]

    def write(model: Qwen3MoeForCausalLM, version: int) -> list[int]:
        load(weights, model, version)
        mirror.withdraw()
        for name, tensor in mirror.tensors.items():
            tensor.copy_(weights.tensors[name])
        mirror.serve(version)
        return [row[-1] for row in mirror.sums().rows]

    async def push(model: Qwen3MoeForCausalLM, version: int) -> None:
        sums = write(model, version)
        ((report,),) = (await engine.weights.load(path, version)).values()
        assert sorted(row[-1] for row in report.rows) == sorted(sums)
        await engine.weights.commit(version)

    adapter = EmbeddedAdapter(shape)
    server = Server(urls[0], token=TOKEN, timeout_seconds=60)
    await describes_itself(adapter, server)
    engine = ServerEngine(adapter, [server], ServerSection(), max_length=128, vocab_size=41)
    assert await engine.tokenized("a", add_special_tokens=True) is None  # its description names no paths
    try:
        await push(theirs, 1)
        await scores(adapter, server, theirs)
        with pytest.raises(EngineError, match="max_new_tokens=0"):
            await adapter.generate(server, request("none", (1,), 1, max_new_tokens=0), "none")
        running = [asyncio.ensure_future(engine.generate(one)) for one in asked]
        await says_how_busy_it_is(adapter, engine, running)
        running.append(asyncio.ensure_future(engine.generate(LATE)))
        known = await interrupted(engine, asked)
        await push(newer, 2)
        *answers, late = await asyncio.gather(*running)
    finally:
        await engine.close()
    assert all(got.finish_reason == "length" and 0 < len(got.token_ids) <= 100 for got in late)  # as fast as it got
    spans = set()
    assert {len(got.token_ids) for answer in answers for got in answer} == {100}
    for one, answer in zip([*asked, LATE], [*answers, late], strict=True):
        for got in answer:
            spans.add(tuple(span.version for span in got.spans))
            wanted = expected_by_version({1: theirs, 2: newer}, one, got, keep=False)
            np.testing.assert_allclose(got.logprobs, wanted, rtol=0, atol=1e-4)
            begins(got, known.get(one.id))
    assert (1, 2) in spans


def mirror_of(model_folder: Path, tmp_path: Path) -> Mirror:
    """An empty mirror file for the model."""
    shape, path = read_shape(model_folder), tmp_path / "mirror" / "model.safetensors"
    Mirror.make(path, hf_layout(shape).local_shapes(0), torch.float32, model_folder / "config.json")
    return Mirror(path, hf_layout(shape).local_shapes(0), torch.float32)


def test_silent_connections_leave_a_server_files_for_others(urls: list[str]) -> None:
    address = urlsplit(urls[1]).hostname, urlsplit(urls[1]).port
    alive = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
    (server,) = [one for one in alive if str(address[1]) in one.cmdline()]
    before = server.rlimit(psutil.RLIMIT_NOFILE)
    server.rlimit(psutil.RLIMIT_NOFILE, (server.num_fds() + 60, before[1]))
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(socket.create_connection(address, 30))
            assert httpx2.get(f"{urls[1]}/health", timeout=20).status_code == 401
    finally:
        server.rlimit(psutil.RLIMIT_NOFILE, before)


async def test_completions_move_to_a_server_that_joins_with_every_token(
    urls: list[str],
    model_folder: Path,
    theirs: Qwen3MoeForCausalLM,
    make_engine: Callable[[int], LocalEngine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first server is paused meanwhile, so that its rows are still there."""
    monkeypatch.setattr(attempts, "_MOVE_SECONDS", 0.01)
    weights, mirror = make_engine(1), mirror_of(model_folder, tmp_path)
    load(weights, theirs, 5)
    for name, tensor in mirror.tensors.items():
        tensor.copy_(weights.tensors[name])
    mirror.serve(5)
    asked = [replace(request(f"p{n}", (n, 7, n), 1, seed=n, max_new_tokens=100), prefix_group="g") for n in range(6)]
    adapter = EmbeddedAdapter(read_shape(model_folder))
    servers = [Server(url, token=TOKEN, timeout_seconds=60) for url in urls]
    engine = ServerEngine(adapter, servers, ServerSection(), max_length=128, vocab_size=41)
    try:
        async with asyncio.timeout(60):
            await engine.weights.load(mirror.path, 5, only=urls[0])
            await engine.weights.commit(5)
            made = await adapter.tokens(servers[0])
            running = [asyncio.ensure_future(engine.generate(one)) for one in asked]
            while await adapter.tokens(servers[0]) < made + 60:
                assert not any(one.done() for one in running)
            await adapter.pause(servers[0], "recompute")
            await engine.weights.load(mirror.path, 5, only=urls[1])
            await engine.weights.commit(5, only=urls[1])
            await engine.generate(replace(request("short", (1, 2), 1, max_new_tokens=2), prefix_group="h"))
            while servers[1].in_flight != 2:
                await asyncio.sleep(0.01)
            assert servers[0].in_flight == 4
            await adapter.resume(servers[0])
            answers = await asyncio.gather(*running)
    finally:
        await engine.close()
    for one, (got,) in zip(asked, answers, strict=True):
        assert (len(got.token_ids), got.finish_reason, got.spans) == (100, "length", ((0, 5),))
        np.testing.assert_allclose(
            got.logprobs, expected_by_version({5: theirs}, one, got, keep=False), rtol=0, atol=1e-4
        )


async def test_the_bench_of_streaming_serves_reports_of_this_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "a token")
    application, reader = Sleeping("equal").application(), ReportReader()

    for _ in range(2):  # the second names no boxes
        transport = httpx2.ASGITransport(app=application)
        async with httpx2.AsyncClient(transport=transport, base_url="http://bench") as client:
            body = {"version": 1, "known": list(reader.known)}
            said = await client.post("/load", json=body, headers=authorization("a token"))
        assert reader.read(said.content) == ChecksumReport(rows=[], seconds=0.0, read=[])


# Requests that come at once: as those of a push do, and as many as may be in flight, or more.
MOE = NAMED["qwen3-235b-a22b"]


async def test_requests_that_come_at_once_leave_the_loop_to_others(fakes: list[Fake]) -> None:
    """What another task waits for takes some passes of the loop, not the sending of all of them."""
    engine = engine_of(fakes, max_concurrent_groups=64)
    await push(engine, 1)
    asked = [asyncio.create_task(engine.generate(replace(REQUEST, id=f"{n}"))) for n in range(64)]
    for _ in range(24):
        await asyncio.sleep(0)
    early = sum(server.in_flight for server in engine.servers)
    await asyncio.gather(*asked)
    assert 1 <= early <= 4
    assert sum(fake.asked.count("/generate") for fake in fakes) == 64


class Aborted(Words):
    """Its server answers a request once it is aborted, and then to its end. ``sent``: in which passes of the loop each
    was, by its id, and each abort."""

    def __init__(self) -> None:
        self.now, self.sent, self.aborts = 0, list[tuple[int, str]](), dict[str, asyncio.Event]()

    async def generate(self, server: Server, request: GenerationRequest, request_id: str) -> list[Completion]:
        self.sent.append((self.now, request.id))
        again = request.id in self.aborts
        if not again:
            await self.aborts.setdefault(request.id, asyncio.Event()).wait()
        return [completion([7], finish="stop" if again else "abort", spans=((0, 1),))]

    async def abort(self, server: Server, request: GenerationRequest, request_id: str) -> None:
        self.sent.append((self.now, f"abort {request.id}"))
        self.aborts[request.id].set()

    async def count(self) -> None:
        while True:
            self.now += 1
            await asyncio.sleep(0)


async def test_what_a_push_held_and_a_checkpoint_aborts_is_sent_one_after_another(fakes: list[Fake]) -> None:
    """Some passes of the loop apart: the requests, the aborts and then the rests, each once."""
    adapter, names = Aborted(), [f"{n}" for n in range(64)]
    servers = [Server(fake.url, token="t", timeout_seconds=60.0) for fake in fakes]
    section = SECTION.model_copy(update={"max_concurrent_groups": 64})
    engine = ServerEngine(adapter, servers, section, max_length=8, vocab_size=10)
    await engine.weights.load(Path("weights"), 1)
    asked = [asyncio.create_task(engine.generate(replace(REQUEST, id=name))) for name in names]
    await every_chance()
    assert not adapter.sent
    counting = asyncio.create_task(adapter.count())
    await engine.weights.commit(1)
    while len(adapter.sent) < len(names):
        await asyncio.sleep(0)
    await engine.collect_partials()
    tokens = [len(completion.token_ids) for (completion,) in await asyncio.gather(*asked)]
    counting.cancel()
    await engine.close()
    assert tokens == [2] * 64
    assert sorted(name for _, name in adapter.sent) == sorted([*names, *names, *(f"abort {name}" for name in names)])
    passes = [passed for passed, _ in adapter.sent]
    assert min(after - before for before, after in pairwise(passes)) >= 4


class Listed(Aborted):
    """Its server aborts several at once. ``lists``: those of each abort, by their ids, with its server."""

    def __init__(self) -> None:
        super().__init__()
        self.lists = list[tuple[str, list[str]]]()

    async def abort_all(
        self, server: Server, requests: Mapping[str, GenerationRequest], turn: Callable[[], Awaitable[None]]
    ) -> None:
        self.lists.append((server.url, [one.id for one in requests.values()]))
        for name, one in requests.items():
            await self.abort(server, one, name)


@pytest.mark.parametrize("end", ["interrupt", "cancel"])
async def test_servers_are_told_once_what_they_are_to_abort(fakes: list[Fake], end: str) -> None:
    """By name: what others ask of them goes on, as does a group of this run that is not interrupted."""
    adapter, names = Listed(), [f"{n}" for n in range(64)]
    servers = [Server(fake.url, token="t", timeout_seconds=60.0) for fake in fakes]
    section = SECTION.model_copy(update={"max_concurrent_groups": 64})
    engine = ServerEngine(adapter, servers, section, max_length=8, vocab_size=10)
    await push(engine, 1)
    group = asyncio.create_task(engine.generate(replace(REQUEST, id="group", num_completions=2, skips_queue=True)))
    asked = [asyncio.create_task(engine.generate(replace(REQUEST, id=name))) for name in names]
    while len(adapter.sent) < 1 + len(names):
        await asyncio.sleep(0)
    await engine.collect_partials() if end == "interrupt" else [one.cancel() for one in asked]
    await asyncio.gather(*asked, return_exceptions=True)
    await every_chance()
    goes_on = not group.done()
    group.cancel()
    await asyncio.gather(group, return_exceptions=True)
    await engine.close()
    assert goes_on
    assert sorted(server for server, _ in adapter.lists[:2]) == sorted(fake.url for fake in fakes)
    assert sorted(name for _, listed in adapter.lists[:2] for name in listed) == sorted(names)
    assert [listed for _, listed in adapter.lists[2:]] == [["group"]]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_engines_abort_several_requests_by_one_message(fakes: list[Fake], engine: str) -> None:
    """Each by its names: vLLM's has a prefix, and SGLang's has one for each completion."""
    requests = {"a": REQUEST, "b": replace(REQUEST, num_completions=2)}
    told: list[tuple[str, Any]] = []

    def answer(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        told.append((path, body))
        return 200, None

    async def turn() -> None:
        raise AssertionError("it takes turns for one message")

    fakes[0].answer = answer
    server, adapter = Server(fakes[0].url, token="t", timeout_seconds=60.0), SERVERS[engine](MOE)
    await adapter.abort_all(server, requests, turn)
    await adapter.abort(server, requests["b"], "b")
    await server.close()
    assert (
        told
        == {
            "vllm": [
                ("/abort_requests", {"request_ids": ["generate-tokens-a", "generate-tokens-b"]}),
                ("/abort_requests", {"request_ids": ["generate-tokens-b"]}),
            ],
            "sglang": [
                ("/rl_megatron_abort", {"names": ["a 0", "b 0", "b 1"]}),
                ("/rl_megatron_abort", {"names": ["b 0", "b 1"]}),
            ],
        }[engine]
    )


class Held(Described):
    """Its server answers no request before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.in_flight, self.may = list[str](), asyncio.Event()

    async def generate(self, server: Server, request: GenerationRequest, request_id: str) -> list[Completion]:
        self.in_flight += [request.id] * request.num_completions
        await self.may.wait()
        return [completion([7], finish="stop", spans=((0, 1),))] * request.num_completions


@contextlib.asynccontextmanager
async def two_groups_of_four(fake: Fake, folder: Path, *keys: str) -> AsyncIterator[tuple[Held, ServerEngine]]:
    """A run's servers, of which so much may be in flight."""
    model = make_tiny_model(TinySizes(), folder / "cache", seed=0)
    limits = ["rollout.server.max_concurrent_groups=2", "rollout.group_size=4"]
    config = load_config("tiny_cpu", ["rollout=vllm", f"rollout.server.addresses={fake.url}", *limits, *keys])
    servers = ServerPool(config, held := Held(), model, folder, read_shape(model))
    async with servers.running(folder / "mirror" / "model.safetensors") as engine:
        await push(engine, 1)
        yield held, engine


def asked(engine: ServerEngine, sizes: dict[str, int], *, ahead: bool) -> dict[str, asyncio.Task[object]]:
    """Requests by name, for so many completions each."""
    requests = [replace(REQUEST, id=name, num_completions=count, skips_queue=ahead) for name, count in sizes.items()]
    return {one.id: asyncio.create_task(engine.generate(one)) for one in requests}


async def every_chance() -> None:
    for _ in range(1000):
        await asyncio.sleep(0)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("staleness", [0, 1])
async def test_turns_of_as_many_trajectories_are_in_flight_as_completions_of_groups(
    fakes: list[Fake], tmp_path: Path, staleness: int, ahead: bool
) -> None:
    of = ["environment.function=calculator", "environment.template=plain", "environment.max_tokens=64"]
    keys = [*of, f"train.max_staleness={staleness}"]
    async with two_groups_of_four(fakes[0], tmp_path, *keys) as (held, engine):
        turns = asked(engine, {f"turn {n}": 1 for n in range(20)}, ahead=ahead)
        await every_chance()
        assert held.in_flight == [f"turn {n}" for n in range(8)]
        held.may.set()
        await asyncio.gather(*turns.values())


async def test_so_many_problems_are_in_flight_also_with_more_samples_a_group(fakes: list[Fake], tmp_path: Path) -> None:
    samples = ["eval.sets.one.samples=6", "eval.sets.one.temperature=1"]
    async with two_groups_of_four(fakes[0], tmp_path, *samples) as (held, engine):
        problems = asked(engine, {"a": 6, "b": 6, "c": 6}, ahead=True)
        await every_chance()
        assert held.in_flight == [*"aaaaaabbbbbb"]
        held.may.set()
        await asyncio.gather(*problems.values())


async def test_groups_and_turns_wait_for_one_another_in_their_order(fakes: list[Fake], tmp_path: Path) -> None:
    sizes = {"a": 4, "b": 1, "c": 4, "d": 1, "e": 1, "samples of an evaluation": 100}

    async with asyncio.timeout(60), two_groups_of_four(fakes[0], tmp_path) as (held, engine):
        tasks = asked(engine, sizes, ahead=False)
        await every_chance()
        assert held.in_flight == [*"aaaab"]
        tasks["c"].cancel()  # it had a part of its places
        await every_chance()
        assert held.in_flight == [*"aaaabde"]
        held.may.set()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert held.in_flight == [*"aaaabde", *["samples of an evaluation"] * 100]


# Answers of SGLang's loaders on another node, which sees the controller's files but not its memory.
T = TypeVar("T")

OTHER_NODE = """
import base64, json, pickle, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
import torch

for name in ("sglang", "sglang.srt", "sglang.srt.runtime_context"):
    sys.modules[name] = SimpleNamespace(get_parallel=lambda: SimpleNamespace(tp_rank=rank))
from rl_megatron.engines.sglang import worker
from rl_megatron.weights.routes.mirror import Mirror

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)

    def load_weights(self, tensors):
        for _, tensor in tensors:
            self.w.copy_(tensor)

class SGLang(BaseHTTPRequestHandler):
    def do_GET(self):
        self.say({"tp_size": len(models)})

    def do_POST(self):
        global rank
        said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/update_weights_from_tensor":
            for rank, (model, order) in enumerate(zip(models, said["serialized_named_tensors"])):
                worker.load(model, pickle.loads(base64.b64decode(order)))
        self.say({"success": True})

    def say(self, answer):
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *given):
        pass

models, path = [Model(), Model()], Path(sys.argv[1])
if len(sys.argv) > 2:
    Mirror.make(path, {"w": (4, 4)}, torch.float32, Path(sys.argv[2]))
server = HTTPServer(("127.0.0.1", 0), SGLang)
print(server.server_port, flush=True)
server.serve_forever()
"""
APART = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"')
ADAPTER = SGLangAdapter(replace(NAMED["qwen3-30b-a3b"], vocab_size=10))


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """One in the controller's memory, at the path of that in the other node's."""
    (tmp_path / "config.json").write_text('{"model_type": "made-up"}')
    (tmp_path / "memory").mkdir()
    path = tmp_path / "memory" / "run" / "model.safetensors"
    Mirror.make(path, {"w": (4, 4)}, torch.float32, tmp_path / "config.json")
    return path


@pytest.fixture
def other_node(mirror: Path, tmp_path: Path) -> Iterator[str]:
    """The URL of a server of two ranks, for which the folder ``memory`` is another than this process's."""
    memory = str(mirror.parents[1])
    if subprocess.run([*APART, memory, "true"], capture_output=True, check=False).returncode:
        pytest.skip("NO TEST OF ANOTHER NODE: a user may make no namespaces here")
    command = (*APART, memory, sys.executable, "-c", OTHER_NODE, str(mirror), str(tmp_path / "config.json"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


def loaded_by(url: str, answers: Path | None, ask: Callable[[Server], Coroutine[None, None, T]]) -> T:
    async def run() -> T:
        server = Server(url, token=None, timeout_seconds=60.0, answers=answers)
        try:
            return await ask(server)
        finally:
            await server.close()

    return asyncio.run(run())


def test_they_come_in_a_folder_of_both_nodes_and_leave_nothing(other_node: str, mirror: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    said = loaded_by(other_node, shared, lambda server: ADAPTER.boxes(server, mirror))
    assert said == 2 * [{"w": whole_box((4, 4))}]
    assert list(shared.iterdir()) == []


def test_one_that_is_missing_is_an_error_with_what_to_do(other_node: str, mirror: Path) -> None:
    with pytest.raises(EngineError, match=r"answer is not here: .*/memory/run/held-.*\.0; .*set weights\.folder to"):
        loaded_by(other_node, None, lambda server: ADAPTER.boxes(server, mirror))


def test_a_server_that_lacks_a_folder_lives(other_node: str, mirror: Path, tmp_path: Path) -> None:
    """Of answers, or of weights: the user's server goes on."""
    lacked = tmp_path / "memory" / "lacked"
    lacked.mkdir()
    with pytest.raises(EngineError, match="answer is not here"):
        loaded_by(other_node, lacked, lambda server: ADAPTER.boxes(server, mirror))
    with pytest.raises(CorruptionError, match=r"rank 0: .*lacked/model\.safetensors"):
        loaded_by(other_node, tmp_path, lambda server: ADAPTER.boxes(server, lacked / "model.safetensors"))
    assert loaded_by(other_node, tmp_path, lambda server: ADAPTER.boxes(server, mirror))
