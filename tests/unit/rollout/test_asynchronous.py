"""The Stream over engines: metrics, evaluations beside training, and what a checkpoint has of unfinished groups."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from bench.streaming import GROUP, MEAN, MOST, PROMPTS, SERVERS, SLOTS, TOKEN_SECONDS, TRAIN, WARM, Model, length
from rl_megatron.config.sections.rollout import RolloutSection, RunningRequests, ServerSection
from rl_megatron.data.problems.pool import PromptStream
from rl_megatron.data.samples import single_turns
from rl_megatron.engines.engine import ServerEngine
from rl_megatron.engines.http import Server
from rl_megatron.rollout.policy_sampler import EvalRequest
from rl_megatron.rollout.stream import Draw, GroupResult, Ledger, RolloutStream, StreamState
from rl_megatron.types import Completion, GenerationRequest, Prompt, SamplingParams, Turn
from rl_megatron.weights.checks.reports import ChecksumReport
from tests.completions import completion
from tests.streams import OF_TOKENS, Still, sampled_from
from tests.virtual_time import run_at_once

PAUSE = 0.02  # seconds of a push on the first server


@dataclass(eq=False)
class Sleeping(Still):
    """Servers whose tokens take a time each, in slots; they note what they did. ``pause``: seconds of a push."""

    pause_seconds: float
    aborts: bool
    slots: dict[str, asyncio.Semaphore] = field(default_factory=dict)
    pushes: dict[str, asyncio.Event] = field(default_factory=dict)  # the next one
    loaded: dict[str, list[tuple[float, int]]] = field(default_factory=dict)  # when, and which version
    asked: list[Asked] = field(default_factory=list)

    async def generate(self, server: Server, request: GenerationRequest, request_id: str) -> list[Completion]:
        now, url, tokens = asyncio.get_running_loop().time, server.url, request.params.max_new_tokens
        asked = Asked(came=now(), before=len(request.token_ids) - 1)
        self.asked.append(asked)
        try:
            async with self.slots.setdefault(url, asyncio.Semaphore(SLOTS)):
                asked.began = now()
                push = self.pushes.setdefault(url, asyncio.Event()) if self.aborts else asyncio.Event()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(tokens * TOKEN_SECONDS):
                        await push.wait()
        finally:
            asked.pop_finished = now()
        asked.token_counts = made = round((asked.pop_finished - asked.began) / TOKEN_SECONDS)
        versions = [(round((at - asked.began) / TOKEN_SECONDS), version) for at, version in self.loaded[url]]
        spans = [(0, max(version for start, version in versions if start <= 0))]
        spans += [(start, version) for start, version in versions if 0 < start < made]
        return [completion([1] * made, finish="stop" if made == tokens else "abort", spans=spans)]

    async def load(self, server: Server, path: Path, version: int, **options: object) -> list[ChecksumReport]:
        await asyncio.sleep(self.pause_seconds if server.url.endswith("0") and version else 0)
        self.loaded.setdefault(server.url, []).append((asyncio.get_running_loop().time(), version))
        return []

    async def pause(self, server: Server, mode: object) -> None:
        self.pushes.pop(server.url, asyncio.Event()).set()


@dataclass
class Asked:
    """A request to a server: its tokens before, and when it came, got a slot and ended."""

    came: float
    before: int
    began: float = math.inf
    pop_finished: float = math.inf
    token_counts: int = 0


@dataclass
class Asking:
    """Asks the engine for each completion by itself; its length is a function of ordinal and place."""

    engine: ServerEngine
    kind: str
    sent: dict[str, float] = field(default_factory=dict)  # when, by prompt

    async def groups(self, drawn: Sequence[Draw]) -> list[GroupResult]:
        return [await self._group(one) for one in drawn]

    async def _group(self, one: Draw) -> GroupResult:
        self.sent[one.prompt.id] = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*(self.engine.generate(self._request(one.ordinal, n)) for n in range(GROUP)))
        return GroupResult(group=single_turns(one.prompt, [answer[0] for answer in answers]), rewards=(0.0, 1.0) * 2)

    def _request(self, ordinal: int, place: int) -> GenerationRequest:
        tokens = length(self.kind, ordinal, place)
        params = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=tokens, stop_token_ids=(), seed=0)
        name = f"{ordinal} {place}"
        return GenerationRequest(id=name, token_ids=(1,), num_completions=1, params=params, prefix_group=str(ordinal))

    async def collect_partials(self) -> None: ...

    def partial_completion(self, drawn: Draw) -> tuple[()]:
        return ()


@dataclass
class Ran:
    """A run: of each step its row, when it was made, the turns that it trained on, and when these were sent."""

    servers: Sleeping
    rows: list[dict[str, Any]] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    turns: list[list[Turn]] = field(default_factory=list)
    sent: list[list[float]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of a step, after the first ones."""
        return (self.at[-1] - self.at[WARM - 1]) / (len(self.at) - WARM)


