"""How servers start with quantized weights, which restarts count, and a controller at its limit of open files."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from launcher.servers import supervisor
from launcher.servers.pool import ServerPool, _tolerance
from rl_megatron.config.io import load_config
from rl_megatron.config.rules import find_problems
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.engines.http import AttemptFailed, Server, TooManyOpenFiles
from rl_megatron.engines.replicas import Event, Health, Replica
from rl_megatron.engines.vllm.adapter import VLLMAdapter
from rl_megatron.errors import ConfigError, EngineError
from rl_megatron.features.quantize.encoding import ENCODINGS
from rl_megatron.models.named import NAMED
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.weights.layouts.families import hf_layout, read_shape
from rl_megatron.weights.routes.mirror import Mirror
from tests.processes.launcher.test_supervisor import LIMIT, REQUEST, Bed, bed, running
from tests.unit.rollout.test_engine_servers import REQUEST as ENGINE_REQUEST
from tests.unit.rollout.test_engine_servers import Fake
from tests.unit.rollout.test_engine_servers import running as running_servers


@pytest.mark.parametrize(("calm", "left"), [(0.0, Health.HEALTHY), (3600.0, Health.GONE)])
async def test_early_restarts_do_not_count(calm: float, left: Health, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "CALM_SECONDS", calm)
    with running(4) as fakes:
        async with bed(fakes[:1], fakes[1:], restarts=2) as it:
            await it.push(4)
            replica = it.engine.replicas.all[0]
            for died in (1, 2, 3):
                await it.engine.generate(REQUEST)
                it.places[-1].why.set_result("killed")
                async with asyncio.timeout(LIMIT):
                    while len(replica.ended) < died or replica.health not in (Health.HEALTHY, Health.GONE):
                        await asyncio.sleep(0.001)
            assert replica.health is left
            assert it.engine.metrics()["engine/restarts"] == (3 if left is Health.HEALTHY else 2)


@pytest.mark.parametrize(
    ("answers", "seconds", "said"),
    [
        ([None, 503, 200], 60.0, None),
        ([None, 503, "ends"], 60.0, "ended with status 3"),
        ([None], 0.2, TimeoutError("nothing")),
        ([503, None], 1.0, TimeoutError("nothing")),
        ([503], 1.0, TimeoutError("status 503")),
    ],
    ids=["it comes up", "it ends", "it is silent", "it falls silent", "it is busy"],
)
async def test_a_server_that_comes_up_is_asked_again_where_it_does_not_answer(
    answers: list[int | str | None], seconds: float, said: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the connection and answers nothing, as one whose loop still loads a model. The last answer stays."""
    monkeypatch.setattr(supervisor, "ANSWER_SECONDS", 0.05 if None in answers else 60.0)
    monkeypatch.setattr(supervisor, "_LOOK_SECONDS", 0.01)
    left, ended = chain(answers, repeat(answers[-1])), asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.readline():
            if request == b"\r\n" and (answer := next(left)) is not None:
                if answer == "ends":
                    if not ended.done():
                        ended.set_result("ended with status 3")
                    break
                writer.write(f"HTTP/1.1 {answer} So\r\nContent-Length: 0\r\n\r\n".encode())
        writer.close()

    async def ends() -> str:
        return str(await ended)

    async with await asyncio.start_server(serve, "127.0.0.1") as listening:
        host, port = listening.sockets[0].getsockname()
        server = Server(f"http://{host}:{port}", token=None, timeout_seconds=60.0)
        try:
            answered: object = await supervisor.wait_until_serving(server, ends(), seconds)
        except TimeoutError as error:
            answered = error
        finally:
            await server.close()
    assert str(answered) == str(said)


def test_waits_double_to_a_minute() -> None:
    assert [supervisor.backoff_seconds(number) for number in (0, 1, 6, 7, 5000)] == [0.5, 1.0, 32.0, 60.0, 60.0]


