"""Prompts that end servers or fail on them, and completions that move: random worlds on a virtual clock."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import TypeAdapter

from rl_megatron.config.io import load_config
from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.data.problems.pool import PromptStream
from rl_megatron.engines.engine import ServerEngine
from rl_megatron.engines.http import AttemptFailed, ConnectionBroken, Server, ServerUnreachable
from rl_megatron.engines.replicas import Event, Replica
from rl_megatron.engines.requests import surplus
from rl_megatron.errors import EngineError, PoisonPrompt
from rl_megatron.rollout.stream import GroupResult
from rl_megatron.training.checkpoints import TrainerState
from rl_megatron.training.jobs.rl import RLJob
from rl_megatron.types import Completion, GenerationRequest, Prompt
from tests.completions import completion
from tests.streams import PROMPTS, Source, Still, stream_over
from tests.unit.rollout.test_engine_servers import REQUEST, engine_of, push, running
from tests.virtual_time import run_at_once


class Seat(Server):
    """A server without a connection, which can die."""

    def __init__(self, number: int) -> None:
        self.url, self.number, self.in_flight, self.paused, self.released = f"seat {number}", number, 0, False, False
        self.dead, self.running, self.features = asyncio.Event(), Counter[str](), {}

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
        section = ServerSection(max_concurrent_groups=self.slots)
        seats: list[Any] = [Seat(number) for number in range(self.replicas)]
        self.engine = ServerEngine(Deadly(self), seats, section, max_length=99, vocab_size=99)
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
        request = replace(REQUEST, prefix_group=name if self.apart else None, num_completions=self.members // count)
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

    def _answer(self, prompt: Prompt) -> GroupResult:
        if prompt.id in self.poison:
            return GroupResult(group=None, reason="poison", problem=f"{prompt.id}: log-prob nan")
        return super()._answer(prompt)


class Deadly(Still):
    """Samples for some seconds, or until the server dies."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def generate(self, server: Any, request: GenerationRequest, request_id: str) -> list[Completion]:
        world, name = self.world, (request.prefix_group or request.id)
        if server.dead.is_set():
            raise ServerUnreachable(f"{server.url}: nobody listens")
        server.running[name] += 1
        seconds = world.random.random() * world.random.choice([1, 10, 60])
        try:
            async with asyncio.timeout(seconds * world.at.get(name, 1.0)):
                await server.dead.wait()
            await asyncio.sleep(0.1 * world.random.random())
            kind = AttemptFailed if world.status else ConnectionBroken
            raise kind(f"{server.url}: it died")
        except TimeoutError:
            if name not in world.poison:
                return [completion([5], spans=((0, 1),))] * request.num_completions
            world.kills[name] += not server.dead.is_set()
            world.kill(server)
            raise ConnectionBroken(f"{server.url}: it died of this") from None
        finally:
            server.running[name] -= 1


@pytest.fixture(scope="module")
def worlds() -> list[World]:
    return played([World(seed) for seed in range(80)])


def played(worlds: list[Any]) -> list[Any]:
    """The worlds, run; what ends a run is raised."""
    logging.disable(logging.CRITICAL)  # thousands of lines
    try:
        for world in worlds:
            run_at_once(world.run())
    finally:
        logging.disable(logging.NOTSET)
    return worlds


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
                assert world.engine.attempt_count(replica) == 0, world.seed
            elif not world.dropped:
                assert world.engine.attempt_count(replica) == replica.restarts, world.seed
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
    order = [prompt.id for prompt in PromptStream(PROMPTS, seed=0).next_prompts(len(PROMPTS))]
    bad = {order[size * (2 + 3 * n)] for n in range(allowed + 1)}  # in steps 3, 6, ...
    source, path = Poisoned(lambda _: 1.0, poison=bad), tmp_path / "ledger.jsonl"

    async def run() -> int:
        stream = stream_over(source, size=size, staleness=0, path=path)
        stream.restart()
        for step in range(1, 40):
            if step == 3 + 3 * allowed:
                with pytest.raises(EngineError, match=f"{allowed + 1} of the last {20 * size} prompts drawn .*nan$"):
                    await stream.take(step)
                return step
            await stream.take(step)
            stream.on_push(step)
            state = stream.state()
            await stream.close()
            stream = stream_over(source, size=size, staleness=0, path=path)
            stream._prompts.next_prompts(state.drawn)
            stream.restore(state)
        return 40

    assert run_at_once(run()) == 3 + 3 * allowed
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    dropped = [(line["step"], line["prompt"], line["reason"]) for line in lines if line["state"] == "dropped"]
    assert dropped == [(3 + 3 * n, order[size * (2 + 3 * n)], "poison") for n in range(allowed)]


