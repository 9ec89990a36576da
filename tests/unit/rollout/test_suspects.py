"""Prompts that end servers are found among those that are only in flight beside them: random worlds, virtual clock."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.data.problems.prompt_stream import PromptStream
from rl_megatron.errors import EngineError, PoisonPrompt
from rl_megatron.rollout.batch import Answered
from rl_megatron.rollout.servers.engine import ServedEngine
from rl_megatron.rollout.servers.http import AttemptFailed, Broken, Server, Unreachable
from rl_megatron.rollout.servers.replicas import Event, Replica
from rl_megatron.types import Completion, GenerationRequest, Prompt
from tests.completions import completion
from tests.streams import PROMPTS, Source, stream_over
from tests.unit.rollout.still import Still
from tests.unit.rollout.test_engine_servers import REQUEST, engine_of, push, running
from tests.virtual_time import run_at_once


class Seat(Server):
    """A server without a connection, which can die."""

    def __init__(self, number: int) -> None:
        self.url, self.number, self.in_flight, self.paused, self.released = f"seat {number}", number, 0, False, False
        self.dead, self.running, self.draft_tokens = asyncio.Event(), Counter[str](), 0

    async def close(self) -> None:
        pass


@dataclass
class World:
    """Servers that die under some prompts, and others that die at any time, alone or together."""

    seed: int
    deaths: int = 0  # that no prompt caused
    kills: Counter[str] = field(default_factory=Counter)
    under: dict[str, set[int]] = field(default_factory=dict)  # replicas that died under each prompt
    dropped: set[str] = field(default_factory=set)
    answered: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        r = self.random = random.Random(self.seed)
        self.members, self.apart = r.randint(1, 4), r.random() < 0.7
        prompts = [f"p{n}" for n in range(r.randint(1, 60))]
        self.groups = prompts
        self.poison = set(r.sample(prompts, min(len(prompts), r.choice([0, 0, 1, 1, 2]))))
        self.at = {name: r.choice([0.0, r.random()]) for name in self.poison}  # the part of a completion made by then
        self.replicas, self.slots, self.more = r.randint(2, 6), r.choice([4, 16, 64, 256]), r.choice([0, 1, 4])
        self.together, self.status = r.random() < 0.3, r.random() < 0.3

    async def run(self) -> None:
        section = ServerSection(concurrency=self.slots)
        seats: list[Any] = [Seat(number) for number in range(self.replicas)]
        self.engine = ServedEngine(Deadly(self), seats, section, max_length=99, vocab_size=99)
        for replica in self.engine.replicas.all:
            replica.supervised = True
        await push(self.engine, 1)
        keeping = [asyncio.ensure_future(self.keep(replica)) for replica in self.engine.replicas.all]
        keeping.append(asyncio.ensure_future(self.strike()))
        await asyncio.gather(*map(self.group, self.groups))
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)

    async def group(self, name: str) -> None:
        count = self.members if self.apart else 1
        request = replace(REQUEST, group=name if self.apart else None, num_completions=self.members // count)
        ids = [f"{name}, completion {n}" for n in range(count)] if self.apart else [name]
        try:
            async with asyncio.TaskGroup() as tasks:
                for one in ids:
                    tasks.create_task(self.engine.generate(replace(request, id=one)))
            self.answered[name] += 1
        except* PoisonPrompt:
            self.dropped.add(name)

    async def keep(self, replica: Replica) -> None:
        """As its supervisor does."""
        while True:
            seat: Any = replica.server
            await seat.dead.wait()
            await asyncio.sleep(self.random.random())
            replica.apply(Event.DIED, "of something")
            await asyncio.sleep(10 + 20 * self.random.random())
            replica.restarts += 1
            replica.apply(Event.RESTARTED)
            fresh: Any = Seat(replica.number)
            replica.server = fresh
            replica.apply(Event.ANSWERED)
            replica.apply(Event.REFITTED)

    async def strike(self) -> None:
        for number in range(self.more):
            await asyncio.sleep(self.random.expovariate(1 / 600) if number else 30 * self.random.random())
            struck = self.engine.replicas.all if self.together else [self.random.choice(self.engine.replicas.all)]
            for replica in struck:
                await asyncio.sleep(self.random.random())
                seat: Any = replica.server
                self.deaths += 1
                self.kill(seat)

    def kill(self, seat: Any) -> None:
        if not seat.dead.is_set():
            for name in +seat.running:
                self.under.setdefault(name, set()).add(seat.number)
            seat.dead.set()


@dataclass
class Poisoned(Source):
    """Answers as the sampler does where engines raise PoisonPrompt."""

    poison: set[str] = field(default_factory=set)

    def _answer(self, prompt: Prompt) -> Answered:
        if prompt.id in self.poison:
            return Answered(group=None, reason="poison", problem=f"{prompt.id}: log-prob nan")
        return super()._answer(prompt)


class Deadly(Still):
    """Samples for some seconds, or until the server dies."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def generate(self, server: Any, request: GenerationRequest, request_id: str) -> list[Completion]:
        world, name = self.world, (request.group or request.id)
        if server.dead.is_set():
            raise Unreachable(f"{server.url}: nobody listens")
        server.running[name] += 1
        seconds = world.random.random() * world.random.choice([1, 10, 60])
        try:
            async with asyncio.timeout(seconds * world.at.get(name, 1.0)):
                await server.dead.wait()
            await asyncio.sleep(0.1 * world.random.random())
            kind = AttemptFailed if world.status else Broken
            raise kind(f"{server.url}: it died")
        except TimeoutError:
            if name not in world.poison:
                return [completion([5], spans=((0, 1),))] * request.num_completions
            world.kills[name] += not server.dead.is_set()
            world.kill(server)
            raise Broken(f"{server.url}: it died of this") from None
        finally:
            server.running[name] -= 1


