"""The real Stream and served engine over servers of a few lines, on a virtual clock, against counts of what they did.

Lengths, seconds and the number of slots are those of bench.streaming, whose simulator knows nothing of the code.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.streaming import GROUP, MEAN, MOST, PROMPTS, SERVERS, SLOTS, TOKEN_SECONDS, TRAIN, WARM, Model, length
from rl_megatron.config.sections.rollout import RolloutSection, RunningRequests, ServerSection
from rl_megatron.data.problems.prompt_stream import PromptStream
from rl_megatron.data.trajectories import single_turns
from rl_megatron.rollout.batch import Answered, Drawn, Ledger
from rl_megatron.rollout.servers.engine import ServedEngine
from rl_megatron.rollout.servers.http import Server
from rl_megatron.rollout.stream import Stream
from rl_megatron.training.group_job import carried_row, stretch_row
from rl_megatron.types import Completion, GenerationRequest, Prompt, SamplingParams, Turn
from rl_megatron.weights.checks.reports import Report
from tests.completions import completion
from tests.unit.rollout.still import Still
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
            asked.ended = now()
        asked.made = made = round((asked.ended - asked.began) / TOKEN_SECONDS)
        versions = [(round((at - asked.began) / TOKEN_SECONDS), version) for at, version in self.loaded[url]]
        spans = [(0, max(version for start, version in versions if start <= 0))]
        spans += [(start, version) for start, version in versions if 0 < start < made]
        return [completion([1] * made, finish="stop" if made == tokens else "abort", spans=spans)]

    async def load(self, server: Server, path: Path, version: int, **options: object) -> list[Report]:
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
    ended: float = math.inf
    made: int = 0


@dataclass
class Asking:
    """Asks the engine for each completion by itself; its length is a function of ordinal and place."""

    engine: ServedEngine
    kind: str
    sent: dict[str, float] = field(default_factory=dict)  # when, by prompt

    async def groups(self, drawn: Sequence[Drawn]) -> list[Answered]:
        return [await self._group(one) for one in drawn]

    async def _group(self, one: Drawn) -> Answered:
        self.sent[one.prompt.id] = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*(self.engine.generate(self._request(one.ordinal, n)) for n in range(GROUP)))
        return Answered(group=single_turns(one.prompt, [answer[0] for answer in answers]), rewards=(0.0, 1.0) * 2)

    def _request(self, ordinal: int, place: int) -> GenerationRequest:
        tokens = length(self.kind, ordinal, place)
        params = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=tokens, stop_token_ids=(), seed=0)
        name = f"{ordinal} {place}"
        return GenerationRequest(id=name, token_ids=(1,), num_completions=1, params=params, group=str(ordinal))

    async def interrupt(self) -> None: ...

    def so_far(self, drawn: Drawn) -> tuple[()]:
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
    server = ServerSection(running_requests=mode, concurrency=4096)
    section = RolloutSection(
        prompts_per_step=PROMPTS, group_size=GROUP, engine="vllm", max_new_tokens=MOST * MEAN, server=server
    )
    servers = [Server(f"http://s:{n}", token=None, timeout_seconds=60) for n in range(SERVERS)]
    prompts = [Prompt(id=f"{n}", text="", token_ids=(1,), answer="") for n in range(PROMPTS * (steps + k + 2))]
    ran = Ran(Sleeping(pause, mode == "abort"))

    async def steps_made() -> None:
        engine = ServedEngine(ran.servers, servers, server, max_length=4096, vocab_size=10, slots=SLOTS)
        source = Asking(engine, kind)
        stream = Stream(
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
            stream.pushed(step)
            trajectories = [one for group in batch.groups for one in group.trajectories]
            turns = [turn for one in trajectories for turn in one.turns]
            row = stream.row() | engine.step_row() | carried_row(trajectories, section)
            ran.rows.append({**row, **stretch_row({**row})})
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


def spare(asked: Sequence[Asked], begin: float, end: float) -> float:
    """Seconds with fewer requests than slots."""
    events = sorted((t, change) for one in asked for t, change in ((one.came, 1), (one.ended, -1)))
    moments, count, total = [begin, *(t for t, _ in events if begin < t < end), end], 0, 0.0
    for a, b in pairwise(moments):
        count = sum(change for t, change in events if t <= a)
        total += (b - a) * (count < SLOTS * SERVERS)
    return total


def test_idle_shares_waits_and_ages_are_those_of_what_servers_and_learner_did(ran: Ran) -> None:
    asked, waits = ran.servers.asked, 0.0
    assert not ran.rows[0].keys() & {"idle/learner_fraction", "overlap/stretch"}  # of no time before it
    for i in range(1, len(ran.rows)):
        row, begin, end = ran.rows[i], ran.at[i - 1], ran.at[i]
        used = between(((one.began, one.ended) for one in asked), begin, end) / (SLOTS * SERVERS)
        whole = end - begin
        assert row["idle/engine_fraction"] == pytest.approx(1 - used / whole, abs=1e-9)
        assert row["idle/learner_fraction"] == pytest.approx(1 - TRAIN / whole, abs=1e-9)
        assert row["overlap/stretch"] == pytest.approx(whole / max(TRAIN, used))
        assert row["wait/admission_seconds"] == pytest.approx(spare(asked, begin, end), abs=1e-9)
        waits += row["wait/admission_seconds"]
        assert row["age/seconds_mean"] == pytest.approx(np.mean([end - TRAIN - sent for sent in ran.sent[i]]))
        assert "in_flight/tokens" not in row  # servers do not tell
    assert 0 < waits < ran.at[-1] - ran.at[0]


@pytest.mark.parametrize("mode", ["recompute", "keep_cache", "abort"])
def test_tokens_that_pushes_met_are_counted_one_by_one(mode: RunningRequests) -> None:
    one = run("heavy", 2, 8, mode, PAUSE)
    resumed = 0
    for row, turns in zip(one.rows, one.turns, strict=True):
        versions = [np.zeros(len(turn.logprobs), int) for turn in turns]
        for turn, of_tokens in zip(turns, versions, strict=True):
            for span in turn.spans:
                of_tokens[span.start :] = span.version
        met = [[n for n in range(1, len(each)) if each[n] != each[n - 1]] for each in versions]
        assert row["in_flight/resumed_tokens"] == sum(places[-1] for places in met if places)
        again = None if mode == "keep_cache" else sum(sum(places) for places in met)
        assert row.get("in_flight/recomputed_tokens") == again
        resumed += row["in_flight/resumed_tokens"]
        assert row["seconds/pause"] == pytest.approx(PAUSE)
    assert resumed > 1000
    for (pushed, _), row in zip(one.servers.loaded["http://s:1"][1:], one.rows, strict=True):
        there = [a for a in one.servers.asked if a.came < pushed and a.ended >= pushed]
        tokens = sum(a.before + a.made * (a.ended <= pushed + PAUSE) for a in there)
        assert row.get("in_flight/tokens") == (tokens if mode == "abort" else None)
