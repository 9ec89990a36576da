"""Retries, replicas, versions and limits of engine servers, with real HTTP and an adapter of a few lines."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import pickle
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any, Literal, cast

import pytest

from launcher.servers.engines import SERVERS
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.rollout import RunningRequests, ServerSection
from rl_megatron.engines import weights
from rl_megatron.engines.adapter import Adapter, ServerInfo, StartCommand, StartOptions, WeightLabels
from rl_megatron.engines.engine import ServerEngine
from rl_megatron.engines.http import ConnectionBroken, Server
from rl_megatron.engines.replicas import Event, Health, Replica, ReplicaSet, next_health
from rl_megatron.errors import ConfigError, EngineError, SyncError
from rl_megatron.features.replay.engines import SGLangRoutes
from rl_megatron.models.named import NAMED
from rl_megatron.types import Completion, GenerationRequest, NamedVersion, SamplingParams, Span
from rl_megatron.weights.checks.reports import ChecksumReport, packed_report
from rl_megatron.weights.layouts.recorded import Boxes
from tests.completions import completion
from tests.unit.rollout.endpoint.test_endpoint import ASK, Saying, episode
from tests.unit.rollout.test_engine_routes import ASKED

Answer = Callable[[str, dict[str, Any], int], tuple[int, object]]
PARAMS = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=2, stop_token_ids=(), seed=0)
REQUEST = GenerationRequest(id="step 1: 2+2=", token_ids=(1, 2), num_completions=1, params=PARAMS)
SECTION = ServerSection(timeout_seconds=60.0, max_concurrent_groups=3)

LABELS = WeightLabels()
LABELS.start = "t"


class Words(Adapter):
    """An adapter whose server answers {"label": ...} to /generate, and "tokens" and "finish" where it likes."""

    name, module, tested_version, renormalizes_top_p = "Words", "words", "1", True

    def command(self, options: StartOptions) -> StartCommand:
        raise NotImplementedError

    async def describe(self, server: Server) -> ServerInfo:
        raise NotImplementedError

    async def generate(self, server: Server, request: GenerationRequest, request_id: str) -> list[Completion]:
        new, birth = request.params.max_new_tokens, request.start_version
        body = {"id": request_id, "prompt": request.token_ids, "new": new, "birth": birth}
        answer = {"tokens": [7], "finish": "stop", **await server.post_sampling("/generate", body, json.loads)}
        version = LABELS.version(answer["label"])
        return [completion(answer["tokens"], finish=answer["finish"], spans=((0, version),))] * request.num_completions

    async def abort(self, server: Server, request: GenerationRequest, request_id: str) -> None:
        await server.post("/abort", {"id": request_id})

    async def tokens(self, server: Server) -> int:
        return int((await server.get("/made")).get("made", 0))

    async def pause(self, server: Server, mode: RunningRequests) -> None:
        await server.post("/pause", {"mode": mode})

    async def resume(self, server: Server) -> None:
        await server.post("/resume")

    async def score(self, server: Server, text: Sequence[int], named: NamedVersion | None = None) -> list[float]:
        raise NotImplementedError

    async def load(
        self, server: Server, path: Path, version: int, *, private: Collection[str], straight: bool = False
    ) -> list[ChecksumReport]:
        await server.post("/load", {"label": LABELS.candidate(version)})
        return []

    async def boxes(self, server: Server, path: Path) -> list[Boxes]:
        await server.post("/boxes")
        return []

    async def join(self, server: Server, path: Path, rendezvous: Mapping[str, object], first: int) -> None:
        raise NotImplementedError

    async def relabel(self, server: Server, version: int) -> None:
        await server.post("/relabel", {"label": LABELS.verified(version)})

    async def release_memory(self, server: Server) -> None:
        await server.post("/release")

    async def resume_memory(self, server: Server, what: Literal["weights", "cache"]) -> None:
        await server.post(f"/reclaim_{what}")


class Fake(ThreadingHTTPServer):
    """Answers as ``answer(path, body, number of the request)`` says, else with the label that it was given last."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock, self.asked, self.label = threading.Lock(), list[str](), LABELS.verified(0)
        self.tokens = list[str]()  # of each request
        self.now = self.most = 0
        self.answer: Answer = lambda path, body, number: (200, {"label": self.label})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Fake
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        fake = self.server
        with fake.lock:
            number = len(fake.asked)
            fake.asked.append(self.path)
            fake.tokens.append(str(self.headers["Authorization"]).removeprefix("Bearer "))
            fake.label = body.get("label", fake.label)
            fake.now += 1
            fake.most = max(fake.most, fake.now)
        try:
            status, answer = fake.answer(self.path, body, number)
        finally:
            with fake.lock:
                fake.now -= 1
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST  # noqa: N815

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def serving(fakes: Sequence[Fake]) -> Iterator[None]:
    """Each in a thread of its own."""
    with ExitStack() as stack:
        for fake in fakes:
            threading.Thread(target=fake.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(fake.server_close)
            stack.callback(fake.shutdown)
        yield


@contextmanager
def running(count: int) -> Iterator[list[Fake]]:
    fakes = [Fake() for _ in range(count)]
    with serving(fakes):
        yield fakes


@pytest.fixture
def fakes() -> Iterator[list[Fake]]:
    with running(2) as both:
        yield both


def engine_of(fakes: list[Fake], **changes: Any) -> ServerEngine:
    section = SECTION.model_copy(update=changes)
    servers = [Server(fake.url, token="t", timeout_seconds=section.timeout_seconds) for fake in fakes]
    return ServerEngine(Words(), servers, section, max_length=8, vocab_size=10)


async def push(engine: ServerEngine, version: int) -> None:
    await engine.weights.load(Path("weights"), version)
    await engine.weights.commit(version)


async def test_a_failed_attempt_goes_to_another_replica(fakes: list[Fake]) -> None:
    fakes[0].answer = lambda path, body, number: (500, {}) if path == "/generate" else (200, {})
    engine = engine_of(fakes)
    await push(engine, 4)
    assert (await engine.generate(REQUEST))[0].spans == ((0, 4),)
    assert (fakes[0].asked.count("/generate"), fakes[1].asked.count("/generate")) == (1, 1)


@pytest.mark.parametrize(
    ("answer", "said", "attempts"),
    [
        ((503, {}), "status 503: {}; attempts made: 4", 4),
        ((400, "too hot"), 'status 400: "too hot"', 1),
        ((200, {"label": "default"}), "labeled 'default', which this run did not push", 1),
        ((200, {"label": "3@t"}), "was sampled with version 3, but 4 to 4 were served", 1),
        ((200, {"label": "4@another"}), "another run has pushed its weights to the server", 1),
    ],
    ids=["server error", "refusal", "a server that was started again", "of no push", "of another run's push"],
)
async def test_what_cannot_be_served_names_the_request(answer: tuple[int, object], said: str, attempts: int) -> None:
    with running(1) as (fake,):
        engine = engine_of([fake])
        await push(engine, 4)
        fake.answer = lambda path, body, number: answer
        with pytest.raises(EngineError) as caught:
            await engine.generate(REQUEST)
        assert str(caught.value).startswith("request 'step 1: 2+2='")
        assert said in str(caught.value)
        assert fake.asked.count("/generate") == attempts


async def test_no_more_requests_are_in_flight_than_allowed(fakes: list[Fake]) -> None:
    three = threading.Barrier(SECTION.max_concurrent_groups)

    def meeting(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        three.wait(SECTION.timeout_seconds)  # none is answered before as many are in flight as may be
        return 200, {"label": "1@t"}

    engine = engine_of(fakes)
    await push(engine, 1)
    for fake in fakes:
        fake.answer, fake.most = meeting, 0
    await asyncio.gather(*(engine.generate(REQUEST) for _ in range(12)))
    counts = [fake.asked.count("/generate") for fake in fakes]
    assert sum(counts) == 12
    assert min(counts) >= 3  # the replica with the fewest requests in flight is asked
    assert max(fake.most for fake in fakes) <= 2  # of three, over two replicas


async def test_nothing_is_served_between_load_and_commit(fakes: list[Fake]) -> None:
    """A request waits for the commit; refused weights fail it."""

    async def ask(commit: bool) -> Completion:
        engine = engine_of(fakes)
        await push(engine, 1)
        await engine.weights.load(Path("weights"), 2)
        waiting = asyncio.create_task(engine.generate(REQUEST))
        for _ in range(100):
            await asyncio.sleep(0)  # it has every chance
        assert not waiting.done()
        assert fakes[0].asked[-1] == "/resume"
        if commit:
            await engine.weights.commit(2)
        else:
            engine.weights.refuse()
        return (await waiting)[0]

    assert (await ask(True)).spans == ((0, 2),)
    with pytest.raises(EngineError, match="no weights are served"):
        await ask(False)


@pytest.mark.parametrize("status", [200, 400])
async def test_a_server_is_at_a_pause_while_it_loads_and_no_longer(fakes: list[Fake], status: int) -> None:
    """Who looks after it must not take the pause for standing still, nor wait for ever where a load failed."""
    engine = engine_of(fakes)
    paused: list[bool] = []

    def answer(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        paused.append(engine.servers[0].paused)
        return (status if path == "/load" else 200), {}

    fakes[0].answer = answer
    with contextlib.suppress(SyncError):
        await engine.weights.load(Path("weights"), 3)
    assert set(paused) == {True}
    assert not engine.servers[0].paused


async def test_a_load_that_fails_on_one_replica_names_it(fakes: list[Fake]) -> None:
    fakes[1].answer = lambda path, body, number: (400, "no space") if path == "/load" else (200, {})
    engine = engine_of(fakes)
    with pytest.raises(SyncError, match=rf"version 3 failed, and is not served:\n  {fakes[1].url}.*no space"):
        await engine.weights.load(Path("weights"), 3)
    with pytest.raises(EngineError, match="no weights are served"):
        await engine.generate(REQUEST)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token_ids": (1, 10)}, r"token ids in \[0, 10\)"),
        ({"token_ids": ()}, "one or more token ids"),
        ({"token_ids": (1,) * 7}, "7 prompt tokens [+] max_new_tokens=2 exceed the engine's max_length=8"),
    ],
)
async def test_mistreated_requests_are_not_sent(fakes: list[Fake], changes: dict[str, Any], said: str) -> None:
    bad = GenerationRequest(**{"id": "x", "token_ids": (1,), "num_completions": 1, "params": PARAMS} | changes)
    engine = engine_of(fakes)
    await push(engine, 1)
    with pytest.raises(EngineError, match=said):
        await engine.generate(bad)
    assert "/generate" not in fakes[0].asked + fakes[1].asked


@pytest.mark.parametrize("sampled", [[3], []])
async def test_what_an_update_ends_is_asked_again_with_what_it_has(sampled: list[int]) -> None:
    with running(1) as (fake,):
        paused, prompts = threading.Event(), list[tuple[list[int], int]]()

        def answer(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
            if path == "/pause":
                assert body["mode"] == "abort"
                paused.set()
            if path != "/generate":
                return 200, {}
            prompts.append((body["prompt"], body["new"]))
            if len(prompts) == 1:
                assert paused.wait(10)
                return 200, {"label": "1@t", "tokens": sampled, "finish": "abort"}
            return 200, {"label": "2@t", "tokens": [4] * body["new"], "finish": "length"}

        fake.answer = answer
        engine = engine_of([fake], running_requests="abort")
        await push(engine, 1)
        paused.clear()
        asked = asyncio.create_task(engine.generate(REQUEST))
        while not prompts:
            await asyncio.sleep(0.01)
        await push(engine, 2)
        (done,) = await asked
        assert done.token_ids.tolist() == [*sampled, *[4] * (2 - len(sampled))]
        assert done.finish_reason == "length"
        assert done.spans == (((0, 1), (1, 2)) if sampled else ((0, 2),))
        assert prompts == [([1, 2], 2), ([1, 2, *sampled], 2 - len(sampled))]


async def test_memory_is_given_back_once_and_taken_again_around_the_load(fakes: list[Fake]) -> None:
    engine = engine_of(fakes)
    await push(engine, 1)
    for fake in fakes:
        fake.asked.clear()
    await asyncio.gather(engine.weights.release(), engine.weights.release())
    await engine.weights.release()
    with pytest.raises(EngineError, match="no weights are served; push some first"):
        await engine.generate(REQUEST)
    await push(engine, 2)
    await push(engine, 3)
    await engine.generate(REQUEST)
    update = ["/pause", "/load", "/resume", "/relabel"]
    for fake in fakes:
        asked = [path for path in fake.asked if path != "/generate"]
        assert asked == ["/release", "/pause", "/reclaim_weights", "/load", "/reclaim_cache", *update[2:], *update]


async def test_layouts_are_recorded_on_weights_that_have_memory_again(fakes: list[Fake]) -> None:
    """The load that follows takes no more of it than the cache's."""
    engine = engine_of(fakes)
    for version in (1, 2):
        await engine.weights.release()
        await engine.weights.boxes(Path("weights"))
        await engine.weights.boxes(Path("weights"))
        await push(engine, version)
    turn = ["/release", "/reclaim_weights", "/boxes", "/boxes", "/pause", "/load", "/reclaim_cache", "/resume"]
    for fake in fakes:
        assert fake.asked == [*turn, "/relabel"] * 2


# What a push does to running requests, and by which key a server tells prefixes of several versions apart.
MOE = NAMED["qwen3-235b-a22b"]


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
            report = {} if order["do"] == "boxes" else packed_report(ChecksumReport(rows=(), seconds=0.0), ())
            Path(f"{order['answer']}.0").write_text(json.dumps(report))
        return None

    async def post_report(self, path: str, body: object, read: Callable[[bytes], Any]) -> Any:
        return read(json.dumps(await self.post(path, body)).encode())

    async def get(self, path: str) -> Any:
        return {"tp_size": 1}

    async def post_sampling(self, path: str, body: object, read: Callable[[bytes], Any]) -> Any:
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
        asyncio.run(adapter.generate(server, replace(ASKED, start_version=birth), "id"))
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
        for changes in ({}, {"start_version": 2}, {"skips_queue": True}, {"skips_queue": True, "start_version": 9}):
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
    turns, messages = episode(engine, skips_queue=ahead), list[Any](ASK)
    for _ in range(3):
        messages += [(await turns.reply(messages, ())).message, {"role": "user", "content": "On."}]
    asked = engine.asked
    assert [one.start_version for one in asked] == births
    assert {one.skips_queue for one in asked} == {ahead}


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
def test_sglang_keeps_its_cache_over_loads_and_other_orders(tmp_path: Path, salt: str | None, flushes: bool) -> None:
    """Its scheduler ends where it is to flush a cache that running requests use; not at a pause it waits for them."""
    adapter, server = SERVERS["sglang"](MOE), Asked()
    server.salt = salt
    asyncio.run(adapter.boxes(server, tmp_path / "model.safetensors"))
    paths = [path for path, _ in server.asked]
    assert (paths[0], paths[-1]) == ("/pause_generation", "/continue_generation")
    assert server.asked[0][1] == {"mode": "in_place"}
    assert not server.paused
    server.paused, ours = True, len(paths)  # as during a push, whose load resumes it
    asyncio.run(adapter.join(server, tmp_path / "model.safetensors", {}, 1))
    asyncio.run(adapter.load(server, tmp_path / "model.safetensors", 2, private=()))
    assert "/pause_generation" not in [path for path, _ in server.asked[ours:]]
    told = [body["flush_cache"] for path, body in server.asked if path == "/update_weights_from_tensor"]
    assert told == [False, False, flushes]


@pytest.mark.parametrize("routes", [True, False])
@pytest.mark.parametrize(("mode", "sent"), [("recompute", "abort"), ("keep_cache", "keep_cache"), ("abort", "abort")])
async def test_a_push_aborts_where_a_server_would_return_routes_of_other_weights(
    fakes: list[Fake], mode: RunningRequests, sent: str, routes: bool
) -> None:
    """What SGLang returns then: tests/engines/test_servers.py, test_a_running_request_goes_on_over_an_update."""
    engine, modes = engine_of(fakes[:1], running_requests=mode), list[str]()
    engine.adapter.hooks = (SGLangRoutes("replay", MOE),)

    def answer(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        if path == "/pause":
            modes.append(body["mode"])
        return 200, {}

    fakes[0].answer = answer
    (server,) = engine.servers
    server.features = {"replay": routes}
    await push(engine, 1)
    assert modes == [sent if routes else mode]


@pytest.mark.parametrize("asking", ["algorithm.routing_replay=r3", "train.route_flips=true"])
def test_runs_with_routes_may_be_ahead(asking: str) -> None:
    for engine, mode in (("sglang", "recompute"), ("sglang", "abort"), ("vllm", "recompute"), ("local", "keep_cache")):
        keys = [f"rollout={engine}", asking, "train.max_staleness=2", f"rollout.server.running_requests={mode}"]
        load_config("tiny_cpu", [*keys, *(["rollout.server.replicas=1"] if engine == "local" else [])])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("running_requests=keep",), r"what 'keep' did is called recompute"),
        (
            ("running_requests=keep_cache", "algorithm.routing_replay=r3"),
            r"keep_cache with .*algorithm\.routing_replay=r3: a server whose cache is full computes a completion again"
            r".*older weights sampled.*set running_requests=abort, or leave routes out",
        ),
        (("running_requests=keep_cache", "train.route_flips=true"), r"keep_cache with .*train\.route_flips=true"),
        (("running_requests=keep_cache", "rollout.server.colocated=true"), r"nothing is left to keep; leave one"),
    ],
)
def test_what_cannot_be_kept_is_refused(keys: tuple[str, ...], said: str) -> None:
    first, *others = keys
    with pytest.raises(ConfigError, match=said):
        load_config("tiny_cpu", ["rollout=sglang", f"rollout.server.{first}", *others])


