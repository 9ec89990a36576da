"""A server of the in-process engine in a process of its own, through the adapter, with a push while requests run."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from bench.streaming import Sleeping
from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.errors import EngineError
from rl_megatron.observability.timeline import spans as spans_of_timeline
from rl_megatron.rollout.local.engine import LocalEngine
from rl_megatron.rollout.servers import attempts
from rl_megatron.rollout.servers.embedded.adapter import EmbeddedAdapter
from rl_megatron.rollout.servers.engine import ServedEngine
from rl_megatron.rollout.servers.engine_token import VARIABLE, authorization
from rl_megatron.rollout.servers.gauges import GaugesInTurn
from rl_megatron.rollout.servers.http import Server
from rl_megatron.types import Completion, GenerationRequest
from rl_megatron.weights.checks.compare import ReportReader
from rl_megatron.weights.checks.reports import Report
from rl_megatron.weights.layouts.families import hf_layout, read_shape
from rl_megatron.weights.servers.mirror import Mirror
from tests.unit.rollout.test_local_engine import request
from tests.unit.rollout.test_running import expected, load, newer

__all__ = ["newer"]
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
        arguments = [sys.executable, "-m", "rl_megatron.rollout.servers.embedded.server", *options.split()]
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
    assert (described.version, described.dtype, described.max_length) == (adapter.tested, "float32", 128)
    assert described.architecture == "Qwen3MoeForCausalLM"


async def scores(adapter: EmbeddedAdapter, server: Server, theirs: Qwen3MoeForCausalLM) -> None:
    """As transformers does."""
    scored = await adapter.score(server, [3, 1, 4, 1, 5])
    logprobs = theirs(torch.tensor([[3, 1, 4, 1, 5]])).logits[0].detach().log_softmax(-1)
    np.testing.assert_allclose(scored, logprobs[range(4), [1, 4, 1, 5]], rtol=0, atol=1e-4)


async def interrupted(engine: ServedEngine, asked: Sequence[GenerationRequest]) -> dict[str, Completion]:
    """What is known then of requests of one completion that have a token, by their ids."""
    await engine.interrupt()
    known = {one.id: got for one in asked if (got := engine.so_far(one.id)) is not None}
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
    adapter: EmbeddedAdapter, engine: ServedEngine, running: Sequence[asyncio.Future[Sequence[Completion]]]
) -> None:
    """Nine completions are in six slots, until each has some tokens, and the timeline says so."""
    (server,) = engine.servers
    spans_of_timeline.taken()
    said: list[object] = []
    processes = set()
    async with GaugesInTurn(adapter, engine.replicas, 0.005).asked():
        while await adapter.tokens(server) < 60 or ("requests", {"running": 6, "waiting": 3}) not in said:
            assert not all(one.done() for one in running)
            kept = [span for span in spans_of_timeline.taken()[0] if not span[0].thread]
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
    engine = ServedEngine(adapter, [server], ServerSection(), max_length=128, vocab_size=41)
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
            wanted = expected({1: theirs, 2: newer}, one, got, keep=False)
            np.testing.assert_allclose(got.logprobs, wanted, rtol=0, atol=1e-4)
            begins(got, known.get(one.id))
    assert (1, 2) in spans


def mirror_of(model_folder: Path, tmp_path: Path) -> Mirror:
    """An empty mirror file for the model."""
    shape, path = read_shape(model_folder), tmp_path / "mirror" / "model.safetensors"
    Mirror.make(path, hf_layout(shape).local_shapes(0), torch.float32, model_folder / "config.json")
    return Mirror(path, hf_layout(shape).local_shapes(0), torch.float32)


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
    asked = [replace(request(f"p{n}", (n, 7, n), 1, seed=n, max_new_tokens=100), group="g") for n in range(6)]
    adapter = EmbeddedAdapter(read_shape(model_folder))
    servers = [Server(url, token=TOKEN, timeout_seconds=60) for url in urls]
    engine = ServedEngine(adapter, servers, ServerSection(), max_length=128, vocab_size=41)
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
            await engine.generate(replace(request("short", (1, 2), 1, max_new_tokens=2), group="h"))
            while servers[1].in_flight != 2:
                await asyncio.sleep(0.01)
            assert servers[0].in_flight == 4
            await adapter.resume(servers[0])
            answers = await asyncio.gather(*running)
    finally:
        await engine.close()
    for one, (got,) in zip(asked, answers, strict=True):
        assert (len(got.token_ids), got.finish_reason, got.spans) == (100, "length", ((0, 5),))
        np.testing.assert_allclose(got.logprobs, expected({5: theirs}, one, got, keep=False), rtol=0, atol=1e-4)


async def test_the_bench_of_streaming_serves_reports_of_this_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "a token")
    application, reader = Sleeping("equal").application(), ReportReader()

    for _ in range(2):  # the second names no boxes
        transport = httpx2.ASGITransport(app=application)
        async with httpx2.AsyncClient(transport=transport, base_url="http://bench") as client:
            body = {"version": 1, "known": list(reader.known)}
            said = await client.post("/load", json=body, headers=authorization("a token"))
        assert reader.read(said.content) == Report(rows=[], seconds=0.0, read=[])
