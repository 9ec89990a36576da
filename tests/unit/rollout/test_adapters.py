"""Versions of adapters beside a model: their places in engines, names in requests, restarts, and what is refused."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest

from launcher.preflight.sizes import check
from launcher.preflight.subject import PreflightContext
from launcher.servers.degrees import served_bytes
from launcher.servers.engines import SERVERS, engine_problems, load_adapter
from launcher.servers.pool import ServerPool
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.engines.answers import with_adapter_version
from rl_megatron.engines.engine import ServerEngine
from rl_megatron.engines.http import Server
from rl_megatron.engines.replicas import Event
from rl_megatron.errors import ConfigError, SyncError
from rl_megatron.features.lora.engines import HeldAdapters
from rl_megatron.features.lora.feature import AdapterSlots, make_adapter_slots
from rl_megatron.features.lora.push import ADAPTERS, AdapterSync, adapters_folder
from rl_megatron.features.lora.rows import LoraLayouts
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import (
    Completion,
    GenerationRequest,
    NamedVersion,
    ParallelDims,
    SamplingParams,
    Span,
    WeightUpdate,
)
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout
from rl_megatron.weights.push.trust import Probe, PushVerifier
from rl_megatron.weights.routes.delivery import FileDelivery
from tests.completions import completion
from tests.unit.launcher.test_memory import QWEN_80GB
from tests.unit.rollout.test_engine_commands import TWO_NODES
from tests.unit.rollout.test_engine_servers import SECTION, Fake, Words, serving
from tests.unit.weights.test_served_weights import Both
from tools.planner.estimates import estimate, push_cost

MOE, CONF = NAMED["qwen3-30b-a3b"], Path(__file__).parents[3] / "conf"
KEYS = ("rollout=vllm", "learner.lora.rank=12", "weights.push=adapters", "train.max_staleness=2")
DENSE = replace(MOE, num_experts=0, family="qwen3")
ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")


def places(*keys: str) -> AdapterSlots:
    found = make_adapter_slots(load_config("tiny_cpu", [*KEYS, *keys]))
    assert found is not None
    return found


def side(engine: str, shape: ModelShape) -> HeldAdapters:
    (found,) = (one for one in SERVERS[engine](shape).hooks if isinstance(one, HeldAdapters))
    return found


def words(engine: str, given: AdapterSlots | None, device: str = "cuda") -> tuple[Mapping[str, str], str]:
    """By option of the command, the words behind it; and all."""
    arguments = (
        SERVERS[engine](MOE)
        .command(replace(TWO_NODES, features={"lora": given}, device=device, num_nodes=1, node_rank=0))
        .arguments
    )
    of, last = dict[str, str](), ""
    for word in arguments:
        if word.startswith("--"):
            last, of[word] = word, ""
        elif last:
            of[last] = f"{of[last]} {word}".strip()
    return of, " ".join(arguments)


def test_there_are_places_for_two_versions_more_than_the_greatest_staleness() -> None:
    assert places("learner.lora.targets=attention").max_versions == 4
    assert make_adapter_slots(load_config("tiny_cpu", [*KEYS, "weights.push=merged"])) is None
    assert set(side("vllm", MOE).ranks(places("learner.lora.expert_rank=3")).values()) == {12, 3}


def test_engines_get_the_options_of_their_places() -> None:
    of, _ = words("vllm", places("learner.lora.targets=attention"))
    assert {of[key] for key in ("--max-loras", "--max-cpu-loras")} == {"4"}
    assert (of["--max-lora-rank"], of["--lora-target-modules"]) == ("16", " ".join(ATTENTION))
    assert "--lora-target-modules" not in words("vllm", places())[0]  # it has all experts of a layer in one module
    command = SERVERS["vllm"](MOE).command(replace(TWO_NODES, features={"lora": places()}))
    assert command.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    of, _ = words("sglang", places("learner.lora.targets=attention"))
    assert (of["--max-loras-per-batch"], of["--max-lora-rank"]) == ("5", "12")  # and requests without any
    assert (of["--lora-target-modules"], of["--load-format"]) == (" ".join(ATTENTION), "safetensors")
    assert "--lora-backend" not in of
    of, _ = words("sglang", places("learner.lora.targets=attention"), "cpu")
    assert of["--lora-backend"] == "torch_native"
    for engine in SERVERS:
        of, text = words(engine, None)
        assert "lora" not in text
        assert of["--load-format"] == "dummy"


@pytest.mark.parametrize(
    ("engine", "keys", "device", "dp", "said"),
    [
        ("vllm", ("learner.lora.rank=600", "learner.lora.targets=attention"), "cuda", 1, "of rank 512 at most"),
        ("vllm", ("learner.lora.targets=attention",), "cpu", 1, "Triton's kernels, which need a GPU; use a dense"),
        ("sglang", (), "cuda", 1, "one rank and one scale .* given are 1, 12"),
        ("sglang", ("learner.lora.expert_rank=12",), "cpu", 1, "kernels for adapters of experts, which need a GPU"),
        ("sglang", ("learner.lora.targets=attention",), "cuda", 2, "set rollout.server.dp=1"),
    ],
)
def test_formats_without_a_kernel_are_told(engine: str, keys: tuple[str, ...], device: str, dp: int, said: str) -> None:
    problem = side(engine, MOE).problem(places(*keys), device, dp)
    assert re.search(said, problem)
    shape = DENSE if engine == "vllm" else MOE
    assert not side(engine, shape).problem(places("learner.lora.targets=attention"), device, 1)


def test_a_run_on_such_an_engine_is_refused_before_a_server_starts(tmp_path: Path) -> None:
    said = r"weights\.push=adapters: .*computes experts by Triton.*; (or )?set weights\.push=merged"
    with pytest.raises(ConfigError, match=said):
        ServerPool(load_config("tiny_cpu", KEYS), SERVERS["vllm"](MOE), tmp_path, tmp_path, MOE)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("learner.lora.targets=attention",), "weights.push=adapters: model_type='qwen3_moe' has experts: wherever"),
        (("rollout=sglang", "learner.lora.expert_rank=3"), "weights.push=adapters: learner.lora: SGLang 0.5.21 compu"),
        (
            ("rollout=sglang", "learner.lora.targets=attention", "rollout.server.dp=2"),
            "weights.push=adapters: rollout.server.dp=2: with attention's replicas SGLang 0.5.21",
        ),
        (
            (
                *("weights.push=merged", "learner.device=cuda", "learner.dtype=bfloat16"),
                "rollout.server.batch_invariant=true",
                "rollout.server.options='--attention-backend X'",
            ),
            "rollout.server.batch_invariant=true with --attention-backend X: vLLM 0.32.0 has no kernel of it",
        ),
        (("weights.push=merged", "rollout.server.options='-q fp8'"), "rollout.server.options has -q, which"),
        (("rollout=sglang", "learner.lora.targets=attention"), None),
        (("weights.push=merged",), None),
    ],
)
def test_a_job_with_such_keys_is_refused_before_it_is_submitted(keys: tuple[str, ...], said: str | None) -> None:
    found = [one.text for one in check(PreflightContext(load_config("tiny_cpu", [*KEYS, *keys]), for_job=True))]
    assert len(found) == (said is not None)
    assert all(text.startswith(str(said)) for text in found)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("weights.push=adapters", "rollout=vllm"), "with learner.lora.rank=null: the whole model is trained"),
        ((*KEYS, "rollout=local"), "rollout.engine=local: only vllm and sglang hold adapters"),
        ((*KEYS, "rollout.engine=my_package:Words"), "engine=my_package:Words: only vllm and sglang hold adapters"),
        ((*KEYS, "rollout.server.colocated=true", "train.max_staleness=0"), "lose the model, which is pushed once"),
        ((*KEYS, "rollout.server.addresses=http://a:1"), "a run starts its servers with places for its adapters"),
        ((*KEYS, "rollout.server.running_requests=abort"), "running_requests=abort: no push pauses a request"),
    ],
)
def test_runs_that_adapters_beside_a_model_do_not_fit_are_refused(keys: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config("tiny_cpu", keys)


def recipe(*keys: str) -> RunConfig:
    given = ("data.train=a.jsonl", "data.eval=b.jsonl", "model.path=/models/given", "learner.lora.rank=32")
    apart = ("rollout.server.colocated=false", "learner.offload.while_sampling=null", "rollout=vllm")
    return load_config(QWEN_80GB, [*given, *apart, "rollout.server.memory_fraction=0.5", *keys])


def test_a_push_of_adapters_is_planned_by_their_bytes() -> None:
    """They go to the first rank, which writes them, and each of the servers reads them."""
    config = recipe("weights.push=adapters")
    folder = LoraLayouts(config.learner.lora).file_layout(megatron_layout(MOE), hf_layout(MOE))
    whole = 2 * sum(map(prod, folder.local_shapes(0).values()))
    gathered, written, read = push_cost(config, MOE).hops
    assert gathered.total < whole
    assert gathered.received == gathered.total
    assert (written.total, read.total) == (whole, whole * config.rollout.server.count)
    assert push_cost(config, MOE).before == served_bytes(config, MOE) > 60 * whole
    lines = list(estimate(config, MOE).lines())
    assert lines[0] == "61.1 GB of frozen weights to each server, once before the first push"
    assert lines[1].startswith("a push of adapters by file, through ")
    assert push_cost(config, MOE).seconds < 0.05 * push_cost(recipe("weights.transport=file"), MOE).seconds


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("rollout=vllm", "rollout.temperature=2.5"), "rollout.temperature=2.5: vLLM 0.32.0 samples at 0.01 to 2, and"),
        (("rollout=vllm", "eval.temperature=0.005"), "eval.temperature=0.005: vLLM"),
        (("rollout=vllm", "eval.sets.hot.temperature=2.5", "eval.sets.plain.limit=2"), "eval.sets.hot.temperature=2.5"),
        (("rollout=sglang", "eval.temperature=2.5"), None),
        (("rollout=vllm", "eval.temperature=2", "rollout.temperature=0.01"), None),
    ],
)
def test_temperatures_that_the_engine_does_not_sample_at_are_refused(keys: tuple[str, ...], said: str | None) -> None:
    config = load_config("tiny_cpu", keys)
    problems = engine_problems(config, load_adapter(config.rollout.engine, MOE), MOE, {})
    assert [one[: len(said or "")] for one in problems] == ([] if said is None else [said])


# Versions of adapters beside a model: which one a request names, what stays loaded, restarts, refusals; real HTTP.
PARAMS = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=2, stop_token_ids=(), seed=0)
REQUEST = GenerationRequest(id="one", token_ids=(1, 2), num_completions=1, params=PARAMS)
SIZE = 7


class Holding(Words):
    """Its requests name adapters."""

    async def generate(self, server: Server, request: GenerationRequest, request_id: str) -> list[Completion]:
        name = request.named and request.named.name
        await server.post_sampling("/generate", {"adapters": name}, json.loads)
        new = request.params.max_new_tokens
        return [completion([7] * new, finish="length", spans=with_adapter_version(request, (Span(0, 0),)))]

    async def score(self, server: Server, text: Sequence[int], named: NamedVersion | None = None) -> list[float]:
        assert named is not None
        found: list[float] = await server.post("/score", {"adapters": named.name, "tokens": len(text) - 1})
        return found


class Named(HeldAdapters):
    """By the paths of `Holder`."""

    field = "adapters"

    async def load(self, server: Server, version: NamedVersion, folder: Path) -> None:
        assert (folder / ADAPTERS).stat().st_size == SIZE
        await server.post("/load_adapters", {"adapters": version.name})

    async def unload(self, server: Server, version: NamedVersion) -> None:
        await server.post("/unload_adapters", {"adapters": version.name})


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
        self.kept: list[list[str]] = []

    async def push_extra(self, version: int, *given: Any) -> WeightUpdate:
        name, keep = given
        folder = adapters_folder(self.mirror.path, name)
        folder.mkdir(parents=True)
        (folder / ADAPTERS).write_bytes(b"a" * SIZE)
        self.kept.append(list(keep))
        return WeightUpdate(version=version, num_bytes=SIZE, seconds=0.0)

    async def merge(self, *, merged: bool) -> None:
        self.said.append(f"merge {merged}")


class Run:
    """Servers, an engine over them and the learner's pushes into it."""

    def __init__(self, fakes: Sequence[Holder], folder: Path, count: int) -> None:
        servers = [self.server(fake) for fake in fakes]
        adapter = Holding()
        adapter.hooks = (Named("lora", DENSE),)
        self.engine = ServerEngine(adapter, servers, SECTION, max_length=40, vocab_size=50)
        self.learner = Learner(folder)
        path = self.learner.mirror.path
        file = FileDelivery(learner=self.learner, path=path, servers=self.engine.weights)
        probe = Probe.make(vocab_size=50, max_length=40, temperature=1.0, tolerance=1e-3)
        trust = partial(PushVerifier, path=path, learner=self.learner, dims=ParallelDims(), probe=probe)
        config = load_config("tiny_cpu", [*KEYS, f"train.max_staleness={count - 2}"])
        given = config, self.engine, self.learner, file, file
        self.weights = AdapterSync(*given, lambda servers: trust(servers=servers), run="run", nodes=2)

    @staticmethod
    def server(fake: Holder) -> Server:
        return Server(fake.url, token="t", timeout_seconds=60.0)

    async def ask(self, begun: Completion | None = None) -> tuple[Span, ...]:
        (one,) = await self.engine.generate(replace(REQUEST, partial=begun))
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
            expected = [{"/pause": 1, "/load": 1, "/resume": 1, "/load_adapters": 1, "/score": 4, "/relabel": 1}] * 2
            assert [asked(fake) for fake in fakes] == expected
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
            assert run.learner.kept == [
                [],
                names(3),
                names(3, 4),
                names(3, 4, 5),
            ]  # whose folders a server may still read


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
async def test_adapters_that_a_server_computes_wrongly_or_lacks_are_never_named(fault: str, tmp_path: Path) -> None:
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