def test_what_was_dropped_long_ago_counts_no_more() -> None:
    order = [prompt.id for prompt in PromptStream(PROMPTS, seed=0).next_prompts(len(PROMPTS))]
    source = Poisoned(lambda _: 1.0, poison={order[4 * step] for step in (1, 25, 50)})

    async def run() -> int:
        stream, dropped = stream_over(source, size=4, staleness=0), 0
        for step in range(1, 60):
            dropped += (await stream.take(step)).dropped_groups
            stream.on_push(step)
        return dropped

    assert run_at_once(run()) == 3


# Prompts that servers answer with an error while they answer others, and those dropped, which are drawn no more.
@dataclass
class FailingWorld:
    """Groups of requests at servers of which none dies."""

    seed: int
    failures: Counter[str] = field(default_factory=Counter)  # by prompt
    dropped: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        r = self.random = random.Random(self.seed)
        self.groups = [f"p{n}" for n in range(r.randint(6, 60))]
        self.bad = set(r.sample(self.groups, r.choice([2, 2, 3, 4, 6])))
        self.members, self.replicas, self.seconds = r.choice([1, 4]), r.randint(1, 3), r.choice([0.0, 1.0, 20.0])

    async def run(self) -> None:
        section = ServerSection()
        seats: list[Any] = [Seat(number) for number in range(self.replicas)]
        engine = ServerEngine(Failing(self), seats, section, max_length=99, vocab_size=99)
        await push(engine, 1)
        await asyncio.gather(*(self.group(engine, name) for name in self.groups))

    async def group(self, engine: ServerEngine, name: str) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(self.members):
                    tasks.create_task(
                        engine.generate(replace(REQUEST, prefix_group=name, id=f"{name}, completion {number}"))
                    )
            self.answered.add(name)
        except* PoisonPrompt:
            self.dropped.add(name)


class Failing(Deadly):
    """Answers after some seconds: to bad prompts always with an error."""

    world: Any

    async def generate(self, server: Any, request: GenerationRequest, request_id: str) -> list[Completion]:
        name = str(request.prefix_group)
        await asyncio.sleep(self.world.seconds * self.world.random.random())
        if name in self.world.bad:
            self.world.failures[name] += 1
            raise AttemptFailed(f"{server.url}: status 500")
        return [completion([5], spans=((0, 1),))] * request.num_completions


@pytest.fixture(scope="module")
def failing_worlds() -> Sequence[FailingWorld]:
    return played([FailingWorld(seed) for seed in range(40)])


def test_each_is_found_and_all_others_are_answered(failing_worlds: Sequence[FailingWorld]) -> None:
    """None of them ends the run, though what one failed beside another counted for both at first."""
    for world in failing_worlds:
        assert (world.dropped, world.answered) == (world.bad, set(world.groups) - world.bad), world.seed


def test_each_is_asked_a_few_times(failing_worlds: Sequence[FailingWorld]) -> None:
    tries = sorted(world.failures[name] / world.members for world in failing_worlds for name in world.bad)
    assert len(tries) > 100
    assert tries[-1] < 20


def test_what_was_dropped_is_asked_once_in_a_run_of_three_epochs_that_is_resumed() -> None:
    """From what a checkpoint has; its place goes to the next prompt."""
    prompts, as_json, asked = PROMPTS[:10], TypeAdapter(TrainerState), Counter[str]()

    class Noting(Poisoned):
        async def groups(self, drawn: Any) -> Any:
            asked.update(one.prompt.id for one in drawn)
            return await super().groups(drawn)

    def job() -> Any:
        stream = stream_over(Noting(lambda _: 1.0, poison={"p3"}), size=2, staleness=0, prompts=prompts)
        weights = SimpleNamespace(push=lambda _: asyncio.sleep(0))
        return RLJob(
            config=load_config("tiny_cpu", []),
            roles=cast(Any, SimpleNamespace(weight_sync=weights)),
            stream=stream,
            prompts=stream._prompts,
            **dict.fromkeys(("evaluation", "start_folder", "recorder", "push_route"), cast(Any, None)),
            update=cast(Any, SimpleNamespace(state=None, model_steps=())),
        )

    async def run() -> int:
        now, dropped = job(), 0
        for step in range(1, 15):
            now.number, batch = step, await now.stream.take(step)
            dropped += batch.dropped_groups
            now.stream.on_push(step)
            if step == 6:
                saved, now = as_json.dump_json(now.state()), job()
                await now.restore(as_json.validate_json(saved))
        return dropped

    assert run_at_once(run()) == 1
    assert asked["p3"] == 1
    assert sum(asked.values()) == 28
    assert {asked[prompt.id] for prompt in prompts} == {1, 3}


