"""What a push does to running requests, and by which key a server tells prefixes of several versions apart."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from launcher.servers.engines import SERVERS
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.rollout import RunningRequests
from rl_megatron.errors import ConfigError
from rl_megatron.models.named import NAMED
from rl_megatron.rollout.servers.http import Server
from rl_megatron.types import Completion, GenerationRequest, Span
from rl_megatron.weights.checks.reports import Report, packed_report
from tests.unit.rollout.endpoint.serving import ASK, Saying, episode
from tests.unit.rollout.test_engine_routes import ASKED
from tests.unit.rollout.test_engine_servers import REQUEST, Fake, engine_of, push, running

MOE = NAMED["qwen3-235b-a22b"]


@pytest.fixture
def fakes() -> Iterator[list[Fake]]:
    with running(2) as both:
        yield both


class Asked(Server):
    """A server that notes what it is asked, and answers nothing."""

    def __init__(self) -> None:
        super().__init__("http://localhost:1", token=None, timeout_seconds=1.0)
        self.asked: list[tuple[str, Any]] = []

    async def post(self, path: str, body: object = None, *, params: Any = None) -> Any:
        self.asked.append((path, params if body is None else body))
        if path == "/update_weights_from_tensor":
            given = cast(dict[str, Any], body)["serialized_named_tensors"][0]
            order = json.loads(pickle.loads(base64.b64decode(given))[0][0])
            report = {} if order["do"] == "boxes" else packed_report(Report(rows=(), seconds=0.0), ())
            Path(f"{order['answer']}.0").write_text(json.dumps(report))
        return None

    async def reported(self, path: str, body: object, read: Callable[[bytes], Any]) -> Any:
        return read(json.dumps(await self.post(path, body)).encode())

    async def get(self, path: str) -> Any:
        return {"tp_size": 1}

    async def sampled(self, path: str, body: object, read: Callable[[bytes], Any]) -> Any:
        self.asked.append((path, body))
        if path == "/inference/v1/generate":
            return read(b'{"choices": [], "prompt_logprobs": [null]}')
        if cast(dict[str, Any], body).get("logprob_start_len") == 0:
            return read(b'{"meta_info": {"input_token_logprobs": [[null, 1, null]]}}')
        return read(b"[]")


@pytest.mark.parametrize(
    ("engine", "mode", "path", "said"),
    [
        ("vllm", "recompute", "/pause", {"mode": "keep", "clear_cache": "true"}),
        ("vllm", "keep_cache", "/pause", {"mode": "keep", "clear_cache": "false"}),
        ("vllm", "abort", "/pause", {"mode": "abort", "clear_cache": "true"}),
        ("sglang", "recompute", "/pause_generation", {"mode": "retract"}),
        ("sglang", "keep_cache", "/pause_generation", {"mode": "in_place"}),
        ("sglang", "abort", "/pause_generation", {"mode": "abort"}),
    ],
)
def test_engines_are_paused_in_their_own_words(engine: str, mode: RunningRequests, path: str, said: object) -> None:
    server = Asked()
    asyncio.run(SERVERS[engine](MOE).pause(server, mode))
    assert server.asked == [(path, said)]


@pytest.mark.parametrize(("engine", "key"), [("vllm", "cache_salt"), ("sglang", "extra_key")])
def test_all_that_is_sampled_or_scored_carries_the_salt(engine: str, key: str) -> None:
    adapter, server = SERVERS[engine](MOE), Asked()
    for salt in (None, "2-a"):
        server.salt, server.asked = salt, []
        asyncio.run(adapter.generate(server, ASKED, "id"))
        asyncio.run(adapter.score(server, [1]))
        assert [body.get(key) for _, body in server.asked] == [salt, salt]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_older_requests_go_first_where_the_server_has_priorities(engine: str) -> None:
    adapter, server = SERVERS[engine](MOE), Asked()
    for has, birth in ((True, 3), (True, None), (False, 3)):
        server.priorities = has
        asyncio.run(adapter.generate(server, replace(ASKED, birth=birth), "id"))
    sign = {"vllm": 1, "sglang": -1}[engine]  # SGLang's highest goes first
    assert [body.get("priority") for _, body in server.asked] == [sign * 3, 0, None]


async def test_a_request_is_as_old_as_it_says_or_as_the_version_served_and_the_oldest_if_it_goes_ahead() -> None:
    births = list[int]()

    def answer(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        births.append(body["birth"])
        return 200, {"label": "5@t"}

    with running(1) as (fake,):
        engine = engine_of([fake])
        await push(engine, 5)
        fake.answer = answer
        for changes in ({}, {"birth": 2}, {"ahead": True}, {"ahead": True, "birth": 9}):
            await engine.generate(replace(REQUEST, **changes))
        await engine.close()
    assert births == [5, 2, 0, 9]


class Pushed(Saying):
    """Is pushed a version before each turn."""

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        answers = await super().generate(request)
        return [replace(one, spans=(Span(0, len(self.asked)),)) for one in answers]


@pytest.mark.parametrize(("ahead", "births"), [(False, [None, 1, 1]), (True, [None] * 3)])
async def test_later_turns_are_as_old_as_the_first_of_their_trajectory(ahead: bool, births: list[int | None]) -> None:
    engine = Pushed("one", "two", "three")
    turns, messages = episode(engine, ahead=ahead), list[Any](ASK)
    for _ in range(3):
        messages += [(await turns.reply(messages, ())).message, {"role": "user", "content": "On."}]
    asked = engine.asked
    assert [one.birth for one in asked] == births
    assert {one.ahead for one in asked} == {ahead}


@pytest.mark.parametrize(("mode", "salted"), [("recompute", False), ("abort", False), ("keep_cache", True)])
async def test_each_load_has_a_salt_of_its_own(fakes: list[Fake], mode: str, salted: bool) -> None:
    """Another run may have pushed other weights of the same version to a server before."""
    engine, out = engine_of(fakes, running_requests=mode), list[str | None]()
    for version in (1, 2, 2):
        await push(engine, version)
        out += [server.salt for server in engine.servers]
    found = out
    assert len(set(found)) == (6 if salted else 1)
    assert [str(salt).partition("-")[0] for salt in found] == (["1", "1", *["2"] * 4] if salted else ["None"] * 6)


async def test_a_prompt_that_is_sent_after_the_pause_has_the_new_salt(fakes: list[Fake]) -> None:
    """It waits in the server, and is sampled by the new weights."""
    engine = engine_of(fakes[:1], running_requests="keep_cache")
    await push(engine, 1)
    (server,) = engine.servers
    at: dict[str, str | None] = {}

    def answer(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        at[path] = server.salt
        return 200, {}

    fakes[0].answer = answer
    await push(engine, 2)
    paused, loading = at["/pause"], at["/load"]
    assert str(paused).startswith("1-")
    assert str(loading).startswith("2-")


@pytest.mark.parametrize(("salt", "flushes"), [(None, True), ("2-a", False)])
def test_sglang_keeps_its_cache_over_a_load_and_over_every_other_order(
    tmp_path: Path, salt: str | None, flushes: bool
) -> None:
    """Its scheduler ends where it is to flush a cache that running requests use; not at a pause it waits for them."""
    adapter, server = SERVERS["sglang"](MOE), Asked()
    server.salt = salt
    asyncio.run(adapter.boxes(server, tmp_path / "model.safetensors"))
    paths = [path for path, _ in server.asked]
    assert paths[0] == "/pause_generation"
    assert paths[-1] == "/continue_generation"
    assert server.asked[0][1] == {"mode": "in_place"}
    assert not server.paused
    server.paused, ours = True, len(paths)  # as during a push, whose load resumes it
    asyncio.run(adapter.join(server, tmp_path / "model.safetensors", {}, 1))
    asyncio.run(adapter.load(server, tmp_path / "model.safetensors", 2, private=()))
    assert "/pause_generation" not in [path for path, _ in server.asked[ours:]]
    told = [body["flush_cache"] for path, body in server.asked if path == "/update_weights_from_tensor"]
    assert told == [False, False, flushes]


@pytest.mark.parametrize("asking", ["algorithm.routing_replay=r3", "train.route_flips=true"])
def test_routes_of_other_weights_than_those_that_sampled_are_refused(asking: str) -> None:
    """What SGLang returns then: tests/engines/test_servers.py, test_a_running_request_goes_on_over_an_update."""
    keys = ["rollout=sglang", asking, "train.max_staleness=2"]
    with pytest.raises(ConfigError, match=rf"=2 with {asking} and .*recompute: SGLang .* older weights sampled"):
        load_config("tiny_cpu", keys)
    load_config("tiny_cpu", [*keys, "rollout.server.running_requests=abort"])
    load_config("tiny_cpu", [*keys, "train.max_staleness=0"])  # no completion runs at a push
    load_config("tiny_cpu", ["rollout=vllm", *keys[1:]])  # which returns each pass's as it is made


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("running_requests=keep",), r"what 'keep' did is called recompute"),
        (
            ("running_requests=keep_cache", "algorithm.routing_replay=r3"),
            r"keep_cache with algorithm\.routing_replay=r3: keys and values in the cache were made by the experts that "
            r"older weights chose.*set running_requests=abort, or leave routes out",
        ),
        (("running_requests=keep_cache", "train.route_flips=true"), r"keep_cache with train\.route_flips=true"),
        (("running_requests=keep_cache", "rollout.server.colocated=true"), r"nothing is left to keep; leave one"),
    ],
)
def test_what_cannot_be_kept_is_refused(keys: tuple[str, ...], said: str) -> None:
    first, *others = keys
    with pytest.raises(ConfigError, match=said):
        load_config("tiny_cpu", ["rollout=sglang", f"rollout.server.{first}", *others])
