"""Versions of adapters beside a model: which one a request names, what stays loaded, restarts and refusals, with real
HTTP, mirror file and probe, and servers and a learner of a few lines."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl_megatron.errors import SyncError
from rl_megatron.rollout.servers.answers import sampled_with
from rl_megatron.rollout.servers.engine import ServedEngine
from rl_megatron.rollout.servers.http import Server
from rl_megatron.rollout.servers.replicas import Event
from rl_megatron.types import (
    Completion,
    GenerationRequest,
    LoadedAdapters,
    ParallelDims,
    SamplingParams,
    Span,
    WeightUpdate,
)
from rl_megatron.weights.servers.beside import ADAPTERS, AdapterWeights, adapters_folder
from rl_megatron.weights.servers.file import FileDelivery
from rl_megatron.weights.servers.probe import Probe
from rl_megatron.weights.servers.trust import Trust
from tests.completions import completion
from tests.unit.rollout.test_engine_servers import SECTION, Fake, Words, serving
from tests.unit.weights.test_served_weights import Both

PARAMS = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=2, stop_token_ids=(), seed=0)
REQUEST = GenerationRequest(id="one", token_ids=(1, 2), num_completions=1, params=PARAMS)
SIZE = 7


class Holding(Words):
    """Its requests name adapters."""

    async def generate(self, server: Server, request: GenerationRequest, request_id: str) -> list[Completion]:
        name = request.adapters and request.adapters.name
        await server.sampled("/generate", {"adapters": name}, json.loads)
        new = request.params.max_new_tokens
        return [completion([7] * new, finish="length", spans=sampled_with(request, (Span(0, 0),)))]

    async def score_with(self, server: Server, text: Sequence[int], adapters: LoadedAdapters) -> list[float]:
        found: list[float] = await server.post("/score", {"adapters": adapters.name, "tokens": len(text) - 1})
        return found

    async def load_adapters(self, server: Server, adapters: LoadedAdapters, folder: Path) -> None:
        assert (folder / ADAPTERS).stat().st_size == SIZE
        await server.post("/load_adapters", {"adapters": adapters.name})

    async def unload_adapters(self, server: Server, adapters: LoadedAdapters) -> None:
        await server.post("/unload_adapters", {"adapters": adapters.name})


class Holder(Fake):
    """Holds names of adapters, and refuses requests that name another."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.off, self.full = 0.0, False  # what its log-probs are wrong by; whether it loads no more
        self.last = ""  # that a request named
        self.let, self.slow, self.arrived = threading.Event(), "", threading.Event()
        self.answer = self.say

    def say(self, path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        name = body.get("adapters")
        self.last = name or self.last
        if name == self.slow:
            self.arrived.set()
            assert self.let.wait(60)
        if path == "/load_adapters":
            if self.full:
                return 400, "no kernel for experts"
            self.names.append(name)
        elif path == "/unload_adapters":
            self.names.remove(name)
        elif name is not None and name not in self.names:
            return 404, f"no {name}"
        return 200, [-1.0 - self.off] * body["tokens"] if path == "/score" else {"label": self.label}


class Learner(Both):
    """Whose adapters are a few bytes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.kept: list[tuple[int, ...]] = []

    async def write_adapters(self, adapters: LoadedAdapters, keep: Collection[LoadedAdapters]) -> WeightUpdate:
        folder = adapters_folder(self.mirror.path, adapters.name)
        folder.mkdir(parents=True)
        (folder / ADAPTERS).write_bytes(b"a" * SIZE)
        self.kept.append(tuple(one.version for one in keep))
        return WeightUpdate(version=adapters.version, num_bytes=SIZE, seconds=0.0)

    async def merge(self, *, adapters: bool) -> None:
        self.said.append(f"merge {adapters}")


class Run:
    """Servers, an engine over them and the learner's pushes into it."""

    def __init__(self, fakes: Sequence[Holder], folder: Path, count: int) -> None:
        servers = [self.server(fake) for fake in fakes]
        self.engine = ServedEngine(Holding(), servers, SECTION, max_length=40, vocab_size=50)
        self.loras, self.learner = self.engine.beside("run", count), Learner(folder)
        path = self.learner.mirror.path
        file = FileDelivery(learner=self.learner, path=path, servers=self.engine.weights)
        probe = Probe.make(vocab_size=50, max_length=40, temperature=1.0, tolerance=1e-3)
        trust = Trust(path=path, servers=self.loras, learner=self.learner, dims=ParallelDims(), probe=probe)
        self.weights = AdapterWeights(
            learner=self.learner, delivery=file, file=file, trust=trust, servers=self.loras, nodes=2
        )

    @staticmethod
    def server(fake: Holder) -> Server:
        return Server(fake.url, token="t", timeout_seconds=60.0)

    async def ask(self, begun: Completion | None = None) -> tuple[Span, ...]:
        (one,) = await self.engine.generate(replace(REQUEST, begun=begun))
        return one.spans

    async def restart(self, fake: Holder) -> None:
        """What the supervisor does once a new server answers for the one that died."""
        (replica,) = self.engine.replicas.all
        replica.apply(Event.RESTARTED)
        replica.server = self.server(fake)
        replica.apply(Event.ANSWERED)
        await self.weights.refit(replica.server.url)


@contextmanager
def holders(count: int) -> Iterator[list[Holder]]:
    fakes = [Holder() for _ in range(count)]
    with serving(fakes):
        yield fakes


@asynccontextmanager
async def during(fakes: Sequence[Holder], folder: Path, count: int = 3) -> AsyncIterator[Run]:
    run = Run(fakes, folder, count)
    yield run
    await run.engine.close()


def names(*versions: int) -> list[str]:
    return [f"run-v{version}" for version in versions]


def asked(fake: Holder) -> Mapping[str, int]:
    """How often each path was asked for since the last call."""
    found = {path: fake.asked.count(path) for path in fake.asked}
    fake.asked.clear()
    return found


async def test_the_model_is_loaded_once_and_no_later_push_pauses_a_server(tmp_path: Path) -> None:
    with holders(2) as fakes:
        async with during(fakes, tmp_path) as run:
            update = await run.weights.push(3)
            size = run.learner.mirror.path.stat().st_size
            assert update.num_bytes == 3 + SIZE + 2 * size + 2 * 2 * SIZE  # as the learner's push says; two nodes each
            assert [asked(fake) for fake in fakes] == [
                {"/pause": 1, "/load": 1, "/resume": 1, "/load_adapters": 1, "/score": 4, "/relabel": 1}
            ] * 2
            for version in (4, 5):
                update = await run.weights.push(version)
                assert update.num_bytes == SIZE + 2 * 2 * SIZE
                assert [asked(fake) for fake in fakes] == [{"/load_adapters": 1, "/score": 1}] * 2
                assert run.engine.step_row()["seconds/pause"] == 0
                assert await run.ask() == ((0, version),)
                assert sum(asked(fake).get("/generate", 0) for fake in fakes) == 1
            assert [fake.names for fake in fakes] == [names(3, 4, 5)] * 2
            await run.weights.push(6)
            assert [fake.names for fake in fakes] == [names(4, 5, 6)] * 2
            assert run.learner.kept == [(), (3,), (3, 4), (3, 4, 5)]  # whose folders a server may still read


async def test_a_request_ends_on_the_version_that_it_began_with_which_stays_loaded_meanwhile(tmp_path: Path) -> None:
    with holders(1) as (fake,):
        async with during([fake], tmp_path, count=2) as run:
            await run.weights.push(1)
            fake.slow = "run-v1"
            early = asyncio.create_task(run.ask())
            await asyncio.to_thread(fake.arrived.wait)
            for version in (2, 3, 4):
                await run.weights.push(version)
                assert await run.ask() == ((0, version),)
            assert fake.names == names(1, 2, 3, 4)
            fake.let.set()
            assert await early == ((0, 1),)
            await run.weights.push(5)
            assert fake.names == names(4, 5)


async def test_what_goes_on_from_its_tokens_stays_with_their_version_while_servers_hold_it(tmp_path: Path) -> None:
    begun = completion([7], finish="abort", spans=((0, 1),))
    with holders(1) as (fake,):
        async with during([fake], tmp_path, count=2) as run:
            await run.weights.push(1)
            await run.weights.push(2)
            assert await run.ask(begun) == ((0, 1),)
            await run.weights.push(3)
            assert await run.ask(begun) == ((0, 1), (1, 3))


async def test_a_version_that_is_pushed_again_has_another_name(tmp_path: Path) -> None:
    """As a warm start does: by a name and a folder engines find what they cached."""
    with holders(1) as (fake,):
        async with during([fake], tmp_path, count=2) as run:
            for _ in range(3):
                await run.weights.push(0)
            assert fake.names == ["run-v0.1", "run-v0.2"]
            assert await run.ask() == ((0, 0),)
            assert fake.last == "run-v0.2"


async def test_a_restarted_server_gets_the_model_and_every_version_before_it_serves(tmp_path: Path) -> None:
    with holders(2) as (fake, fresh):
        async with during([fake], tmp_path) as run:
            for version in (1, 2, 3):
                await run.weights.push(version)
            (replica,) = run.engine.replicas.all
            replica.apply(Event.DIED, "killed")
            await run.restart(fresh)
            assert fresh.names == names(1, 2, 3)
            assert fresh.asked.index("/load") < fresh.asked.index("/load_adapters")
            assert fresh.asked.count("/score") == 6  # those of the first version were of all texts
            assert await run.ask() == ((0, 3),)
            assert run.learner.scored[-1] != run.learner.scored[0]


async def test_a_restarted_server_that_says_otherwise_is_refused(tmp_path: Path) -> None:
    with holders(2) as (fake, fresh):
        async with during([fake], tmp_path) as run:
            await run.weights.push(1)
            (replica,) = run.engine.replicas.all
            replica.apply(Event.DIED, "killed")
            fresh.off = 0.5
            with pytest.raises(SyncError, match=r"version 1 arrived wrong at .* differ from a verified replica's"):
                await run.restart(fresh)
            assert not run.engine.replicas.healthy()


async def test_a_push_under_which_all_servers_die_is_loaded_again(tmp_path: Path) -> None:
    with holders(2) as (fake, fresh):
        async with during([fake], tmp_path) as run:
            await run.weights.push(1)
            fake.slow = "run-v2"
            pushing = asyncio.create_task(run.weights.push(2))
            await asyncio.to_thread(fake.arrived.wait)
            (replica,) = run.engine.replicas.all
            replica.apply(Event.DIED, "killed")
            await run.restart(fresh)
            assert (await pushing).version == 2
            fake.let.set()
            assert fresh.names == names(1, 2)
            assert await run.ask() == ((0, 2),)


@pytest.mark.parametrize("fault", ["off", "full"])
async def test_adapters_that_a_server_computes_wrongly_or_does_not_load_are_never_named(
    fault: str, tmp_path: Path
) -> None:
    with holders(1) as (fake,):
        async with during([fake], tmp_path) as run:
            await run.weights.push(1)
            fake.off, fake.full = (0.5 if fault == "off" else 0.0), fault == "full"
            said = "version 2 arrived wrong" if fault == "off" else "no kernel for experts.*set weights.push=merged"
            with pytest.raises(SyncError, match=f"(?s){said}"):
                await run.weights.push(2)
            assert await run.ask() == ((0, 1),)


async def test_an_export_is_of_merged_weights_and_leaves_the_model_for_restarts(tmp_path: Path) -> None:
    with holders(1) as (fake,):
        async with during([fake], tmp_path) as run:
            await run.weights.push(1)
            await run.weights.push(2)
            await run.weights.export(tmp_path / "out")
            assert run.learner.said == ["merge True", "export", "merge False"]
            assert json.loads((run.learner.mirror.path.parent / "model.safetensors.json").read_text())["version"] == 1