# Every transition of a replica's health, and the pairs that are not transitions.
NEXT = {
    (Health.STALE, Event.REFITTED): Health.HEALTHY,
    (Health.STALE, Event.DIED): Health.DEAD,
    (Health.HEALTHY, Event.REFITTED): Health.HEALTHY,
    (Health.HEALTHY, Event.DIED): Health.DEAD,
    (Health.DEAD, Event.RESTARTED): Health.RESTARTING,
    (Health.DEAD, Event.GIVEN_UP): Health.GONE,
    (Health.RESTARTING, Event.ANSWERED): Health.STALE,
    (Health.RESTARTING, Event.DIED): Health.DEAD,
}


@pytest.mark.parametrize(("health", "event"), list(product(Health, Event)), ids=lambda value: value.name)
def test_each_event_leads_on_or_cannot_happen(health: Health, event: Event) -> None:
    if (health, event) in NEXT:
        assert next_health(health, event) is NEXT[health, event]
    else:
        with pytest.raises(ValueError, match=f"is {health.value} cannot become"):
            next_health(health, event)


def test_a_new_server_never_serves_before_it_was_refitted() -> None:
    """Every way to HEALTHY from a death leads over STALE, and only a refit leads from there."""
    assert [pair for pair, health in NEXT.items() if health is Health.HEALTHY and pair[0] is not Health.HEALTHY] == [
        (Health.STALE, Event.REFITTED)
    ]


