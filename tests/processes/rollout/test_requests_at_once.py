"""Requests that come at once: as those of a push do, and as many as may be in flight, or more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from launcher.servers.engines import SERVERS
from launcher.servers.pool import ServedEngines
from rl_megatron.config.io import load_config
from rl_megatron.models.named import NAMED
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.rollout.servers.engine import ServedEngine
from rl_megatron.rollout.servers.http import Server
from rl_megatron.types import Completion, GenerationRequest
from rl_megatron.weights.layouts.families import read_shape
from tests.completions import completion
from tests.processes.launcher.test_supervisor import Described
from tests.unit.rollout.test_engine_servers import REQUEST, SECTION, Fake, Words, engine_of, fakes, push

__all__ = ["fakes"]

MOE = NAMED["qwen3-235b-a22b"]


async def test_requests_that_come_at_once_leave_the_loop_to_others(fakes: list[Fake]) -> None:
    """What another task waits for takes some passes of the loop, not the sending of all of them."""
    engine = engine_of(fakes, concurrency=64)
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
    engine = ServedEngine(adapter, servers, SECTION.model_copy(update={"concurrency": 64}), max_length=8, vocab_size=10)
    await engine.weights.load(Path("weights"), 1)
    asked = [asyncio.create_task(engine.generate(replace(REQUEST, id=name))) for name in names]
    await every_chance()
    assert not adapter.sent
    counting = asyncio.create_task(adapter.count())
    await engine.weights.commit(1)
    while len(adapter.sent) < len(names):
        await asyncio.sleep(0)
    await engine.interrupt()
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
    section = SECTION.model_copy(update={"concurrency": 64})
    engine = ServedEngine(adapter, servers, section, max_length=8, vocab_size=10)
    await push(engine, 1)
    group = asyncio.create_task(engine.generate(replace(REQUEST, id="group", num_completions=2, ahead=True)))
    asked = [asyncio.create_task(engine.generate(replace(REQUEST, id=name))) for name in names]
    while len(adapter.sent) < 1 + len(names):
        await asyncio.sleep(0)
    await engine.interrupt() if end == "interrupt" else [one.cancel() for one in asked]
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
async def two_groups_of_four(fake: Fake, folder: Path, *keys: str) -> AsyncIterator[tuple[Held, ServedEngine]]:
    """A run's servers, of which so much may be in flight."""
    model = make_tiny_model(TinySizes(), folder / "cache", seed=0)
    limits = ["rollout.server.concurrency=2", "rollout.group_size=4"]
    config = load_config("tiny_cpu", ["rollout=vllm", f"rollout.server.addresses={fake.url}", *limits, *keys])
    servers = ServedEngines(config, held := Held(), model, folder, read_shape(model))
    async with servers.running(folder / "mirror" / "model.safetensors") as engine:
        await push(engine, 1)
        yield held, engine


def asked(engine: ServedEngine, sizes: dict[str, int], *, ahead: bool) -> dict[str, asyncio.Task[object]]:
    """Requests by name, for so many completions each."""
    requests = [replace(REQUEST, id=name, num_completions=count, ahead=ahead) for name, count in sizes.items()]
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


async def test_so_many_problems_of_an_evaluation_are_in_flight_also_with_more_samples_than_a_group(
    fakes: list[Fake], tmp_path: Path
) -> None:
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