# Completions move from busy servers to less busy ones: the rule, on a virtual clock, and by real servers.
ROW_SECONDS = 0.01  # of a token, for each row of the server
LONG, SHORT = 400, 10


def too_uneven(running: Sequence[int]) -> bool:
    return max(running) - min(running) > max(2, min(running) // 4)


def test_as_few_move_as_level_the_servers() -> None:
    """Against all ways to share the completions out."""
    draw = random.Random(0)
    for _ in range(60):
        running = [draw.randint(0, 9) for _ in range(draw.randint(1, 3))]
        level = [
            shares
            for shares in product(range(sum(running) + 1), repeat=len(running))
            if sum(shares) == sum(running) and not too_uneven(shares)
        ]
        least = min(sum(max(0, a - b) for a, b in zip(running, shares, strict=True)) for shares in level)
        moved = surplus(running)
        assert sum(moved) == least, running
        assert all(0 <= count <= has for count, has in zip(moved, running, strict=True))
    assert surplus([]) == []
    assert surplus([160, 130, 128]) == [0, 0, 0]  # a quarter
    assert surplus([161, 128, 128]) == [1, 0, 0]


class Rows(Still):
    """A server's rows get a token each in turn, the n-th token n; so with fewer rows they are faster."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int]] = []  # request, server, tokens that it has
        self.ended: set[str] = set()
        self.lengths: dict[str, int] = {}  # those that the second server is sent are short

    async def generate(self, server: Any, request: GenerationRequest, request_id: str) -> list[Completion]:
        first = len(request.token_ids) - len(REQUEST.token_ids)
        length = self.lengths.setdefault(request.id, LONG if server.number == 0 else SHORT)
        self.asked.append((request.id, server.url, first))
        made = first
        while made < length and request_id not in self.ended:
            await asyncio.sleep(ROW_SECONDS * server.in_flight)
            made += 1
        finish = "stop" if made == length else "abort"
        return [completion(list(range(first, made)), finish=finish, spans=((0, 1),))]

    async def abort(self, server: Any, request: GenerationRequest, request_id: str) -> None:
        self.ended.add(request_id)


async def sampled(adapter: Rows, *, grouped: bool) -> float:
    """Seconds of twelve completions by two servers, of which six are long."""
    seats: list[Any] = [Seat(0), Seat(1)]
    engine = ServerEngine(adapter, seats, ServerSection(), max_length=2000, vocab_size=2000)
    await push(engine, 1)
    params = replace(REQUEST.params, max_new_tokens=LONG, stop_token_ids=())
    one = replace(REQUEST, prefix_group="a" if grouped else None, params=params)
    answers = await asyncio.gather(*(engine.generate(replace(one, id=f"{n}")) for n in range(12)))
    for n, (answer,) in enumerate(answers):
        assert answer.token_ids.tolist() == list(range(adapter.lengths[f"{n}"]))
        assert (answer.finish_reason, answer.spans) == ("stop", ((0, 1),))
    seconds = asyncio.get_running_loop().time()
    await engine.close()
    return seconds


def test_long_completions_of_a_busy_server_go_on_at_an_idle_one_from_their_tokens() -> None:
    """Six rows until five seconds after the short ones; four and two until five after these two; three and one."""
    adapter, first = Rows(), 6 * ROW_SECONDS * SHORT + 5
    made = first / (6 * ROW_SECONDS)
    second = (LONG - made) * 2 * ROW_SECONDS + 5
    later = made + second / (4 * ROW_SECONDS)
    seconds = run_at_once(sampled(adapter, grouped=True))
    assert seconds == pytest.approx(first + second + (LONG - later) * 3 * ROW_SECONDS, abs=1.0)
    again = adapter.asked[12:]
    assert [server for _, server, _ in again] == ["seat 1"] * 3
    assert [tokens for _, _, tokens in again] == pytest.approx([made, made, later], abs=20)
    long = [request for request, server, _ in adapter.asked[:12] if server == "seat 0"]
    assert {request for request, _, _ in again[:2]} == set(long[-2:])  # sent last
    assert again[2][0] == long[-3]


def test_evaluations_and_groups_of_one_request_stay() -> None:
    adapter = Rows()
    seconds = run_at_once(sampled(adapter, grouped=False))
    assert len(adapter.asked) == 12
    assert seconds == pytest.approx(LONG * 6 * ROW_SECONDS, abs=0.5)