FAULT, FULL = EngineError("answered nothing"), OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(
    ("faults", "waits", "raised"),
    [
        ([], [0.5], None),
        ([FAULT], [0.5, 1.0], None),
        ([FAULT] * 3, [0.5, 1.0, 2.0], None),
        ([FAULT, FULL], [0.5, 1.0], TooManyOpenFiles),
    ],
    ids=["it starts", "again", "in vain", "no file is left"],
)
def test_a_server_is_started_again_as_often_as_it_may_be(
    faults: list[Exception], waits: list[float], raised: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, waited, seen = [*faults], list[float](), list[str]()
    replica = Replica(0, Server("http://a", token=None, timeout_seconds=60.0), lambda: None)
    replica.apply(Event.DIED, "killed")

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    async def room() -> None:
        seen.append(replica.reason)

    async def start(one: Replica) -> Any:
        if left:
            raise left.pop(0)
        return "serves"

    engine: Any = SimpleNamespace(attempt_count=lambda one: one.restarts, weights=SimpleNamespace(wait_for_memory=room))
    section, nothing = ServerSection(restarts=3), cast(Any, None)
    supervised = supervisor.Supervisor(engine=engine, section=section, restart=start, push_current=nothing)
    monkeypatch.setattr("launcher.servers.supervisor.asyncio.sleep", sleep)
    refused: Any = pytest.raises(raised, match="start of replica 0: this") if raised else contextlib.nullcontext()
    with refused:
        assert asyncio.run(supervised._restart(replica)) == (None if len(faults) == 3 else "serves")
    assert (waited, replica.restarts, left) == (waits, len(waits), [])
    assert seen == ["killed", *([str(FAULT)] * (len(waits) - 1))]
    assert replica.health is (Health.DEAD if len(faults) == 3 else Health.RESTARTING)


# A controller at its limit of open files, with real HTTP.
@contextlib.asynccontextmanager
async def without_files(it: Bed, fake: Fake) -> AsyncIterator[Replica]:
    """The only replica, to which nothing is connected, while this process can open no file."""
    (replica,) = it.engine.replicas.all
    before, replica.server = replica.server, Server(fake.url, token="t", timeout_seconds=LIMIT)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield replica
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await before.close()


async def test_it_ends_the_run_with_advice_and_no_server_counts_as_dead() -> None:
    """It has no connection either for a request or for a health check."""
    with running_servers(1) as fakes:
        async with bed(fakes, []) as it:
            await it.push(4)
            async with without_files(it, fakes[0]) as replica:
                with pytest.raises(EngineError, match=r"request 'step 1.*ulimit -Hn.* rollout.server.max_concurrent"):
                    await it.engine.generate(ENGINE_REQUEST)
                assert not replica.suspected.is_set()
                replica.suspect(AttemptFailed("of another cause"))  # its supervisor asks for its health
                with pytest.raises(TooManyOpenFiles, match=r"/health: .*open files"):
                    await it.engine.replicas.wait_for_healthy(list)
            assert replica.health is Health.HEALTHY


async def test_a_server_that_it_cannot_refit_is_not_dead() -> None:
    with running_servers(1) as fakes:
        async with bed(fakes, []) as it:
            await it.push(4)
            async with without_files(it, fakes[0]) as replica:
                replica.health = Health.STALE
                with pytest.raises(TooManyOpenFiles, match=r"open files.*ulimit -Hn"):
                    await asyncio.wait_for(it.supervisor._cannot_serve(replica), LIMIT)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
async def test_a_restart_without_files_is_not_the_servers_fault(code: int) -> None:
    with running_servers(2) as fakes:
        async with bed(fakes[:1], fakes[1:]) as it:
            await it.push(4)
            it.faults.append(OSError(code, os.strerror(code)))
            it.places[0].why.set_result("killed")
            with pytest.raises(TooManyOpenFiles, match=r"start of replica 0: .*open files.*ulimit -Hn"):
                await it.engine.generate(ENGINE_REQUEST)


# The options and files with which servers start if weights are quantized.
METHODS = {"none": None, "fp8": "fp8", "int8": "compressed-tensors"}
GPU = ["rollout=vllm", "learner.device=cuda", "learner.dtype=bfloat16"]


SIZES = TinySizes(hidden_size=128, num_kv_heads=4, head_dim=32, expert_width=128)  # no block is cut


def config_with(*overrides: str) -> RunConfig:
    return load_config("tiny_cpu", [*GPU, *overrides])


@pytest.mark.parametrize("kind", ["none", "fp8", "int8"])
def test_servers_start_with_the_config_that_the_mirrors_folder_has(tmp_path: Path, kind: str) -> None:
    folder = make_tiny_model(SIZES, tmp_path / "cache", seed=0)
    own = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "of the folder"}}
    (folder / "config.json").write_text(json.dumps(own))
    shape, packages = read_shape(folder), tmp_path / "packages"
    packages.mkdir()
    config = config_with(f"rollout.server.quantization={kind}")
    ServerPool(config, VLLMAdapter(shape), folder, tmp_path, shape)._write_models(packages)
    shapes = hf_layout(shape).local_shapes(0)
    path = tmp_path / "w" / "model.safetensors"
    Mirror.make(path, shapes, torch.bfloat16, folder / "config.json", ENCODINGS[kind])
    mirror = Mirror(path, shapes, torch.bfloat16, ENCODINGS[kind])
    text = mirror.path.with_name("config.json").read_text()
    for name in ("bare", "model"):
        assert (packages / name / "config.json").read_text() == text
    assert [path.name for path in (packages / "bare").iterdir()] == ["config.json"]
    assert (packages / "model" / "tokenizer.json").is_file()
    assert not list(packages.rglob("*.safetensors"))
    assert json.loads(text).get("quantization_config", {}).get("quant_method") == METHODS[kind]
    if kind != "none":
        assert mirror.num_bytes < 2 * sum(tensor.numel() for tensor in mirror.tensors.values())


