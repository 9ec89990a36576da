"""Requests to servers, with real HTTP: continued, cancelled or over their time, who may ask, and teachers' scores."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from rl_megatron.config.io import load_config
from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.config.sections.teachers import TeacherSection
from rl_megatron.data.packing import Packer, unpack
from rl_megatron.data.samples import to_samples
from rl_megatron.engines import engine_token, requests
from rl_megatron.engines.answers import TopLogprobs
from rl_megatron.engines.engine import ServerEngine
from rl_megatron.engines.engine_token import AuthMiddleware
from rl_megatron.engines.http import AttemptFailed, ConnectionBroken, Server, ServerUnreachable
from rl_megatron.engines.local.engine import LocalEngine
from rl_megatron.engines.replicas import Replica
from rl_megatron.engines.requests import ReplicaChooser
from rl_megatron.errors import ConfigError, EngineError
from rl_megatron.features.teachers.served import ServedTeacher
from rl_megatron.types import Batch, Completion, ParallelDims, Prompt, RolloutGroup, Samples, Want
from tests.completions import completion, plain, trajectory
from tests.unit.rollout.test_engine_servers import (
    PARAMS,
    REQUEST,
    SECTION,
    Answer,
    Fake,
    Words,
    engine_of,
    push,
    running,
)
from tests.virtual_time import run_at_once

LIMIT = 300.0


@pytest.fixture
def fakes() -> Iterator[list[Fake]]:
    with running(2) as both:
        yield both


LONG = replace(REQUEST, params=replace(PARAMS, max_new_tokens=5, stop_token_ids=(9,)))
BEGUN = completion((3, 4), (-1.0, -2.0), finish="abort", spans=((0, 1), (1, 2)))


async def test_a_request_goes_on_from_what_was_begun_by_versions_before() -> None:
    asked: list[tuple[list[int], int]] = []

    def answer(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        if path != "/generate":
            return 200, {}
        asked.append((body["prompt"], body["new"]))
        return 200, {"label": "7@t", "tokens": [5, 6, 7], "finish": "length"}

    with running(1) as (fake,):
        fake.answer = answer
        engine = engine_of([fake])
        await push(engine, 7)
        going = asyncio.create_task(engine.generate(replace(LONG, partial=BEGUN)))
        await asyncio.sleep(0)
        known = engine.partial_completion(LONG.id)
        (whole,) = await going
        assert known is BEGUN
        assert engine.partial_completion(LONG.id) is None
    assert asked == [([1, 2, 3, 4], 3)]
    assert plain(whole) == ([3, 4, 5, 6, 7], [-1.0, -2.0, -0.5, -0.5, -0.5], "length", ((0, 1), (1, 2), (2, 7)), {})


@pytest.mark.parametrize(("tokens", "finish"), [((3, 9), "stop"), ((1, 2, 3, 4, 5), "length")])
async def test_an_answer_that_had_ended_is_taken(fakes: list[Fake], tokens: tuple[int, ...], finish: str) -> None:
    engine = engine_of(fakes)
    await push(engine, 7)
    (one,) = await engine.generate(replace(LONG, partial=completion(tokens, finish="abort", spans=((0, 3),))))
    assert plain(one) == (list(tokens), [-0.5] * len(tokens), finish, ((0, 3),), {})
    assert "/generate" not in fakes[0].asked + fakes[1].asked


async def test_what_was_begun_is_one_completion(fakes: list[Fake], make_engine: Any) -> None:
    engine = engine_of(fakes)
    await push(engine, 7)
    with pytest.raises(EngineError, match="num_completions=2, but what was begun is one completion"):
        await engine.generate(replace(LONG, partial=BEGUN, num_completions=2))
    local: LocalEngine = make_engine(4)
    local.serve(1)
    with pytest.raises(EngineError, match=r"does not go on from what was begun; send it without, or set rollout=vllm"):
        local.generate([replace(LONG, partial=BEGUN)])


@pytest.mark.parametrize("overtaken", [False, True], ids=["", "the first abort arrives too early"])
async def test_an_interrupt_knows_all_tokens_and_loses_none(overtaken: bool) -> None:
    """The push before did not abort: version 7 is served all the time."""
    with running(1) as (fake,):
        aborted, go_on, asked = threading.Event(), threading.Event(), list[tuple[list[int], int]]()
        ignored: list[str] = []

        def answer(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
            if path == "/abort":
                if overtaken and not ignored:
                    ignored.append(body["id"])
                else:
                    aborted.set()
            if path != "/generate":
                return 200, {}
            asked.append((body["prompt"], body["new"]))
            if len(asked) == 1:
                assert aborted.wait(LIMIT)
                return 200, {"label": "7@t", "tokens": [3, 4], "finish": "abort"}
            assert go_on.wait(LIMIT)
            return 200, {"label": "7@t", "tokens": [5, 6, 8], "finish": "length"}

        fake.answer = answer
        engine = engine_of([fake])
        await push(engine, 7)
        going = asyncio.create_task(engine.generate(LONG))
        while not asked:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(LIMIT):
            await engine.collect_partials()
        known = engine.partial_completion(LONG.id)
        go_on.set()
        (whole,) = await going
    assert known is not None
    assert plain(known) == ([3, 4], [-0.5] * 2, "abort", ((0, 7),), {})
    assert plain(whole) == ([3, 4, 5, 6, 8], [-0.5] * 5, "length", ((0, 7),), {})
    assert asked == [([1, 2], 5), ([1, 2, 3, 4], 3)]


def replicas_of(count: int) -> list[Replica]:
    return [
        Replica(n, Server(f"http://localhost:{n}", token=None, timeout_seconds=1.0), lambda: None) for n in range(count)
    ]


def test_completions_of_a_prompt_stay_together_until_that_is_two_slots_uneven() -> None:
    replicas, places, sent = replicas_of(2), ReplicaChooser(), list[int]()
    for number in range(6):
        one = places.choose(replace(REQUEST, id=f"{number}", prefix_group="a"), replicas, None)
        one.server.in_flight += 1
        sent.append(one.number)
    assert sent == [0, 0, 1, 1, 0, 1]  # two ahead, then to the other; from then on both have the prompt


def test_prompts_are_computed_on_fewer_replicas_and_these_stay_even() -> None:
    """Beside the least busy replica for each: 128 prompts of 16 completions, 4 replicas of 128 slots, random ends."""

    def copies(*, grouped: bool) -> float:
        draw, replicas, places = random.Random(1), replicas_of(4), ReplicaChooser()
        held, running = set[tuple[int, int]](), list[Replica]()
        for prompt in range(128):
            for member in range(16):
                request = replace(REQUEST, id=f"{prompt} {member}", prefix_group=f"{prompt}" if grouped else None)
                least = min(replica.server.in_flight for replica in replicas)
                one = places.choose(request, replicas, None)
                assert one.server.in_flight - least < max(2, least / 16)
                one.server.in_flight += 1
                running.append(one)
                held.add((prompt, one.number))
                while len(running) > 512:
                    running.pop(draw.randrange(len(running))).server.in_flight -= 1
        return len(held) / 128

    assert copies(grouped=False) > 3.9  # nearly every replica computes every prompt
    assert copies(grouped=True) < 2.5


def test_what_goes_on_goes_where_its_own_tokens_are_but_never_where_it_failed() -> None:
    replicas, places = replicas_of(3), ReplicaChooser()
    first = places.choose(replace(REQUEST, id="mine", prefix_group="a"), replicas, None)
    others = [replica for replica in replicas if replica is not first]
    places.choose(replace(REQUEST, id="another", prefix_group="a"), others, None)
    assert places.choose(replace(REQUEST, id="mine", prefix_group="a"), replicas, None) is first
    assert places.choose(replace(REQUEST, id="mine", prefix_group="a"), replicas, first) is not first
    first.server = Server("http://localhost:0", token=None, timeout_seconds=1.0)  # it was restarted: its cache is empty
    first.server.in_flight = 1
    assert places.choose(replace(REQUEST, id="new", prefix_group="a"), replicas, None) is not first


@pytest.mark.parametrize("sampled", [[3], []])
async def test_what_a_server_ends_that_shuts_down_goes_on_at_another(fakes: list[Fake], sampled: list[int]) -> None:
    """vLLM answers what it samples with aborted completions when it gets SIGTERM, and what comes then too."""
    leaving, rest = fakes
    leaving.answer = lambda path, body, number: (200, {"label": "1@t", "tokens": sampled, "finish": "abort"})
    rest.answer = lambda path, body, number: (200, {"label": "1@t", "tokens": [4] * body.get("new", 0)})
    engine = engine_of(fakes)
    await push(engine, 1)
    done = (await engine.generate(REQUEST))[0]
    assert (done.token_ids.tolist(), done.finish_reason) == ([*sampled, *[4] * (2 - len(sampled))], "stop")
    assert (leaving.asked.count("/generate"), rest.asked.count("/generate")) == (1, 1)


async def test_what_servers_go_on_ending_without_an_update_is_an_error(fakes: list[Fake]) -> None:
    for fake in fakes:
        fake.answer = lambda path, body, number: (200, {"label": "1@t", "tokens": [], "finish": "abort"})
    engine = engine_of(fakes)
    await push(engine, 1)
    with pytest.raises(EngineError, match=r"aborted it after 0 tokens, although weight version 1 was served all the"):
        await engine.generate(REQUEST)
    assert sum(fake.asked.count("/generate") for fake in fakes) == 4


def test_what_was_sent_last_is_remembered_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_megatron.engines.requests._REMEMBERED", 2)
    places = ReplicaChooser()
    for number in range(3):
        places.choose(replace(REQUEST, id=f"{number}", prefix_group=None), replicas_of(1), None)
    assert [*places._servers] == ["1", "2"]


def test_the_wait_before_a_retry_doubles_with_each_failure_that_nothing_explains() -> None:
    (replica,) = replicas_of(1)

    async def waited(unexplained: int) -> float:
        async def too_many(failures: object) -> bool:
            return False

        of: Any = SimpleNamespace(_too_many=too_many, _count_unexplained=lambda failures: unexplained)
        failure = requests.AttemptError(replica, replica.server, None)
        await requests.RequestRetrier._wait(of, REQUEST, AttemptFailed("http://h: status 500"), [failure])
        return asyncio.get_running_loop().time()

    assert [run_at_once(waited(failures)) / requests._WAIT for failures in range(4)] == [1, 1, 2, 4]


def test_a_time_limit_counts_its_attempts_and_is_twice_as_long_once_it_was_over() -> None:
    async def spent() -> requests.CompletionDeadline:
        limit = requests.CompletionDeadline(limit=3.0)
        for seconds in (1.0, 1.5):
            await asyncio.sleep(7.0)
            limit.start()
            await asyncio.sleep(seconds)
            limit.stop()
        return limit

    limit = run_at_once(spent())
    assert (limit.elapsed, limit.left) == (2.5, 0.5)
    limit.has_expired = True
    limit.extend()
    assert (limit.limit, limit.elapsed) == (6.0, 0.0)


async def test_of_a_request_that_was_answered_whole_nothing_is_kept(fakes: list[Fake]) -> None:
    engine = engine_of(fakes)
    await push(engine, 7)
    await engine.generate(REQUEST)
    asked = engine.attempts
    assert (asked.so_far, asked.aborted, asked.interrupts) == ({}, {}, 0)
    await asked.interrupt()
    assert asked.interrupts == 1


# Completions that run longer than ``rollout.completion_timeout_seconds`` end where they are, and count as truncated.
TIMED = replace(REQUEST, params=replace(PARAMS, max_new_tokens=5, stop_token_ids=(9,)), max_seconds=0.05)


class Slow:
    """A server that answers a request once it is to abort it, each time with the next of ``parts``."""

    def __init__(self, *parts: list[int]) -> None:
        self.parts, self.asked, self.seconds = list(parts), list[tuple[list[int], int]](), 0.0  # of the caller's
        self.aborted: dict[str, threading.Event] = {}

    def __call__(self, path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        if path in ("/generate", "/abort"):
            aborted = self.aborted.setdefault(body["id"], threading.Event())
        if path == "/abort":
            aborted.set()
        if path != "/generate":
            return 200, {}
        self.asked.append((body["prompt"], body["new"]))
        assert aborted.wait(LIMIT)
        return 200, {"label": "7@t", "tokens": self.parts.pop(0), "finish": "abort"}


def sampled(slow: Slow, answer: Answer | None = None, **changes: Any) -> list[Completion]:
    async def ask() -> list[Completion]:
        engine = engine_of([fake])
        await push(engine, 7)
        fake.answer = answer or slow
        began = time.monotonic()
        try:
            return list(await engine.generate(replace(TIMED, **changes)))
        finally:
            slow.seconds = time.monotonic() - began
            await engine.close()

    with running(1) as (fake,):
        return asyncio.run(ask())


def test_a_completion_that_runs_too_long_ends_with_what_it_has() -> None:
    slow = Slow([3, 4])
    (late,) = sampled(slow)
    assert plain(late) == ([3, 4], [-0.5] * 2, "length", ((0, 7),), {})
    assert slow.seconds >= 0.05  # it had its time
    assert slow.asked == [([1, 2], 5)]


def test_one_that_ends_at_that_moment_has_its_own_reason() -> None:
    (stopped,) = sampled(Slow([3, 9]))
    assert plain(stopped) == ([3, 9], [-0.5] * 2, "stop", ((0, 7),), {})


def test_one_without_a_token_waited_for_a_slot_and_gets_twice_as_long_each_time() -> None:
    slow = Slow([], [], [3])
    (late,) = sampled(slow)
    assert plain(late) == ([3], [-0.5], "length", ((0, 7),), {})
    assert [prompt for prompt, _ in slow.asked] == [[1, 2]] * 3
    assert slow.seconds >= 0.05 + 0.1 + 0.2


def test_what_was_begun_before_a_resume_has_its_time_again() -> None:
    slow = Slow([5])
    (late,) = sampled(slow, partial=completion((3, 4), finish="abort", spans=((0, 2),)))
    assert plain(late) == ([3, 4, 5], [-0.5] * 3, "length", ((0, 2), (2, 7)), {})
    assert slow.seconds >= 0.05


def test_what_its_time_had_ended_before_a_resume_stays_ended() -> None:
    slow, ended = Slow([5]), completion((3, 4), finish="length", spans=((0, 2),))
    (late,) = sampled(slow, partial=ended)
    assert plain(late) == plain(ended)
    assert slow.asked == []


def test_the_completions_of_one_request_end_together() -> None:
    late = sampled(Slow([3, 4]), num_completions=3)
    assert [plain(one) for one in late] == [([3, 4], [-0.5] * 2, "length", ((0, 7),), {})] * 3


def test_time_between_attempts_and_in_attempts_that_failed_does_not_count() -> None:
    """Twice the server fails after most of the time, and the third attempt has all of it."""
    slow, times = Slow([3, 4]), list[float]()

    def failing(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        if path == "/generate" and len(times) < 2:
            times.append(time.monotonic())
            while time.monotonic() < times[-1] + 0.2:
                pass
            return 500, {}
        return slow(path, body, number)

    (late,) = sampled(slow, failing, max_seconds=0.25)
    assert late.finish_reason == "length"
    assert len(times) == 2
    assert slow.seconds >= 0.2 + 0.2 + 0.25


@pytest.mark.parametrize("keys", [[], ["rollout.server.replicas=2"], ["rollout=vllm"]])
def test_only_servers_can_end_a_completion_before_the_others(keys: list[str]) -> None:
    given = [*keys, "rollout.completion_timeout_seconds=30"]
    if keys:
        assert load_config("tiny_cpu", given).rollout.completion_timeout_seconds == 30
        return
    said = "timeout_seconds=30 with rollout.engine=local: .* a whole batch in one call, .* set rollout.server.replicas"
    with pytest.raises(ConfigError, match=said):
        load_config("tiny_cpu", given)


# Cancelled requests, and requests that wait behind no other, with real HTTP.
@pytest.mark.parametrize("hangs", [False, True])
async def test_a_cancelled_request_is_aborted_where_it_runs_and_the_end_of_a_run_says_where_it_could_not(
    hangs: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The end waits a short time: not for as long as a request may take, the limit of the abort's answer too."""
    over = threading.Event()

    def answer(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        if path == "/generate" or (hangs and path == "/abort"):
            over.wait(LIMIT)
        return 200, {}

    with running(1) as (fake,):
        engine = engine_of([fake])
        await push(engine, 4)
        fake.answer = answer
        asked = asyncio.create_task(engine.generate(REQUEST))
        for path in ("/generate", "/abort"):
            async with asyncio.timeout(LIMIT):
                while path not in fake.asked:
                    await asyncio.sleep(0.01)
            asked.cancel()
        if hangs:
            monkeypatch.setattr(requests, "_CLOSE_SECONDS", 0.2)
        else:
            over.set()
        await engine.close()
        over.set()
        assert (f"aborted requests are left: no answer from {fake.url} in 0.2 s" in caplog.text) == hangs


async def test_an_evaluation_does_not_wait_behind_what_is_sampled_ahead() -> None:
    evaluated = threading.Event()

    def behind(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        if body["id"].startswith("evaluation"):
            evaluated.set()
        else:
            evaluated.wait(SECTION.timeout_seconds)
        return 200, {"label": "1@t"}

    with running(1) as (fake,):
        engine = engine_of([fake])
        await push(engine, 1)
        fake.answer = behind
        later = replace(REQUEST, start_version=0)  # as a trajectory's later turns
        ahead = [asyncio.ensure_future(engine.generate(later)) for _ in range(2 * SECTION.max_concurrent_groups)]
        await asyncio.sleep(0)
        await engine.generate(replace(REQUEST, id="evaluation: 2+2=", skips_queue=True))
        await asyncio.gather(*ahead)
        await engine.close()


# Requests with long prompts, over real HTTP. docs/environments.md has what they take of the event loop.
TOKENS = tuple(range(100_000, 350_000))  # as an agent's history


async def test_a_long_prompt_arrives_whole() -> None:
    received = list[object]()
    with running(1) as (fake,):

        def answer(path: str, body: dict[str, object], number: int) -> tuple[int, object]:
            received.append(body.get("prompt"))
            return 200, {"label": fake.label}

        fake.answer = answer
        server = Server(fake.url, token=None, timeout_seconds=60.0)
        engine = ServerEngine(Words(), [server], ServerSection(), max_length=300_000, vocab_size=400_000)
        await push(engine, 1)
        await engine.generate(replace(REQUEST, token_ids=TOKENS))
        await engine.close()
    assert received.count([*TOKENS]) == 1


@pytest.mark.parametrize("stray", [-1, 400_000])
async def test_a_token_id_that_the_model_lacks_is_found_wherever_it_is(stray: int) -> None:
    server = Server("http://127.0.0.1:1", token=None, timeout_seconds=60.0)
    engine = ServerEngine(Words(), [server], ServerSection(), max_length=300_000, vocab_size=400_000)
    for place in (0, 7, len(TOKENS)):
        given = (*TOKENS[:place], stray, *TOKENS[place:])
        with pytest.raises(EngineError, match=r"token ids in \[0, 400000\), got \("):
            await engine.generate(replace(REQUEST, token_ids=given))
    await engine.close()


# A server that closes idle connections just as a request is sent on one.
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n7"


def answers(*, method: str, dies: bool) -> tuple[list[int | type[AttemptFailed]], int]:
    """What two requests find at a server that answers the first one of each connection and closes it at the second,
    where it may also stop listening, and how many connections it took."""
    taken = 0

    async def run() -> list[int | type[AttemptFailed]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal taken
            taken += 1
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ANSWER)
            await reader.readuntil(b"\r\n\r\n")
            if dies:
                listening.close()
            writer.close()

        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        server = Server(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", token=None, timeout_seconds=30.0)
        found: list[int | type[AttemptFailed]] = []
        try:
            for _ in range(2):
                try:
                    found.append(await (server.get("/tokens") if method == "GET" else server.post("/tokens")))
                except AttemptFailed as error:
                    found.append(type(error))
        finally:
            await server.close()
            listening.close()
        return found

    return asyncio.run(run()), taken


def test_what_changes_nothing_is_asked_again_on_a_new_connection() -> None:
    assert answers(method="GET", dies=False) == ([7, 7], 2)


def test_a_server_that_died_of_it_is_not_there_the_second_time() -> None:
    assert answers(method="GET", dies=True) == ([7, ServerUnreachable], 1)


@pytest.mark.parametrize("dies", [False, True])
def test_a_request_that_may_have_acted_is_not_repeated(dies: bool) -> None:
    assert answers(method="POST", dies=dies) == ([7, ConnectionBroken], 1)


# A server requires the token from every request: no path or method reaches the app without it.
TOKEN = "3f9a"
GOOD = [(b"host", b"here"), (b"authorization", b"Bearer 3f9a")]
STRANGERS = [[], [(b"authorization", b"Bearer 3f9")], [(b"authorization", b"3f9a")], [(b"authorization", b"Bearer ")]]


def said(kind: str, headers: list[tuple[bytes, bytes]], method: str = "POST", path: str = "/x") -> list[Any]:
    """What the server says to one request; the app behind it says ``in``."""
    out: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send("in")

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("it reads what a stranger sends")

    async def send(message: Any) -> None:
        out.append(message)

    asyncio.run(AuthMiddleware(app)({"type": kind, "headers": headers, "method": method, "path": path}, receive, send))
    return out


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(engine_token.VARIABLE, TOKEN)


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize("path", ["/health", "/metrics", "/collective_rpc", "/v1/models"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_no_path_and_no_method_is_open(method: str, path: str) -> None:
    assert said("http", GOOD, method, path) == ["in"]
    for headers in STRANGERS:
        start, body = said("http", headers, method, path)
        assert (start["status"], body["body"]) == (401, b"")


@pytest.mark.usefixtures("token")
def test_a_stranger_gets_no_socket_either() -> None:
    assert said("websocket", GOOD) == ["in"]
    assert [one["type"] for one in said("websocket", [])] == ["websocket.close"]


@pytest.mark.usefixtures("token")
def test_a_server_that_was_given_no_token_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said("lifespan", []) == ["in"]
    monkeypatch.delenv(engine_token.VARIABLE)
    with pytest.raises(KeyError, match=engine_token.VARIABLE):
        said("http", GOOD)


def test_a_server_that_answers_strangers_is_known() -> None:
    with running(1) as (fake,):
        server = Server(fake.url, token="t", timeout_seconds=5.0)
        for status, opened in ((200, True), (401, False), (403, False), (404, True)):
            fake.answer = lambda path, body, number, status=status: (status, {})
            assert asyncio.run(server.allows_unauthenticated()) is opened
        assert set(fake.asked) == {"/openapi.json"}


# A teacher behind servers as a frozen model: what it is asked, and what its answers make.
VOCABULARY, TOP = 12, 3


def told(text: Sequence[int], scale: float) -> list[float]:
    """Log-probs of the tokens behind the first, which say both tokens and the place."""
    return [-scale * (1 + 0.1 * place + text[place - 1] + 0.01 * text[place]) for place in range(1, len(text))]


class Told(Words):
    async def score_top(self, server: Server, text: Sequence[int], top: int) -> TopLogprobs:
        said = await server.post_sampling("/judge", {"text": list(text), "top": top}, json.loads)
        ids = np.array(said["ids"], np.int32).reshape(len(text) - 1, top)
        return TopLogprobs(
            logprobs=np.array(said["logprobs"], np.float32), top_ids=ids, top_logprobs=-0.5 * ids.astype(np.float32) - 1
        )


def teaches(fake: Fake, scale: float, *, first: int = 0) -> list[list[int]]:
    """Have the server answer, with probable tokens from ``first`` on; the texts that it was asked for."""
    texts = list[list[int]]()

    def answer(path: str, body: dict[str, Any], number: int) -> tuple[int, dict[str, Any]]:
        texts.append(body["text"])
        ids = [[first + k for k in range(body["top"])] for _ in body["text"][1:]]
        return 200, {"logprobs": told(body["text"], scale), "ids": ids}

    fake.answer = answer
    return texts


def teacher(fake: Fake, top: int = TOP, **keys: Any) -> ServedTeacher:
    section = TeacherSection.model_validate({"server": fake.url, "engine": "vllm", "path": "t", **keys})
    return ServedTeacher(name="t", section=section, adapter=Told(), top=top, vocab_size=VOCABULARY)


def groups() -> list[RolloutGroup]:
    """Four completions of two prompts, of different lengths."""
    lengths = {"a": (3, 5), "b": (2, 7)}
    return [
        RolloutGroup(
            prompt=Prompt(id=source, text="", token_ids=(1, 2), answer=""),
            trajectories=tuple(trajectory([length], seed=length) for length in of),
        )
        for source, of in lengths.items()
    ]


def packed() -> tuple[Samples, Batch]:
    samples = to_samples(groups())
    return samples, Packer(dims=ParallelDims(dp=2), max_tokens=8, attention_cost=0.0, rows_per_unit=1).pack(samples)


def scored(model: ServedTeacher, want: frozenset[Want]) -> dict[Want, torch.Tensor]:
    samples, batch = packed()

    async def ask() -> dict[Want, torch.Tensor]:
        await model.try_out()
        said = await model.score(batch, want)
        return {name: unpack(batch, rows, samples) for name, rows in said.items()}

    return asyncio.run(ask())


def texts() -> list[list[int]]:
    return [list(one.chains[0].token_ids) for group in groups() for one in group.trajectories]


def test_each_sequence_has_the_log_probs_and_tokens_of_its_teacher() -> None:
    with running(1) as (fake,):
        asked = teaches(fake, 1.0)
        said = scored(teacher(fake), frozenset({"logprobs", "top"}))
    np.testing.assert_allclose(said["logprobs"], np.concatenate([told(one, 1.0) for one in texts()]), rtol=1e-6)
    assert sorted(asked[1:]) == sorted(texts())  # each once, behind the trial
    assert said["top"].shape == (len(said["logprobs"]), 2, TOP)
    np.testing.assert_array_equal(said["top"][:, 0], np.tile([0.0, 1.0, 2.0], (len(said["logprobs"]), 1)))
    np.testing.assert_array_equal(said["top"][:, 1], -0.5 * said["top"][:, 0] - 1)


def test_all_tokens_are_named_where_the_vocabulary_has_no_more() -> None:
    with running(1) as (fake,):
        teaches(fake, 1.0)
        assert scored(teacher(fake, top=64), frozenset({"top"}))["top"].shape[2] == VOCABULARY


def test_a_failed_attempt_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[float]()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        teaches(fake, 1.0)

    with running(1) as (fake,):
        monkeypatch.setattr(asyncio, "sleep", sleep)
        fake.answer = lambda path, body, number: (500, {})
        said = asyncio.run(teacher(fake).judge([1, 2, 3], 0))
    np.testing.assert_allclose(said.logprobs, told([1, 2, 3], 1.0), rtol=1e-6)
    assert waits == [1.0]


@pytest.mark.parametrize("refusal", [401, 403])
async def test_a_token_is_read_for_each_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int) -> None:
    file = tmp_path / "token"
    file.write_text("old")
    steps, right = ["", "new"], "new"  # who rotates it truncates the file, then writes

    async def sleep(seconds: float) -> None:
        file.write_text(steps.pop(0))

    with running(1) as (fake,):
        teaches(fake, 1.0)
        answer = fake.answer
        fake.answer = lambda path, body, number: (
            answer(path, body, number) if fake.tokens[number] == right else (refusal, {})
        )
        model = teacher(fake, token_file=file)

        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "sleep", sleep)
            said = await model.judge([1, 2, 3], 0)
        np.testing.assert_allclose(said.logprobs, told([1, 2, 3], 1.0), rtol=1e-6)
        for right in map(str, range(4)):
            file.write_text(right)
            await model.judge([1, 2, 3], 0)
        ports = [one.raddr.port for one in psutil.Process().net_connections("tcp") if one.raddr]
        assert fake.server_port not in ports
        assert (steps, len(fake.asked)) == ([], 6)  # old, new, and four more


def test_a_token_that_lacks_or_stays_wrong_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_megatron.features.teachers.served._RETRIES", 0)
    file = tmp_path / "token"
    with running(1) as (fake,):
        with pytest.raises(ConfigError, match=r"algorithm\.kl\.teachers\.t\.token_file=.*No such file"):
            teacher(fake, token_file=file)
        file.write_text("wrong")
        fake.answer = lambda path, body, number: (401, {"why": "unknown"})
        named = (
            rf"teachers\.t: {fake.url}/judge: status 401.*unknown.*refuses the token of .*token_file={file}: .*made: 1"
        )
        with pytest.raises(EngineError, match=named):
            asyncio.run(teacher(fake, token_file=file).judge([1, 2], 0))
        with pytest.raises(EngineError, match=r"status 401.*unknown"):
            asyncio.run(teacher(fake).judge([1, 2], 0))  # it has none to read again
        assert len(fake.asked) == 2


def test_what_goes_on_failing_or_is_refused_ends_with_the_teachers_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_megatron.features.teachers.served._RETRIES", 0)
    with running(1) as (fake,):
        fake.answer = lambda path, body, number: (500, {"why": "tired"})
        with pytest.raises(EngineError, match=r"algorithm\.kl\.teachers\.t: .*tired.*; attempts made: 1$"):
            asyncio.run(teacher(fake).judge([1, 2], 0))
        fake.answer = lambda path, body, number: (400, {"why": "too long"})
        with pytest.raises(EngineError, match=r"algorithm\.kl\.teachers\.t: .*too long"):
            asyncio.run(teacher(fake).judge([1, 2], 0))
        assert len(fake.asked) == 2


def test_a_token_that_the_policy_lacks_and_scores_that_no_server_tells_are_refused() -> None:
    with running(1) as (fake,):
        teaches(fake, 1.0, first=10)
        with pytest.raises(EngineError, match=r"it names token 12, and the policy's last is 11"):
            scored(teacher(fake), frozenset({"top"}))
        with pytest.raises(EngineError, match="returns log-probs, not values"):
            scored(teacher(fake), frozenset({"values"}))