def test_transitions_are_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (replica,) = ReplicaSet("x", [Server("http://127.0.0.1:1", token=None, timeout_seconds=1.0)]).all
    for event in (Event.REFITTED, Event.DIED, Event.RESTARTED, Event.ANSWERED, Event.REFITTED):
        replica.apply(event, "killed" if event is Event.DIED else "")
    assert [record.getMessage() for record in caplog.records] == [
        "replica 0: STALE -> HEALTHY",
        "replica 0: killed\nHEALTHY -> DEAD",
        "replica 0: DEAD -> RESTARTING",
        "replica 0: RESTARTING -> STALE",
        "replica 0: STALE -> HEALTHY",
    ]


async def test_the_error_of_a_server_is_not_its_successors(monkeypatch: pytest.MonkeyPatch) -> None:
    """One order failed of its death; it is back by the time that the others have carried theirs out."""
    monkeypatch.setattr(weights, "_GRACE_SECONDS", 0.0)
    servers = [Server(f"http://127.0.0.1:{port}", token=None, timeout_seconds=1.0) for port in (1, 2)]
    replicas = ReplicaSet("x", servers)
    died, lives = replicas.all
    of_all = weights.ReplicaWeights(cast("Any", None), replicas, ServerSection(), cast("Any", None))

    async def order(replica: Replica) -> str:
        if replica is died:
            raise ConnectionBroken("connection reset")
        await asyncio.sleep(0)
        for event in (Event.DIED, Event.RESTARTED):
            died.apply(event, "killed")
        died.server = Server("http://127.0.0.1:3", token=None, timeout_seconds=1.0)
        died.apply(Event.ANSWERED)
        return "loaded"

    expected = {servers[1].url: "loaded"}
    assert await of_all.call_each({one: one.server for one in (died, lives)}, "a push", order) == expected
    assert not died.suspected.is_set()


async def test_an_order_waits_until_the_supervisor_knows_if_a_server_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine its end is known long after its connections are."""
    monkeypatch.setattr(weights, "_GRACE_SECONDS", 0.0)
    servers = [Server(f"http://127.0.0.1:{port}", token=None, timeout_seconds=1.0) for port in (1, 2)]
    replicas = ReplicaSet("x", servers)
    died, lives = replicas.all
    died.supervised = lives.supervised = True
    of_all = weights.ReplicaWeights(cast("Any", None), replicas, ServerSection(), cast("Any", None))

    async def order(replica: Replica) -> str:
        if replica is died:
            raise ConnectionBroken("connection reset")
        return "loaded"

    async def supervisor() -> None:
        await died.suspected.wait()
        for _ in range(100):  # turns of the loop
            await asyncio.sleep(0)
        died.apply(Event.DIED, "killed")

    supervising = asyncio.create_task(supervisor())
    told = {one: one.server for one in (died, lives)}
    assert await of_all.call_each(told, "a push", order) == {servers[1].url: "loaded"}
    await supervising