def test_a_model_without_such_a_format_is_refused_before_anything_starts(tmp_path: Path) -> None:
    shape = replace(NAMED["qwen3-30b-a3b"], family="gpt_oss", num_layers=1)
    config = config_with("rollout.server.quantization=fp8")
    with pytest.raises(ConfigError, match=r"experts\.\w+ \[.*\] is not a matrix, and stacked experts cannot"):
        ServerPool(config, VLLMAdapter(shape), tmp_path, tmp_path, shape)
    fp8, given = "rollout.server.quantization=fp8", "rollout.server.probe_tolerance=0.5"
    assert [_tolerance(config_with(*more)) for more in ((), (fp8,), (fp8, given))] == [0.25, 1.0, 0.5]


@pytest.mark.parametrize(
    ("model", "keys", "told"),
    [
        ("qwen3-235b-a22b", ("tp=4",), []),
        ("qwen3-235b-a22b", ("tp=8", "ep=8"), []),
        ("qwen3-235b-a22b", ("tp=8",), ["192 of the 1536 rows of {experts}.gate_proj.weight"]),
        ("qwen3-30b-a3b", ("tp=8", "dp=1"), ["96 of the 768 rows of {experts}.gate_proj.weight"]),
        ("qwen3-30b-a3b", ("tp=2",), []),
        ("deepseek-v3", ("tp=16",), []),
        ("deepseek-v3", ("tp=32",), ["64 of the 2048 rows of {experts}.gate_proj.weight"]),
        ("deepseek-v3", ("tp=16", "dp=2", "ep=32"), []),
    ],
)
def test_degrees_that_cut_blocks_are_refused(model: str, keys: tuple[str, ...], told: list[str]) -> None:
    """By the sizes and degrees at which vLLM and SGLang end (validate_fp8_block_shape, fp8.py)."""
    config = config_with("rollout.server.quantization=fp8", *(f"rollout.server.{key}" for key in keys))
    found = find_problems(config, "shape", NAMED[model])
    assert bool(found) == bool(told)
    for text in told:
        (line,) = [line for line in found if "{expert}.gate_proj" in line]
        assert text.format(experts="model.layers.{layer}.mlp.experts.{expert}") in line
        assert f"or set rollout.server.ep={config.rollout.server.tp}, so that ranks have whole experts" in line
    int8 = config_with("rollout.server.quantization=int8", *(f"rollout.server.{key}" for key in keys))
    assert find_problems(int8, "shape", NAMED[model]) == []