@pytest.fixture(scope="module")
def worlds() -> list[World]:
    found = [World(seed) for seed in range(80)]
    logging.disable(logging.CRITICAL)  # thousands of lines
    try:
        for world in found:
            run_at_once(world.run())
    finally:
        logging.disable(logging.NOTSET)
    return found


def test_only_poison_is_dropped_whatever_else_ends_servers(worlds: list[World]) -> None:
    """And a prompt in flight at its third server that dies of something else, as one in some hundred is here."""
    for world in worlds:
        assert world.poison <= world.dropped, world.seed
        assert set(world.answered) == set(world.groups) - world.dropped, world.seed
    wrong = sum(len(world.dropped - world.poison) for world in worlds)
    assert wrong < 0.01 * sum(len(world.groups) for world in worlds)
    innocent = [under for world in worlds for name, under in world.under.items() if name not in world.poison]
    assert sum(len(replicas) > 1 for replicas in innocent) > 150  # a second death on another replica shows nothing
    assert sum(world.deaths for world in worlds) > 50


def test_a_prompt_ends_few_servers(worlds: list[World]) -> None:
    """Mostly three; more where several of its requests are at several servers."""
    kills = sorted(world.kills[name] for world in worlds for name in world.poison)
    assert len(kills) > 40
    assert kills[len(kills) // 2] == 3
    assert kills[-1] <= 12


def test_restarts_after_deaths_by_poison_do_not_count(worlds: list[World]) -> None:
    """Those after other deaths do."""
    restarts = Counter[bool]()
    for world in worlds:
        for replica in world.engine.replicas.all:
            if not world.deaths:
                assert world.engine.tries(replica) == 0, world.seed
            elif not world.dropped:
                assert world.engine.tries(replica) == replica.restarts, world.seed
            restarts[world.deaths > 0] += replica.restarts
    assert min(restarts[False], restarts[True]) > 20


@pytest.mark.parametrize(("refusing", "dropped"), [([0, 1], True), ([0], False), ([1], False)])
async def test_what_two_servers_refuse_is_dropped(refusing: list[int], dropped: bool) -> None:
    with running(2) as fakes:
        engine = engine_of(fakes)
        await push(engine, 4)
        for number in refusing:
            fakes[number].answer = lambda path, body, number: (
                (400, "no such token") if path == "/generate" else (200, {})
            )
        if dropped:
            with pytest.raises(PoisonPrompt, match=r"'step 1: 2\+2=' is refused by two servers: .*400.*400"):
                await engine.generate(REQUEST)
            assert [fake.asked.count("/generate") for fake in fakes] == [1, 1]
        else:
            (one,) = await engine.generate(REQUEST)
            assert one.spans == ((0, 4),)
        await engine.close()


async def test_what_one_server_failed_on_and_another_refuses_goes_back_to_the_first() -> None:
    """It does not go again and again where it is refused."""
    with running(2) as fakes:
        answers: dict[int, list[tuple[int, object]]] = {0: [(500, "failed"), (200, {"label": "4@t"})], 1: [(400, "no")]}

        engine = engine_of(fakes)
        await push(engine, 4)
        for number, left in answers.items():
            fakes[number].answer = lambda path, body, _, left=left: (
                left.pop(0) if path == "/generate" and left else (400, "asked again")
            )
        try:
            (one,) = await engine.generate(REQUEST)
        finally:
            await engine.close()
        assert one.spans == ((0, 4),)
        assert [fake.asked.count("/generate") for fake in fakes] == [2, 1]


async def test_what_fails_on_two_servers_while_these_answer_others_is_dropped() -> None:
    with running(2) as fakes:

        def answer(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
            return (500, "failed") if body.get("prompt") == [6, 6] else (200, {"label": "4@t"})

        engine = engine_of(fakes)
        await push(engine, 4)
        for fake in fakes:
            fake.answer = answer
        bad = replace(REQUEST, id="bad", token_ids=(6, 6))
        try:
            asked = [engine.generate(one) for one in (REQUEST, bad, replace(REQUEST, id="another"))]
            good, bad, other = await asyncio.gather(*asked, return_exceptions=True)
        finally:
            await engine.close()
    assert isinstance(bad, PoisonPrompt)
    assert all(fake.url in str(bad) for fake in fakes)
    assert good[0].spans == other[0].spans == ((0, 4),)


@pytest.mark.parametrize("replicas", [1, 2])
async def test_servers_that_answer_errors_and_live_on_show_one_bad_prompt_after_another(replicas: int) -> None:
    def answer(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        return (500, "failed") if body.get("prompt", [0])[0] == 6 else (200, {"label": "4@t"})

    with running(replicas) as fakes:
        engine, answers = engine_of(fakes), list[Any]()
        await push(engine, 4)
        for fake in fakes:
            fake.answer = answer
        try:
            for name, tokens in [("bad", (6, 6)), ("worse", (6, 7)), ("good", (5, 5))]:
                one = replace(REQUEST, id=name, token_ids=tokens)
                answers += await asyncio.gather(engine.generate(one), return_exceptions=True)
        finally:
            await engine.close()
    bad, worse, good = answers
    assert isinstance(bad, PoisonPrompt)
    assert isinstance(worse, PoisonPrompt)
    assert good[0].spans == ((0, 4),)


@pytest.mark.parametrize(("size", "allowed"), [(1, 1), (8, 1), (20, 4)])
def test_more_than_one_percent_of_twenty_steps_ends_the_run(size: int, allowed: int, tmp_path: Path) -> None:
    """The ledger has a line for each that was let pass, and a resume counts on."""
    order = [prompt.id for prompt in PromptStream(PROMPTS, seed=0).take(len(PROMPTS))]
    bad = {order[size * (2 + 3 * n)] for n in range(allowed + 1)}  # in steps 3, 6, ...
    source = Poisoned(lambda _: 1.0, poison=bad)
    path = tmp_path / "ledger.jsonl"

    async def run() -> int:
        stream = stream_over(source, size=size, staleness=0, path=path)
        stream.start_over()
        for step in range(1, 40):
            if step == 3 + 3 * allowed:
                with pytest.raises(EngineError, match=f"{allowed + 1} of the last {20 * size} prompts drawn .*nan$"):
                    await stream.take(step)
                return step
            await stream.take(step)
            stream.pushed(step)
            state = stream.state()
            await stream.close()
            stream = stream_over(source, size=size, staleness=0, path=path)
            stream._prompts.take(state.drawn)
            stream.restore(state)
        return 40

    assert run_at_once(run()) == 3 + 3 * allowed
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    dropped = [(line["step"], line["prompt"], line["reason"]) for line in lines if line["state"] == "dropped"]
    assert dropped == [(3 + 3 * n, order[size * (2 + 3 * n)], "poison") for n in range(allowed)]


def test_what_was_dropped_long_ago_counts_no_more() -> None:
    order = [prompt.id for prompt in PromptStream(PROMPTS, seed=0).take(len(PROMPTS))]
    source = Poisoned(lambda _: 1.0, poison={order[4 * step] for step in (1, 25, 50)})

    async def run() -> int:
        stream = stream_over(source, size=4, staleness=0)
        dropped = 0
        for step in range(1, 60):
            dropped += (await stream.take(step)).dropped_groups
            stream.pushed(step)
        return dropped

    assert run_at_once(run()) == 3