def run(kind: str, k: int, steps: int, mode: RunningRequests = "recompute", pause: float = 0.0) -> Ran:
    """The loop of a run with this staleness."""
    server = ServerSection(running_requests=mode, max_concurrent_groups=4096)
    section = RolloutSection(
        prompts_per_step=PROMPTS, group_size=GROUP, engine="vllm", max_new_tokens=MOST * MEAN, server=server
    )
    servers = [Server(f"http://s:{n}", token=None, timeout_seconds=60) for n in range(SERVERS)]
    prompts = [Prompt(id=f"{n}", text="", token_ids=(1,), answer="") for n in range(PROMPTS * (steps + k + 2))]
    ran = Ran(Sleeping(pause, mode == "abort"))

    async def steps_made() -> None:
        engine = ServerEngine(ran.servers, servers, server, max_length=4096, vocab_size=10, slots=SLOTS)
        source = Asking(engine, kind)
        stream = RolloutStream(
            prompts=PromptStream(prompts, seed=0),
            source=source,
            section=section,
            max_staleness=k,
            last_step=steps + k,
            teaches=lambda groups: [True] * len(groups),
            ledger=Ledger(),
        )
        await engine.weights.load(Path("none"), 0)
        await engine.weights.commit(0)
        for step in range(1, steps + 1):
            batch = await stream.take(step)
            await asyncio.sleep(TRAIN)
            await engine.weights.load(Path("none"), step)
            await engine.weights.commit(step)
            stream.on_push(step)
            trajectories = [one for group in batch.groups for one in group.trajectories]
            turns = [turn for one in trajectories for turn in one.turns]
            ran.rows.append(stream.row() | engine.step_row())
            ran.at.append(asyncio.get_running_loop().time())
            ran.turns.append(turns)
            ran.sent.append([source.sent[group.prompt.id] for group in batch.groups])
        await stream.close()
        await engine.close()

    run_at_once(steps_made())
    return ran


@pytest.fixture(scope="module")
def ran() -> Ran:
    return run("heavy", 4, WARM + 24)


def simulated(kind: str, k: int, steps: int) -> float:
    seeds = list(range(PROMPTS * (WARM + steps + k + 2)))
    return Model(kind, k, seeds, alone=True, seeded=False, train=TRAIN).seconds(steps)


def test_the_simulator_says_the_seconds_of_a_step(ran: Ran) -> None:
    assert ran.seconds == pytest.approx(simulated("heavy", 4, 24), rel=0.02)
    assert run("heavy", 0, WARM + 8).seconds == pytest.approx(simulated("heavy", 0, 8), rel=0.02)
    assert simulated("heavy", 0, 24) > 1.8 * ran.seconds


