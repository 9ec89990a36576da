"""Retries, replicas, versions and limits of engine servers, with real HTTP and an adapter of a few lines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest

from rl_megatron.config.sections.rollout import RunningRequests, ServerSection
from rl_megatron.errors import EngineError, SyncError
from rl_megatron.rollout.servers.adapter import Adapter, Command, Description, Labels, StartOptions
from rl_megatron.rollout.servers.engine import ServedEngine
from rl_megatron.rollout.servers.http import Server
from rl_megatron.types import Completion, GenerationRequest, SamplingParams
from rl_megatron.weights.checks.reports import Report
from rl_megatron.weights.layouts.recorded import Boxes
from tests.completions import completion

Answer = Callable[[str, dict[str, Any], int], tuple[int, object]]
PARAMS = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=2, stop_token_ids=(), seed=0)
REQUEST = GenerationRequest(id="step 1: 2+2=", token_ids=(1, 2), num_completions=1, params=PARAMS)
SECTION = ServerSection(timeout_seconds=60.0, concurrency=3)

LABELS = Labels()
LABELS.start = "t"


class Words(Adapter):
    """An adapter whose server answers {"label": ...} to /generate, and "tokens" and "finish" where it likes."""

    name, module, tested, renormalises_top_p = "Words", "words", "1", True

    def command(self, options: StartOptions) -> Command:
        raise NotImplementedError

    async def describe(self, server: Server) -> Description:
        raise NotImplementedError

    async def generate(self, server: Server, request: GenerationRequest, request_id: str) -> list[Completion]:
        new, birth = request.params.max_new_tokens, request.birth
        body = {"id": request_id, "prompt": request.token_ids, "new": new, "birth": birth}
        answer = {"tokens": [7], "finish": "stop", **await server.sampled("/generate", body, json.loads)}
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

    async def score(self, server: Server, text: Sequence[int]) -> list[float]:
        raise NotImplementedError

    async def load(
        self, server: Server, path: Path, version: int, *, private: Collection[str], straight: bool = False
    ) -> list[Report]:
        await server.post("/load", {"label": LABELS.candidate(version)})
        return []

    async def boxes(self, server: Server, path: Path) -> list[Boxes]:
        await server.post("/boxes")
        return []

    async def join(self, server: Server, path: Path, rendezvous: Mapping[str, object], first: int) -> None:
        raise NotImplementedError

    async def relabel(self, server: Server, version: int) -> None:
        await server.post("/relabel", {"label": LABELS.verified(version)})

    async def release(self, server: Server) -> None:
        await server.post("/release")

    async def reclaim(self, server: Server, what: Literal["weights", "cache"]) -> None:
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


def engine_of(fakes: list[Fake], **changes: Any) -> ServedEngine:
    section = SECTION.model_copy(update=changes)
    servers = [Server(fake.url, token="t", timeout_seconds=section.timeout_seconds) for fake in fakes]
    return ServedEngine(Words(), servers, section, max_length=8, vocab_size=10)


async def push(engine: ServedEngine, version: int) -> None:
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
        ((200, {"label": "default"}), "labelled 'default', which this run did not push", 1),
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
    three = threading.Barrier(SECTION.concurrency)

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
async def test_requests_that_a_server_would_mistreat_are_not_sent(
    fakes: list[Fake], changes: dict[str, Any], said: str
) -> None:
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
