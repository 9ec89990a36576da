"""Servers join and leave while requests run, with real HTTP: each is answered once, by weights that are served."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from launcher.servers.supervisor import Standing
from rl_megatron.errors import ConfigError, EngineError
from rl_megatron.rollout.servers.replicas import Health
from tests.unit.launcher.test_supervisor import LIMIT, bed, stuck, until
from tests.unit.rollout.test_engine_servers import REQUEST, Fake, running


@pytest.fixture
def fakes() -> Iterator[list[Fake]]:
    with running(3) as some:
        yield some


@pytest.mark.parametrize("drain", [False, True])
async def test_the_requests_of_a_server_that_leaves_are_answered_once(fakes: list[Fake], drain: bool) -> None:
    """Elsewhere from the tokens that it has made, or by itself; it gets no push any more, and is ended last."""
    go, prompts = threading.Event(), list[tuple[list[int], int]]()

    def leaving(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        if path == "/abort":
            go.set()
        if path == "/generate":
            go.wait(LIMIT)
            return 200, {
                "label": "4@t",
                "tokens": [3] if not drain else [3, 5],
                "finish": "length" if drain else "abort",
            }
        return 200, {"label": fakes[0].label}

    def staying(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        if path == "/generate":
            prompts.append((body["prompt"], body["new"]))
        return 200, {"label": fakes[1].label, "tokens": [6] * body.get("new", 0), "finish": "length"}

    async with bed(fakes[:2], []) as it:
        await it.push(4)
        loads = fakes[0].asked.count("/load")
        fakes[0].answer, fakes[1].answer = leaving, staying
        asked = asyncio.create_task(it.engine.generate(REQUEST))
        await until(lambda: "/generate" in fakes[0].asked)
        dropping = asyncio.create_task(it.fleet.drop(0, drain=drain))
        await until(lambda: it.engine.replicas.all[0].health is Health.LEAVING)
        assert [row["state"] for row in it.fleet.rows()] == ["leaving", "healthy"]
        if drain:
            await it.push(5)
            assert not dropping.done()
            assert not it.places[0].was_ended
            go.set()
        await dropping
        ((answer,),) = await asyncio.gather(asked)
        assert answer.token_ids.tolist() == ([3, 5] if drain else [3, 6])
        assert prompts == ([] if drain else [([1, 2, 3], 1)])
        assert answer.spans == ((0, 4),)
        assert it.places[0].was_ended
        await it.push(6)
        assert fakes[0].asked.count("/load") == loads
        assert [(row["number"], row["version"], row["nodes"]) for row in it.fleet.rows()] == [(1, 6, ["node1"])]
        assert it.engine.metrics() == {"engine/healthy": 1, "engine/restarts": 0}


async def test_completions_of_one_request_go_on_from_the_tokens_of_each(fakes: list[Fake]) -> None:
    go = stuck(fakes[0], "/generate")
    async with bed(fakes[:2], []) as it:
        await it.push(4)
        plain = fakes[0].answer

        def ends(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
            if path == "/abort":
                go.set()
            return plain(path, body, number)

        fakes[0].answer = ends
        asked = asyncio.create_task(it.engine.generate(replace(REQUEST, num_completions=3)))
        await until(lambda: "/generate" in fakes[0].asked)
        await it.fleet.drop(0)
        assert [c.spans for c in await asked] == [((0, 4),)] * 3


async def test_a_server_that_dies_as_it_leaves_is_not_started_again(fakes: list[Fake]) -> None:
    async with bed(fakes[:2], fakes[2:]) as it:
        await it.push(4)
        go, deaf = stuck(fakes[0], "/generate"), threading.Event()
        asked = asyncio.create_task(it.engine.generate(REQUEST))
        await until(lambda: "/generate" in fakes[0].asked)
        dropping = asyncio.create_task(it.fleet.drop(0, drain=True))
        await until(lambda: it.engine.replicas.all[0].health is Health.LEAVING)
        it.places[0].why.set_result("killed")
        await dropping
        assert [c.spans for c in await asked] == [((0, 4),)]
        assert [replica.number for replica in it.engine.replicas.all] == [1]
        assert it.engine.metrics() == {"engine/healthy": 1, "engine/restarts": 0}
        go.set()
        deaf.set()


async def test_what_would_leave_too_few_servers_is_refused(fakes: list[Fake]) -> None:
    async with bed(fakes[:2], [], least_replicas=2) as it:
        await it.push(4)
        with pytest.raises(ConfigError, match=r"1 would serve and 1 be left; .*least_replicas=2"):
            await it.fleet.drop(0)
        with pytest.raises(ConfigError, match="server 7: there are 0, 1"):
            await it.fleet.drop(7)
    async with bed(fakes[2:], []) as it:
        await it.push(4)
        with pytest.raises(ConfigError, match="server 0 stays: without it 0 would serve"):
            await it.fleet.drop(0)
        assert (await it.engine.generate(REQUEST))[0].spans == ((0, 4),)


async def test_a_server_that_joins_gets_the_served_weights_and_then_requests(fakes: list[Fake]) -> None:
    """And pushes after that; its number is its own, its place that of one that left."""
    async with bed(fakes[:2], fakes[2:]) as it:
        await it.push(4)
        await it.fleet.drop(0)
        it.may_start.clear()
        adding = asyncio.create_task(it.fleet.add(1))
        await until(lambda: it.fleet.rows()[-1]["state"] == "starting")
        assert [(row["number"], row["nodes"]) for row in it.fleet.rows()] == [(1, ["node1"]), (2, ["node0"])]
        with pytest.raises(ConfigError, match="server 2: it still starts"):
            await it.fleet.drop(2)
        it.may_start.set()
        await adding
        assert [path for path in fakes[2].asked if path != "/health"] == ["/pause", "/load", "/resume", "/relabel"]
        assert fakes[2].label == "4@t"
        go = stuck(fakes[1], "/generate")
        both = [replace(REQUEST, id=name) for name in ("first", "second")]
        asked = [asyncio.create_task(it.engine.generate(request)) for request in both]
        await until(lambda: any(one.done() for one in asked))  # one is at each
        go.set()
        await asyncio.gather(*asked)
        await it.push(5)
        assert fakes[2].label == "5@t"
        it.places[-1].why.set_result("killed")  # it is supervised as others are
        await it.reach(-1, Health.GONE)
        assert (await it.engine.generate(REQUEST))[0].spans == ((0, 5),)


async def test_a_start_that_fails_is_told_and_leaves_the_place_free(fakes: list[Fake]) -> None:
    async with bed(fakes[:2], []) as it:
        await it.push(4)
        await it.fleet.drop(1)
        with pytest.raises(EngineError, match="no more ports"):
            await it.fleet.add(1)
        assert [row["number"] for row in it.fleet.rows()] == [0]
        it.spare.append(fakes[2])
        await it.fleet.add(1, "node1")
        assert [(row["number"], row["nodes"]) for row in it.fleet.rows()] == [(0, ["node0"]), (3, ["node1"])]
        with pytest.raises(ConfigError, match="no server has left a place on node9"):
            await it.fleet.add(1, "node9")


async def test_of_several_that_are_added_each_one_that_fails_is_told(fakes: list[Fake]) -> None:
    """Beside those that joined; a fault that nobody foresaw too, and as much of a long log as a line can have."""
    async with bed(fakes[:1], fakes[1:2]) as it:
        await it.push(4)
        plain, ends = it.fleet._start, iter((EngineError("a" * 9_000 + "x" * 9_000 + "b" * 9_000), OSError("disk")))

        async def start(number: int) -> Standing:
            if number > 1:
                raise next(ends)
            return await plain(number)

        it.fleet._start = start
        with pytest.raises(EngineError) as failed:
            await it.fleet.add(3)
        first, one, middle, rest, other = str(failed.value).splitlines()
        assert first == "2 of 3 servers did not join; 1 did:"
        assert (one[:11], middle, rest[-1]) == ("server 2: a", "[...]", "b")
        assert len(one) + len(rest) < 10_100
        assert other == "server 3: OSError: disk"
        assert [(row["number"], row["state"]) for row in it.fleet.rows()] == [(0, "healthy"), (1, "healthy")]
        it.fleet._start, it.spare = plain, fakes[2:]
        await it.fleet.add(1, "here")  # the others' places are free


@pytest.mark.parametrize("least", [1, 2])
async def test_a_run_goes_on_with_what_there_is_down_to_its_least(fakes: list[Fake], least: int) -> None:
    """One that is given up ends the run only where fewer than ``least`` are left; one that joins takes its place."""
    async with bed(fakes[:2], [], restarts=1, least_replicas=least) as it:
        await it.push(4)
        it.places[0].why.set_result("killed; its log ends with: the node lost power")
        await it.reach(0, Health.GONE)
        if least == 2:
            said = "1 Words server is left, fewer than rollout.server.least_replicas=2:\nno more ports"
            with pytest.raises(EngineError, match=said):
                await it.engine.generate(REQUEST)
            return
        assert (await it.engine.generate(REQUEST))[0].spans == ((0, 4),)
        it.spare.append(fakes[2])
        await it.fleet.add(1)
        assert [(row["number"], row["nodes"]) for row in it.fleet.rows()] == [(1, ["node1"]), (2, ["node0"])]
        assert it.engine.metrics()["engine/healthy"] == 2


async def test_a_server_that_is_dead_or_starts_again_can_be_dropped(fakes: list[Fake]) -> None:
    async with bed(fakes[:2], fakes[2:]) as it:
        await it.push(4)
        it.may_start.clear()
        it.places[0].why.set_result("killed")
        await it.reach(0, Health.RESTARTING)
        await it.fleet.drop(0)
        it.may_start.set()
        assert [replica.number for replica in it.engine.replicas.all] == [1]
        await it.push(5)
        assert fakes[2].asked == []


@pytest.mark.parametrize(
    ("state", "changes"), [(Health.DEAD, {"backoff_seconds": LIMIT}), (Health.GONE, {"restarts": 0})]
)
async def test_a_dead_server_leaves_at_once_and_only_once(
    fakes: list[Fake], state: Health, changes: dict[str, Any]
) -> None:
    """Its place is another's; its row has the first line of why it died."""
    async with bed(fakes[:2], fakes[2:], **changes) as it:
        await it.push(4)
        it.places[0].why.set_result("killed\nits log")
        await it.reach(0, state)
        assert [(row["state"], row["reason"]) for row in it.fleet.rows()] == [
            (state.value, "killed"),
            ("healthy", ""),
        ]
        await asyncio.gather(it.fleet.drop(0), it.fleet.drop(0))
        assert [row["number"] for row in it.fleet.rows()] == [1]
        assert it.spare == fakes[2:]
        await it.fleet.add(1)
        assert [(row["number"], row["nodes"]) for row in it.fleet.rows()] == [(1, ["node1"]), (2, ["node0"])]