def between(intervals: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """The parts of the intervals in this time, added up."""
    return sum(max(0.0, min(b, end) - max(a, begin)) for a, b in intervals)


def test_idle_shares_are_those_of_what_servers_and_learner_did(ran: Ran) -> None:
    asked = ran.servers.asked
    assert not ran.rows[0].keys() & {"idle/learner_fraction", "idle/engine_fraction"}  # of no time before it
    for i in range(1, len(ran.rows)):
        row, begin, end = ran.rows[i], ran.at[i - 1], ran.at[i]
        used = between(((one.began, one.pop_finished) for one in asked), begin, end) / (SLOTS * SERVERS)
        whole = end - begin
        assert row["idle/engine_fraction"] == pytest.approx(1 - used / whole, abs=1e-9)
        assert row["idle/learner_fraction"] == pytest.approx(1 - TRAIN / whole, abs=1e-9)


@pytest.mark.parametrize("mode", ["recompute", "keep_cache", "abort"])
def test_tokens_that_pushes_met_keep_the_versions_that_sampled_them(mode: RunningRequests) -> None:
    one, resumed = run("heavy", 2, 8, mode, PAUSE), 0
    for row, turns in zip(one.rows, one.turns, strict=True):
        versions = [np.zeros(len(turn.logprobs), int) for turn in turns]
        for turn, of_tokens in zip(turns, versions, strict=True):
            for span in turn.spans:
                of_tokens[span.start :] = span.version
        met = [[n for n in range(1, len(each)) if each[n] != each[n - 1]] for each in versions]
        resumed += sum(places[-1] for places in met if places)
        assert row["seconds/pause"] == pytest.approx(PAUSE)
    assert resumed > 1000


# An evaluation while completions to train on run changes nothing of these.
STEPS, STALENESS = 5, 2


@dataclass(eq=False)
class Seeded(Still):
    """A server whose tokens are a function of the request's seed; all but evaluations' wait until they may go on."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    version: int = 0
    heard: list[GenerationRequest] = field(default_factory=list)

    async def generate(self, server: Server, request: GenerationRequest, request_id: str) -> list[Completion]:
        self.heard.append(request)
        tokens = np.random.default_rng(request.params.seed).integers(1, 40, 2 + request.params.seed % 5).tolist()
        spans = [(0, self.version)]
        if not request.id.startswith("evaluation"):
            await self.go.wait()
            spans += [(1, self.version)] if self.version > spans[0][1] else []
        return [completion(tokens, spans=spans)]

    async def load(self, server: Server, path: Path, version: int, **options: object) -> list[ChecksumReport]:
        self.version = version
        return []


async def trained(path: Path, *, evaluates: bool) -> tuple[list[object], list[int], int]:
    """What each step trains on and what the stream says of itself, seeds in their order, and evaluations' requests."""
    adapter, servers = Seeded(), [Server("http://s:0", token=None, timeout_seconds=60)]
    engine = ServerEngine(adapter, servers, ServerSection(), max_length=64, vocab_size=41)
    sampler, stream = sampled_from(engine, staleness=STALENESS, last_step=STEPS + STALENESS, path=path)
    found: list[object] = []
    await engine.weights.load(Path("none"), 0)
    await engine.weights.commit(0)
    stream.admit()
    for step in range(1, STEPS + 1):
        if evaluates:
            assert stream._tasks  # something is sampled, and waits
            answers = await sampler.sample_eval(
                EvalRequest(prompts=OF_TOKENS[:7], params=sampler.params(temperature=1.0))
            )
            assert all(one.rewards[0] >= 1.0 for one in answers)
        adapter.go.set()
        while stream._tasks:  # each draws and sends the next group
            await asyncio.gather(*stream._tasks)
        adapter.go.clear()
        batch = await stream.take(step)
        found.append([(g.prompt.id, one.chains[0].token_ids.tolist()) for g in batch.groups for one in g.trajectories])
        found.append([turn.spans for g in batch.groups for one in g.trajectories for turn in one.turns])
        found.append((batch.num_completions, batch.reward_sum))
        await engine.weights.load(Path("none"), step)
        await engine.weights.commit(step)
        stream.on_push(step)
        found.append({name: value for name, value in stream.row().items() if name.startswith("ledger/")})
    state = stream.state()
    found += [state.drawn, state.batch, state.ledger, path.read_text(), sampler.sampled]
    adapter.go.set()
    await stream.close()
    await engine.close()
    seeds = [one.params.seed for one in adapter.heard if not one.id.startswith("evaluation")]
    return found, seeds, len(adapter.heard) - len(seeds)


def test_an_evaluation_beside_running_completions_changes_no_row_of_training(tmp_path: Path) -> None:
    alone, seeds, none = asyncio.run(trained(tmp_path / "alone.jsonl", evaluates=False))
    beside, same, asked = asyncio.run(trained(tmp_path / "beside.jsonl", evaluates=True))
    assert beside == alone
    assert same == seeds
    assert (none, asked) == (0, 7 * STEPS)


# What is sampled of unfinished groups goes into a checkpoint, and goes on from there after a resume.
VERSIONS = {"first": 0, "second": 7}


def length_of(request_id: str) -> int:
    """The first completion of a group is short, the last one long."""
    return 2 + 3 * int(request_id[-1])


@dataclass
class Tokens:
    """An engine whose n-th token of a completion is n; it samples up to ``most`` tokens of each, then waits."""

    version: int
    most: int
    heard: list[GenerationRequest] = field(default_factory=list)
    tokens: dict[str, Completion] = field(default_factory=dict)
    told: dict[str, Completion] = field(default_factory=dict)
    made: int = 0
    interrupts: int = 0

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        self.heard.append(request)
        have = [] if request.partial is None else request.partial.token_ids.tolist()
        spans = () if request.partial is None else request.partial.spans
        if length_of(request.id) > len(have):
            spans = (*spans, (len(have), self.version))
        while len(have) < length_of(request.id):
            if len(have) == self.most:
                self.tokens[request.id] = completion(have, finish="abort", spans=spans)
                await asyncio.Event().wait()
            have.append(len(have))
            self.made += 1
        return [completion(have, spans=spans)]

    async def collect_partials(self) -> None:
        self.interrupts += 1
        self.told = {**self.tokens}

    def partial_completion(self, request_id: str) -> Completion | None:
        return self.told.get(request_id)


def stream_over(engine: Tokens, *, staleness: int = 1) -> RolloutStream:
    return sampled_from(engine, staleness=staleness, last_step=2)[1]


async def killed() -> tuple[Tokens, StreamState]:
    """A run of which only the first completion of each group has ended, read from a file again."""
    stream = stream_over(engine := Tokens(VERSIONS["first"], most=4))
    stream.admit()
    while len(engine.tokens) < 8:  # of four groups, two completions each
        await asyncio.sleep(0)
    await stream.collect_partials()
    adapter = TypeAdapter(StreamState)
    text = adapter.dump_json(stream.state())
    assert b'"begun":[{' in text  # the key in checkpoints
    state = adapter.validate_json(text)
    await stream.close()
    return engine, state


async def resumed(state: StreamState, staleness: int = 1) -> tuple[Tokens, list[list[list[tuple[int, int]]]]]:
    """The spans of each completion of the first two steps, all of whose tokens are right."""
    stream = stream_over(engine := Tokens(VERSIONS["second"], most=99), staleness=staleness)
    stream._prompts.next_prompts(state.drawn)
    stream.restore(state)
    groups = [*(await stream.take(1)).groups]
    stream.on_push(1)
    groups += (await stream.take(2)).groups
    rows = [[one.chains[0] for one in group.trajectories] for group in groups]
    for group in rows:
        assert [row.token_ids[2:].tolist() for row in group] == [list(range(2 + 3 * i)) for i in range(3)]
    await stream.close()
    return engine, [[[tuple(span) for span in row.turns[0].spans] for row in group] for group in rows]


@pytest.mark.parametrize("staleness", [1, 0])
def test_a_resume_goes_on_from_every_token(staleness: int) -> None:
    before, state = asyncio.run(killed())
    assert before.made == 4 * (2 + 4 + 4)
    assert [(r.id, r.num_completions, r.prefix_group) for r in before.heard[:3]] == [
        (f"step 1: {state.places[0].drawn.prompt.id}, completion {i}", 1, f"step 1: {state.places[0].drawn.prompt.id}")
        for i in range(3)
    ]
    assert len({request.params.seed for request in before.heard}) == 12
    after, spans = asyncio.run(resumed(state, staleness))
    assert spans == [[[(0, 0)], [(0, 0), (4, 7)], [(0, 0), (4, 7)]]] * 4
    of_first = [request for request in after.heard if request.id in {r.id for r in before.heard}]
    assert [r.params.seed for r in of_first] == [r.params.seed for r in before.heard]
    assert sum(length_of(r.id) - len(r.partial.token_ids) for r in of_first if r.partial is not None) == 4 * (0 + 1 + 4)


def test_a_completion_that_ended_waits_for_its_group_in_the_checkpoint() -> None:
    _, state = asyncio.run(killed())
    for place in state.places:
        first, *others = place.drawn.partials
        assert first.finish_reason == "stop"
        assert [len(one.token_ids) for one in others if one is not None] == [4, 4]


@pytest.mark.parametrize("times", [1, 3])
async def test_what_was_begun_is_kept_over_several_kills(times: int) -> None:
    _, state = await killed()
    for _ in range(times):
        stream = stream_over(Tokens(3, most=4))
        stream._prompts.next_prompts(state.drawn)
        stream.restore(state)
        stream.admit()  # and is killed before a server has heard of it
        state = stream.state()
        await stream.close()
    assert [len(one.token_ids) for one in state.places[0].drawn.partials if one is not None] == [2, 4, 4]
