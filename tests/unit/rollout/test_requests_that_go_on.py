"""Requests that go on from tokens sampled before, and where requests of one prompt go; with real HTTP."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rl_megatron.errors import EngineError
from rl_megatron.rollout.local.engine import LocalEngine
from rl_megatron.rollout.servers.http import Server
from rl_megatron.rollout.servers.places import Places
from rl_megatron.rollout.servers.replicas import Replica
from tests.completions import completion, plain
from tests.unit.rollout.test_engine_servers import PARAMS, REQUEST, Fake, engine_of, push, running

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
        going = asyncio.create_task(engine.generate(replace(LONG, begun=BEGUN)))
        await asyncio.sleep(0)
        known = engine.so_far(LONG.id)
        (whole,) = await going
        assert known is BEGUN
        assert engine.so_far(LONG.id) is None
    assert asked == [([1, 2, 3, 4], 3)]
    expected = ([3, 4, 5, 6, 7], [-1.0, -2.0, -0.5, -0.5, -0.5], "length", ((0, 1), (1, 2), (2, 7)), None)
    assert plain(whole) == expected


@pytest.mark.parametrize(("tokens", "finish"), [((3, 9), "stop"), ((1, 2, 3, 4, 5), "length")])
async def test_what_was_begun_and_had_ended_is_the_answer(
    fakes: list[Fake], tokens: tuple[int, ...], finish: str
) -> None:
    engine = engine_of(fakes)
    await push(engine, 7)
    (one,) = await engine.generate(replace(LONG, begun=completion(tokens, finish="abort", spans=((0, 3),))))
    assert plain(one) == (list(tokens), [-0.5] * len(tokens), finish, ((0, 3),), None)
    assert "/generate" not in fakes[0].asked + fakes[1].asked


async def test_what_was_begun_is_one_completion(fakes: list[Fake], make_engine: Any) -> None:
    engine = engine_of(fakes)
    await push(engine, 7)
    with pytest.raises(EngineError, match="num_completions=2, but what was begun is one completion"):
        await engine.generate(replace(LONG, begun=BEGUN, num_completions=2))
    local: LocalEngine = make_engine(4)
    local.serve(1)
    with pytest.raises(EngineError, match=r"does not go on from what was begun; send it without, or set rollout=vllm"):
        local.generate([replace(LONG, begun=BEGUN)])


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
            await engine.interrupt()
        known = engine.so_far(LONG.id)
        go_on.set()
        (whole,) = await going
    assert known is not None
    assert plain(known) == ([3, 4], [-0.5] * 2, "abort", ((0, 7),), None)
    assert plain(whole) == ([3, 4, 5, 6, 8], [-0.5] * 5, "length", ((0, 7),), None)
    assert asked == [([1, 2], 5), ([1, 2, 3, 4], 3)]


def replicas_of(count: int) -> list[Replica]:
    return [
        Replica(n, Server(f"http://localhost:{n}", token=None, timeout_seconds=1.0), lambda: None) for n in range(count)
    ]


def test_completions_of_a_prompt_stay_together_until_that_is_two_slots_uneven() -> None:
    replicas, places, sent = replicas_of(2), Places(), list[int]()
    for number in range(6):
        one = places.choose(replace(REQUEST, id=f"{number}", group="a"), replicas, None)
        one.server.in_flight += 1
        sent.append(one.number)
    assert sent == [0, 0, 1, 1, 0, 1]  # two ahead, then to the other; from then on both have the prompt


def test_prompts_are_computed_on_fewer_replicas_and_these_stay_even() -> None:
    """Beside the least busy replica for each: 128 prompts of 16 completions, 4 replicas of 128 slots, random ends."""

    def copies(*, grouped: bool) -> float:
        draw, replicas, places = random.Random(1), replicas_of(4), Places()
        held, running = set[tuple[int, int]](), list[Replica]()
        for prompt in range(128):
            for member in range(16):
                request = replace(REQUEST, id=f"{prompt} {member}", group=f"{prompt}" if grouped else None)
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
    replicas, places = replicas_of(3), Places()
    first = places.choose(replace(REQUEST, id="mine", group="a"), replicas, None)
    others = [replica for replica in replicas if replica is not first]
    places.choose(replace(REQUEST, id="another", group="a"), others, None)
    assert places.choose(replace(REQUEST, id="mine", group="a"), replicas, None) is first
    assert places.choose(replace(REQUEST, id="mine", group="a"), replicas, first) is not first
    first.server = Server("http://localhost:0", token=None, timeout_seconds=1.0)  # it was restarted: its cache is empty
    first.server.in_flight = 1
    assert places.choose(replace(REQUEST, id="new", group="a"), replicas, None) is not first


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