async def test_two_who_add_at_once_do_not_get_one_place(fakes: list[Fake]) -> None:
    async with bed(fakes[:1], fakes[1:], room=2) as it:
        await it.push(4)
        said = await asyncio.gather(it.fleet.add(1), it.fleet.add(1), return_exceptions=True)
        assert [type(one) for one in said] == [type(None), ConfigError]
        assert [(row["number"], row["state"]) for row in it.fleet.rows()] == [(0, "healthy"), (1, "healthy")]


async def test_what_is_added_without_room_for_all_leaves_nothing(fakes: list[Fake]) -> None:
    async with bed(fakes[:1], fakes[1:], room=2) as it:
        await it.push(4)
        with pytest.raises(ConfigError, match="no server has left a place"):
            await it.fleet.add(2)
        assert [row["number"] for row in it.fleet.rows()] == [0]
        assert it.spare == fakes[1:]
        await it.fleet.add(1)
        assert [row["state"] for row in it.fleet.rows()] == ["healthy", "healthy"]


async def test_a_server_whose_end_fails_is_forgotten_and_its_place_free(fakes: list[Fake]) -> None:
    async def fails() -> None:
        raise OSError("no such process")

    async with bed(fakes[:2], fakes[2:]) as it:
        await it.push(4)
        it.places[0].end = fails
        with pytest.raises(OSError, match="no such process"):
            await it.fleet.drop(0)
        await it.fleet.add(1, "node0")
        assert [(row["number"], row["nodes"]) for row in it.fleet.rows()] == [(1, ["node1"]), (2, ["node0"])]


