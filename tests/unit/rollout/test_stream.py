"""The Stream on a virtual clock: thousands of small worlds, whose groups take any time and whose runs are killed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import random
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from rl_megatron.data.problems.pool import PromptStream
from rl_megatron.errors import CheckpointError, DataError, EngineError
from rl_megatron.rollout import stream as stream_module
from rl_megatron.rollout.stream import (
    Draw,
    GroupResult,
    Ledger,
    LedgerState,
    PendingPrompt,
    RolloutStream,
    StreamState,
    ledger_lines,
)
from rl_megatron.types import Prompt, RolloutGroup, Span, TokenSequence, Trajectory, Turn
from tests.completions import trajectory
from tests.streams import PROMPTS, Source, stream_over
from tests.virtual_time import run_at_once

STEPS = 10
TOKENS = np.zeros(301, np.int32)
OF_WORLDS = PROMPTS[:200]  # no world draws as many
ORDER = [prompt.id for prompt in PromptStream(OF_WORLDS, seed=0).next_prompts(len(OF_WORLDS))]


@dataclass
class World:
    """A run of a random kind, killed at random moments; ``check`` counts prompts by itself."""

    seed: int
    kills: int = 0
    reached: bool = False  # whether a token was as old as it may be

    def __post_init__(self) -> None:
        r = self.random = random.Random(self.seed)
        self.size, self.staleness, self.served = r.randint(1, 6), r.randint(0, 5), r.random() < 0.8
        tail, drop = r.choice([1, 5, 40]), r.choice([0, 0, 0.2, 0.6])
        self.mode = r.choice(["off", "refill", "drop"])
        self.training, self.kill = r.choice([0.1, 1, 10]), r.choice([0, 0.1, 0.3])
        seconds = {prompt.id: r.random() * r.choice([1, 1, 1, tail]) for prompt in OF_WORLDS}
        dropped = {prompt.id for prompt in OF_WORLDS if r.random() < drop}
        self.source = Source(seconds.__getitem__, dropped.__contains__)
        self.trained: list[tuple[str, int]] = []  # prompt, step
        self.left_out = 0
        self.limit = r.choice([None, None, 1, 2, 7]) if self.served else None  # of groups

    async def run(self) -> None:
        stream, position = self._new()
        saved = stream.state(), position.state(), [*self.trained], self.left_out
        while stream.version < STEPS:
            try:
                lives = self.random.uniform(0, 2 * self.training) if self.random.random() < self.kill else None
                async with asyncio.timeout(lives):
                    await self._step(stream)
            except TimeoutError:
                self.kills += 1
                await stream.close()
                stream, position = self._new()
                state, prompts, trained, self.left_out = saved
                self.trained = [*trained]
                stream.restore(state)
                position.restore(prompts)
            self.check(stream)
            if self.random.random() < 0.5:
                saved = stream.state(), position.state(), [*self.trained], self.left_out
        await stream.close()

    def _new(self) -> tuple[RolloutStream, PromptStream]:
        options = {"dynamic_sampling": self.mode, "group_size": 4}
        options["max_in_flight"] = None if self.limit is None else 4 * self.limit + self.random.randint(0, 3)
        options |= {"size": self.size, "staleness": self.staleness, "served": self.served, "last_step": STEPS}
        stream = stream_over(self.source, prompts=OF_WORLDS, **options)
        return stream, stream._prompts

    async def _step(self, stream: RolloutStream) -> None:
        step = stream.version + 1
        batch = await stream.take(step)
        ages = [stream.version - self.source.versions[group.prompt.id] for group in batch.groups]
        assert all(0 <= age <= self.staleness for age in ages), (self.seed, ages)
        self.reached |= self.staleness in ages
        await asyncio.sleep(self.training * self.random.random())
        await stream.wait_until_pushable()
        self.trained += [(group.prompt.id, step) for group in batch.groups]
        self.left_out += batch.dropped_groups + batch.filtered_groups
        stream.on_push(step)

    def check(self, stream: RolloutStream) -> None:
        """Every prompt drawn is trained on once, or left out, or waits; and no more were drawn than the rule allows."""
        state, trained = stream.state(), [name for name, _ in self.trained]
        waiting = [place.drawn.prompt.id for place in state.places]
        assert state.drawn <= len(ORDER), self.seed
        assert len(trained) == len(set(trained)), self.seed
        assert not set(trained) & set(waiting), self.seed
        assert set(trained) | set(waiting) <= set(ORDER[: state.drawn]), self.seed
        assert len(trained) + len(waiting) + self.left_out + len(state.left_out) == state.drawn, self.seed
        counted = stream.row()
        assert counted["ledger/drawn"] == state.drawn, self.seed
        assert counted["ledger/trained"] == len(trained), self.seed
        assert counted["ledger/buffered"] == sum(one.is_trainable for one in state.places), self.seed
        until = STEPS if self.served else STEPS + self.staleness
        assert state.drawn - state.opened <= min(stream.version + self.staleness + 1, until) * self.size, self.seed
        assert all(one.answered.reason for one in state.left_out if one.answered is not None)
        assert all(
            place.birth <= stream.version < place.due == place.birth + self.staleness + 1 for place in state.places
        ), self.seed
        if not self.served:
            assert all(place.answered is not None for place in state.places), self.seed


@pytest.mark.parametrize("first", range(0, 1500, 300))
def test_random_worlds_keep_the_bound_and_lose_nothing(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = [World(seed) for seed in range(first, first + 300)]
    for world in worlds:
        monkeypatch.setattr(stream_module, "_MAX_BATCHES", world.random.randint(1, 3))
        run_at_once(world.run())
        assert world.limit is None or world.source.most <= world.limit, world.seed
    assert sum(world.source.most == world.limit for world in worlds) > 60
    assert sum(world.kills for world in worlds) > 200
    assert sum(world.reached for world in worlds) > 200


def possible(dues: Sequence[int], step: int, size: int) -> bool:
    """Whether groups of these dues can all be trained after ``step``, ``size`` a step."""
    return all(step + 1 + i // size <= due for i, due in enumerate(sorted(dues)))


def taken(places: Sequence[PendingPrompt], *, size: int, staleness: int, version: int) -> list[int] | None:
    """The ordinals that the next step takes; None if it waits."""

    async def take() -> list[int]:
        stream = stream_over(Source(lambda _: float("inf")), size=size, staleness=staleness)
        stream.restore(
            StreamState(
                version=version,
                drawn=(version + staleness + 1) * size,
                opened=0,
                credit=0,
                ahead=staleness,
                calm=0,
                batch=(),
                places=tuple(places),
                left_out=(),
                ledger=LedgerState(trained=version * size),
            )
        )
        async with asyncio.timeout(1e6):
            return [PROMPTS.index(group.prompt) for group in (await stream.take(version + 1)).groups]

    with contextlib.suppress(TimeoutError):
        return run_at_once(take())
    return None


def test_a_step_waits_if_and_only_if_every_choice_of_finished_groups_would_make_one_late() -> None:
    """Brute force over all births and all sets of finished groups of G = 2, k = 2."""
    size, staleness, version, waits = 2, 2, 5, 0
    for order in itertools.combinations_with_replacement(range(version - staleness, version + 1), 3 * size):
        dues = [birth + staleness + 1 for birth in order]
        if not possible(dues, version, size):
            continue  # the rule of admission does not lead here
        for finished in itertools.product([False, True], repeat=3 * size):
            places = [
                PendingPrompt(
                    drawn=Draw(ordinal=i, prompt=PROMPTS[i], batch=1),
                    birth=birth,
                    due=due,
                    answered=GroupResult(group=RolloutGroup(prompt=PROMPTS[i], trajectories=())) if done else None,
                )
                for i, (birth, due, done) in enumerate(zip(order, dues, finished, strict=True))
            ]
            ready = [i for i, done in enumerate(finished) if done]
            choices = [
                chosen
                for chosen in itertools.combinations(ready, size)
                if possible([due for i, due in enumerate(dues) if i not in chosen], version + 1, size)
            ]
            got = taken(places, size=size, staleness=staleness, version=version)
            assert got == (list(min(choices)) if choices else None), (order, finished)
            waits += not choices
    assert waits > 100


def test_the_ledger_has_a_line_for_each_prompt_and_is_cut_back_with_the_run(tmp_path: Path) -> None:
    """Read by json alone: after a kill every prompt that was drawn is there once or waits, in the order of the data."""
    path, left_out = tmp_path / "ledger.jsonl", {f"p{i}" for i in range(0, 600, 3)}
    source = Source(lambda name: 1 + int(name[1:]) % 7, left_out.__contains__)
    options = {"size": 3, "staleness": 2, "path": path, "dynamic_sampling": "refill"}

    async def run(steps: int, state: StreamState | None) -> StreamState:
        stream = stream_over(source, **options)
        if state is None:
            stream.restart()
        else:
            stream._prompts.next_prompts(state.drawn)
            stream.restore(state)
        for step in range(stream.version + 1, stream.version + steps + 1):
            await stream.take(step)
            stream.on_push(step)
        state = stream.state()
        await stream.close()
        return state

    saved = run_at_once(run(3, None))
    run_at_once(run(2, saved))  # lost by a kill
    final = run_at_once(run(4, saved))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    assert {line["step"] for line in lines} == set(range(1, 8))
    order = [prompt.id for prompt in PromptStream(PROMPTS, seed=0).next_prompts(final.drawn)]
    assert [line["prompt"] for line in lines] == [order[line["ordinal"]] for line in lines]
    assert len({line["ordinal"] for line in lines}) == len(lines)
    waiting = {one.drawn.ordinal for one in (*final.places, *final.left_out)}
    assert {line["ordinal"] for line in lines} | waiting == set(range(final.drawn))
    assert Counter(line["step"] for line in lines if line["state"] == "trained") == dict.fromkeys(range(1, 8), 3)
    dropped = [line for line in lines if line["state"] == "dropped"]
    assert {line["reason"] for line in dropped} == {"equal_rewards"}
    assert all(line["prompt"] in left_out for line in dropped)

    told = 0
    for line in lines:
        said = f"{line['ordinal']} {line['step'] if line['state'] == 'trained' else line['reason']}"
        told ^= int(hashlib.sha256(said.encode()).hexdigest(), 16)
    assert final.ledger.digest == f"{told:064x}"

    path.write_text("".join(json.dumps(line) + "\n" for line in lines[1:]))
    with pytest.raises(CheckpointError, match=r"ledger.jsonl: its 20 prompts trained on .* not the 21 .* remove it"):
        run_at_once(run(1, final))
    path.unlink()
    run_at_once(run(1, run_at_once(run(1, final))))  # whose earlier lines are gone, as it knows
    assert {json.loads(line)["step"] for line in path.read_text().splitlines()} == {8, 9}


def test_a_line_of_the_ledger_grows_with_the_versions_of_a_trajectory_and_not_with_its_turns(tmp_path: Path) -> None:
    r, ledger = random.Random(0), Ledger(tmp_path / "ledger.jsonl")
    sampled = list[list[int]]()  # the version of each token of a trajectory

    def trajectory() -> Trajectory:
        versions, turns = sorted(r.choices(range(4), k=300)), list[Turn]()
        sampled.append(versions)
        starts = [0, *sorted(r.sample(range(1, 300), 49)), 300]
        for number, (start, stop) in enumerate(itertools.pairwise(starts)):
            own = versions[start:stop]
            spans = tuple(Span(own.index(version), version) for version in sorted(set(own)))
            logprobs = np.zeros(stop - start, np.float32)
            turns.append(Turn(start=1, logprobs=logprobs, finish_reason="stop", spans=spans, text="", number=number))
        rows = [[turn for turn in turns if turn.number % 3 == row] for row in range(3)]  # as a client that branches
        return Trajectory(chains=tuple(TokenSequence(token_ids=TOKENS, turns=tuple(row)) for row in rows), reward=0.0)

    group = RolloutGroup(prompt=PROMPTS[0], trajectories=tuple(trajectory() for _ in range(20)))
    drawn = Draw(ordinal=0, prompt=PROMPTS[0], batch=1)
    ledger.move([0], "queued")
    ledger.move([0], "in_flight")
    ledger.move([0], "buffered")
    ended = [PendingPrompt(drawn=drawn, birth=0, due=4, answered=GroupResult(group=group))]
    ledger.end(ended, [], lines := ledger_lines(4, ended))
    ledger.write(lines)
    spans = json.loads((tmp_path / "ledger.jsonl").read_text())["spans"].split(", ")
    for told, versions in zip(spans, sampled, strict=True):
        changes = [(i, version) for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]]
        assert told == " ".join(f"{start}:{version}" for start, version in changes)


def test_a_resume_reads_the_ledger_line_by_line(tmp_path: Path) -> None:
    path, digest = tmp_path / "ledger.jsonl", 0
    with path.open("w") as file:
        for ordinal in range(4000):
            row = {"step": 1 + ordinal // 8, "ordinal": ordinal, "state": "trained", "spans": "0:1 " * 50}
            file.write(json.dumps(row) + "\n")
            digest ^= int(hashlib.sha256(f"{ordinal} {row['step']}".encode()).hexdigest(), 16)
    tracemalloc.start()
    Ledger(path).restore(LedgerState(trained=4000, digest=f"{digest:064x}"), 500, ())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 2


def test_a_resume_reads_no_more_of_the_ledger_than_its_end(tmp_path: Path) -> None:
    """By the kernel's count of bytes. A file of another end is read whole, as with a checkpoint of an older version."""
    path, digest = tmp_path / "ledger.jsonl", 0

    def lines(ordinals: Iterable[int]) -> str:
        rows = ({"step": 1 + one // 8, "ordinal": one, "state": "trained", "spans": "0:1 " * 50} for one in ordinals)
        return "".join(json.dumps(row) + "\n" for row in rows)

    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    path.write_text(lines(range(4000)))
    for ordinal in range(4000):
        digest ^= int(hashlib.sha256(f"{ordinal} {1 + ordinal // 8}".encode()).hexdigest(), 16)
    ledger, older = Ledger(path), LedgerState(trained=4000, digest=f"{digest:064x}")
    ledger.restore(older, 500, ())
    state, size = ledger.state(), path.stat().st_size
    path.write_text(lines(range(4016)))  # of steps that a kill lost
    before = read()
    Ledger(path).restore(state, 500, ())
    assert read() - before < size / 4
    assert path.read_text() == lines(range(4000))
    path.write_text(lines(range(4000)).replace("0:1", "0:01"))
    Ledger(path).restore(state, 500, ())
    path.write_text(lines([*range(3999), 3998]))
    for held in (state, older):
        with pytest.raises(CheckpointError, match="its 4000 prompts trained on"):
            Ledger(path).restore(held, 500, ())


def test_a_run_that_had_dropped_prompts_alone_knows_that_its_ledger_was_removed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    dropped = LedgerState(dropped={"equal_rewards": 1}, digest=f"{1:064x}")
    ledger.restore(dropped, 0, ())
    path.write_text(json.dumps({"step": 1, "ordinal": 1, "state": "trained"}) + "\n")
    Ledger(path).restore(ledger.state(), 1, ())


def test_a_prompt_that_is_sent_twice_is_a_fault_of_the_stream() -> None:
    ledger = Ledger()
    ledger.move([0, 1], "queued")
    ledger.move([0], "in_flight")
    with pytest.raises(AssertionError):
        ledger.move([0], "in_flight")
    with pytest.raises(AssertionError):
        ledger.move([1], "buffered")
    ledger.check(2)
    with pytest.raises(AssertionError):
        ledger.check(3)


# What steps take from a Stream over many of them, on a virtual clock: lengths, ages, waits, and faults.
def kolmogorov_smirnov(a: Sequence[float], b: Sequence[float]) -> float:
    """The largest distance of the two distribution functions."""
    at = np.sort(np.concatenate((a, b)))
    below = [np.searchsorted(np.sort(x), at, "right") / len(x) for x in (a, b)]
    return float(np.abs(below[0] - below[1]).max())


async def steps(stream: RolloutStream, count: int, seconds: float) -> list[tuple[int, str, float]]:
    """The step, prompt and time of each group that ``count`` steps of ``seconds`` train on."""
    found = []
    for step in range(stream.version + 1, stream.version + count + 1):
        batch = await stream.take(step)
        now = asyncio.get_running_loop().time()
        found += [(step, group.prompt.id, now) for group in batch.groups]
        await asyncio.sleep(seconds)
        await stream.wait_until_pushable()
        stream.on_push(step)
    await stream.close()
    return found


def test_lengths_are_trained_as_they_are_drawn() -> None:
    """2,000 groups with a tail of 20 times the mean; what is finished first would be shorter."""
    rng, prompts = np.random.default_rng(0), [replace(PROMPTS[0], id=f"p{i}") for i in range(2200)]
    lengths = np.minimum(rng.lognormal(0, 1.3, (2, len(prompts))), 20)
    source = Source(lambda name: float(lengths[0, int(name[1:])]))
    trained = run_at_once(steps(stream_over(source, size=8, staleness=2, prompts=prompts), 250, 1.0))
    of_trained = [source.seconds(name) for _, name, _ in trained]
    assert len(of_trained) == len({name for _, name, _ in trained}) == 2000
    assert kolmogorov_smirnov(of_trained, lengths[1, :2000].tolist()) < 1.63 * (2 / 2000) ** 0.5
    soonest = sorted(lengths[0, :2024])[:2000]
    assert np.mean(of_trained) > 1.02 * np.mean(soonest)  # a batch of 24 left behind each 2,000 would be seen


def test_servers_sample_what_steps_take_and_nothing_more_and_a_resume_makes_the_run_longer() -> None:
    source = Source(lambda name: float(1 + hash_of(name) % 11))
    stream = stream_over(source, size=4, staleness=2, last_step=6)
    found = run_at_once(steps(stream, 6, 1.0))
    assert sorted(ordinal for asked in source.asked for ordinal in asked) == list(range(4 * 6))
    state, position = stream.state(), stream._prompts.state()
    assert (state.drawn, state.places) == (4 * 6, ())
    longer = stream_over(source, size=4, staleness=2, last_step=9)
    longer._prompts.restore(position)
    longer.restore(state)
    found += run_at_once(steps(longer, 3, 1.0))
    order = [prompt.id for prompt in PromptStream(PROMPTS, seed=0).next_prompts(4 * 9)]
    assert sorted(name for _, name, _ in found) == sorted(order)
    assert longer.state().places == ()


@pytest.mark.parametrize("limit", [None, 24], ids=["all at once", "six groups at once"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_servers_are_asked_for_a_group_before_the_next_one_is_drawn(staleness: int, limit: int | None) -> None:
    """A draw renders and tokenizes: no group waits for that of another, at a start and after pushes."""
    drawn = dict[int, int]()  # how many were, when the group of this ordinal was asked for

    class Counted(Source):
        async def groups(self, asked: Sequence[Draw]) -> list[GroupResult]:
            (one,) = asked
            drawn[one.ordinal] = self.stream.state().drawn
            return await super().groups(asked)

    async def run() -> int:
        source = Counted(lambda name: float(1 + hash_of(name) % 11))
        stream = stream_over(source, size=16, staleness=staleness, group_size=4, max_in_flight=limit)
        assert len(await steps(stream, 3, 1.0)) == 3 * 16
        return source.most

    most = run_at_once(run())
    assert sorted(drawn) == list(drawn)
    assert {count - ordinal for ordinal, count in drawn.items()} == {1}
    assert most == 6 if limit else most >= 16 * (1 + min(1, staleness))


def test_in_the_learners_processes_a_run_that_a_resume_makes_longer_is_that_of_as_many_steps() -> None:
    def run(lengths: Sequence[int]) -> list[tuple[int, str, int]]:
        source, found, before = Source(lambda _: 1.0), list[tuple[int, str, int]](), None
        for last in lengths:
            stream = stream_over(source, size=4, staleness=2, served=False, last_step=last)
            if before is not None:
                stream._prompts.restore(before._prompts.state())
                stream.restore(before.state())
            made = run_at_once(steps(stream, last - stream.version, 1.0))
            found += [(step, name, source.versions[name]) for step, name, _ in made]
            before = stream
        return found

    assert run([6, 9]) == run([9])


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4), (3, 0), (0, 3)])
def test_a_resume_with_another_staleness_drops_nothing_and_keeps_what_is_due(before: int, after: int) -> None:
    source = Source(lambda name: float(1 + hash_of(name) % 11))

    async def begun() -> tuple[StreamState, list[tuple[int, str, float]]]:
        stream = stream_over(source, size=4, staleness=before)
        stream.restore(replace(stream.state(), ahead=before))
        found = []
        for step in range(1, 7):
            found += [(step, group.prompt.id, 0.0) for group in (await stream.take(step)).groups]
            stream.on_push(step)
        await asyncio.sleep(0.5)  # groups are drawn one after the other, and none ends so soon
        state = stream.state()
        await stream.close()
        return state, found

    state, found = run_at_once(begun())
    old = {place.drawn.prompt.id: place.due for place in state.places}
    assert len(old) == 4 * (before + 1 if before else 0)
    stream = stream_over(source, size=4, staleness=after)
    stream._prompts.next_prompts(state.drawn)
    stream.restore(state)
    found += run_at_once(steps(stream, 12, 1.0))
    names = [name for _, name, _ in found]
    assert len(names) == len(set(names)) == 4 * 18
    order = [prompt.id for prompt in PromptStream(PROMPTS, seed=0).next_prompts(4 * 18)]
    assert set(order[: 4 * (18 - before - after)]) <= set(names)
    assert old.keys() <= set(names)
    for step, name, _ in found[24:]:
        bound = old[name] if name in old else source.versions[name] + after + 1
        assert step <= bound, (step, name, bound)


@pytest.mark.parametrize("limit", [None, 8], ids=["all at once", "two groups at once"])
def test_after_a_resume_without_staleness_nothing_is_sampled_while_the_learner_computes(limit: int | None) -> None:
    order = [prompt.id for prompt in PromptStream(PROMPTS, seed=0).next_prompts(len(PROMPTS))]
    source = Source(lambda name: 1.0 + order.index(name) / 4)  # what is due later takes longer

    async def run() -> tuple[int, list[int]]:
        stream = stream_over(source, size=4, staleness=3)
        stream.restore(replace(stream.state(), ahead=3))
        await steps(stream, 6, 0.5)
        state, position = stream.state(), stream._prompts.state()
        stream = stream_over(source, size=4, staleness=0, group_size=4, max_in_flight=limit)
        stream.restore(state)
        stream._prompts.restore(position)
        met = []
        for step in range(7, 14):
            assert len((await stream.take(step)).groups) == 4
            met.append(source.now)
            stream.on_push(step)
        await stream.close()
        return sum(place.answered is None for place in state.places), met

    left, met = run_at_once(run())
    assert left > 4
    assert met == [0] * 7


def hash_of(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16)


def test_sampling_is_as_far_ahead_as_the_learner_needs() -> None:
    """Where training is the slower half, batches are a push old, not 8; where a tail is long, they may be 8."""
    ages = {}
    for kind, seconds in (
        ("short", lambda name: 1.0 + hash_of(name) % 3),
        ("long", lambda name: 2.0 + hash_of(name) % 60),
    ):
        found = run_at_once(steps(stream_over(source := Source(seconds), size=4, staleness=8), 60, 8.0))
        ages[kind] = [step - 1 - source.versions[name] for step, name, _ in found[80:]]
        if kind == "short":
            at = sorted({when for _, _, when in found})[20:]
            assert np.diff(at).max() == pytest.approx(8.0)  # the learner never waits
    assert max(ages["short"]) <= 2
    assert max(ages["long"]) > 5


@pytest.mark.parametrize(("seconds", "share"), [(3.0, 1 / 3), (2.0, 0.0)], ids=["sampling is slower", "as fast"])
def test_a_row_has_the_share_of_the_time_for_which_the_learner_waited(seconds: float, share: float) -> None:
    """Batches of so many seconds, one at a time, and steps of 2."""

    async def rows(served: bool) -> list[dict[str, float]]:
        source = Source(lambda _: seconds)
        stream = stream_over(source, size=2, staleness=1, served=served, group_size=4, max_in_flight=8)
        found = []
        for step in range(1, 6):
            await stream.take(step)
            await asyncio.sleep(2.0)
            await stream.wait_until_pushable()
            stream.on_push(step)
            found.append(stream.row())
        await stream.close()
        return found

    first, *_, last = run_at_once(rows(served=True))
    assert "idle/learner_fraction" not in first
    assert (last["staleness/allowed"], last["idle/learner_fraction"]) == (1, pytest.approx(share))
    assert not any("idle/learner_fraction" in row for row in run_at_once(rows(served=False)))


def test_steps_that_draw_nothing_again_leave_as_many_places_to_draw_as_before() -> None:
    async def credits() -> list[int]:
        stream, found = stream_over(Source(lambda _: 1.0), size=2, staleness=2, dynamic_sampling="refill"), []
        for step in range(1, 4):
            found.append(stream.state().credit)
            await stream.take(step)
            stream.on_push(step)
        await stream.close()
        return found

    assert run_at_once(credits()) == [(2 + 1) * 7 * 2] * 3


def test_tokens_of_a_group_that_teaches_nothing_count_with_those_left_out_before() -> None:
    class Sampled(Source):
        def _answer(self, prompt: Prompt) -> GroupResult:
            group = RolloutGroup(prompt=prompt, trajectories=(trajectory([3]),))
            return replace(super()._answer(prompt), group=group, left_out_tokens=2)

    first = PromptStream(PROMPTS, seed=0).next_prompts(1)[0].id

    async def left_out() -> list[int]:
        stream = stream_over(
            Sampled(lambda _: 1.0, lambda name: name == first), size=2, staleness=0, dynamic_sampling="drop"
        )
        places = (await stream.take(1)).places
        await stream.close()
        return [one.answered.left_out_tokens for one in places if one.answered is not None and not one.is_trainable]

    assert run_at_once(left_out()) == [2 + 3]


@pytest.mark.parametrize("served", [True, False], ids=["served", "local"])
def test_completions_in_flight_are_those_that_the_push_met_and_not_the_next_batch(served: bool) -> None:
    async def met() -> list[tuple[int, float]]:
        source, found = Source(lambda name: float(1 + hash_of(name) % 5)), []
        stream = stream_over(source, size=4, staleness=1, served=served, group_size=8)
        for step in range(1, 13):
            await stream.take(step)
            await asyncio.sleep(2.5)
            await stream.wait_until_pushable()
            under_way = source.now
            stream.on_push(step)
            await asyncio.sleep(0)
            found.append((8 * under_way, stream.row()["in_flight/completions"]))
        await stream.close()
        return found

    found = run_at_once(met())
    assert [said for _, said in found] == [there for there, _ in found]
    assert len({said for _, said in found}) == (3 if served else 1)


def test_a_group_that_hangs_holds_up_no_other_before_it_is_due() -> None:
    first = PromptStream(PROMPTS, seed=0).next_prompts(1)[0].id
    stream = stream_over(Source(lambda name: 500.0 if name == first else 1.0), size=4, staleness=3)
    stream.restore(replace(stream.state(), ahead=3))
    found = run_at_once(steps(stream, 6, 1.0))
    ((step, _, when),) = [one for one in found if one[1] == first]
    assert (step, when) == (4, 500.0)
    assert [now for at, _, now in found if at == 3] == [3.0] * 4


def test_a_fault_of_sampling_ends_the_step_that_waits_and_the_push_that_follows() -> None:
    async def fails(served: bool) -> None:
        def seconds(name: str) -> float:
            raise EngineError(f"no answer for {name}")

        stream = stream_over(Source(seconds), size=2, staleness=1, served=served)
        with pytest.raises(EngineError, match="no answer for p"):
            await stream.take(1)
        with pytest.raises(EngineError, match="no answer for p"):
            await stream.wait_until_pushable()
        await stream.close()

    run_at_once(fails(served=True))
    run_at_once(fails(served=False))


@pytest.mark.parametrize("served", [True, False], ids=["served", "local"])
def test_a_failed_draw_behind_a_group_fails_the_waiting_step(served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails() -> None:
        first = {prompt.id for prompt in PromptStream(PROMPTS, seed=0).next_prompts(8)}
        source = Source(lambda _: 1.0, dropped=first.__contains__)
        stream = stream_over(source, size=4, staleness=1, served=served, dynamic_sampling="refill")
        take, drawn = PromptStream.next_prompts, 0

        def take_eight(prompts: PromptStream, n: int) -> list[Prompt]:
            nonlocal drawn
            drawn += n
            if drawn > 8:
                raise DataError("train.parquet: the file has changed")
            return take(prompts, n)

        monkeypatch.setattr(PromptStream, "next_prompts", take_eight)
        with pytest.raises(DataError, match="the file has changed"):
            await stream.take(1)
        await stream.close()

    run_at_once(fails())


def test_sampling_that_is_cancelled_before_the_stream_is_closed_fails_the_step_that_waits() -> None:
    def seconds(name: str) -> float:
        raise asyncio.CancelledError

    async def fails() -> None:
        stream = stream_over(Source(seconds), size=2, staleness=0)
        with pytest.raises(EngineError, match="was canceled, but not by the run"):
            await stream.take(1)
        await stream.close()

    run_at_once(fails())


def test_a_wait_is_for_what_is_due_from_when_a_batch_is_finished_without_it() -> None:
    """Step 2 waits from second 1 to 50 for the first prompt, and from 2 on the fourth and the fifth are finished."""
    first, *_, sixth = (prompt.id for prompt in PromptStream(PROMPTS, seed=0).next_prompts(6))
    slow = {first: 50.0, sixth: 100.0}

    async def waits() -> list[tuple[float, list[int]]]:
        stream = stream_over(Source(lambda name: slow.get(name, 1.0)), size=2, staleness=1, group_size=4)
        found = []
        for step in (1, 2):
            places = (await stream.take(step)).places
            found.append((asyncio.get_running_loop().time(), [place.drawn.ordinal for place in places]))
            stream.on_push(step)
        await stream.close()
        return found

    assert run_at_once(waits()) == [(1.0, [1, 2]), (50.0, [0, 3])]