async def test_a_server_that_has_just_started_again_is_ended_if_it_is_dropped(fakes: list[Fake]) -> None:
    """While the connections to the one before are closed."""
    async with bed(fakes[:2], fakes[2:]) as it:
        await it.push(4)
        close, began = it.places[0].server.close, asyncio.Event()

        async def closing() -> None:
            await close()
            if not began.is_set():
                began.set()
                await asyncio.Event().wait()

        it.places[0].server.close = closing
        it.places[0].why.set_result("killed")
        await began.wait()
        await it.fleet.drop(0)
        assert it.places[2].was_ended
        await it.places[2].server.close()


async def test_the_learner_waits_for_a_server_that_leaves_its_gpus(fakes: list[Fake]) -> None:
    async with bed(fakes[:2], [], colocated=True) as it:
        await it.push(4)
        ending, may_end = asyncio.Event(), asyncio.Event()

        async def end() -> None:
            ending.set()
            await may_end.wait()

        it.places[0].end = end
        dropping = asyncio.create_task(it.fleet.drop(0))
        await ending.wait()
        releasing = asyncio.create_task(it.engine.weights.release())
        for _ in range(20):  # time enough to ask another server
            await it.places[1].server.status("/health", seconds=LIMIT)
        assert not releasing.done()
        assert fakes[1].asked.count("/release") == 0
        may_end.set()
        await asyncio.gather(dropping, releasing)
        assert [fake.asked.count("/release") for fake in fakes[:2]] == [0, 1]
