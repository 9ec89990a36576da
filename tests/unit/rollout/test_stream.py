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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from rl_megatron.data.problems.prompt_stream import PromptStream
from rl_megatron.errors import CheckpointError
from rl_megatron.rollout import stream as stream_module
from rl_megatron.rollout.batch import Answered, Drawn, Ledger, LedgerState, Waiting, lines_of
from rl_megatron.rollout.stream import Stream, StreamState
from rl_megatron.types import Chain, RolloutGroup, Span, Trajectory, Turn
from tests.streams import PROMPTS, Source, stream_over
from tests.virtual_time import run_at_once

STEPS = 10
TOKENS = np.zeros(301, np.int32)
OF_WORLDS = PROMPTS[:200]  # no world draws as many
ORDER = [prompt.id for prompt in PromptStream(OF_WORLDS, seed=0).take(len(OF_WORLDS))]


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

    def _new(self) -> tuple[Stream, PromptStream]:
        options = {"dynamic_sampling": self.mode, "group_size": 4}
        options["max_in_flight"] = None if self.limit is None else 4 * self.limit + self.random.randint(0, 3)
        options |= {"size": self.size, "staleness": self.staleness, "served": self.served, "last_step": STEPS}
        stream = stream_over(self.source, prompts=OF_WORLDS, **options)
        return stream, stream._prompts

    async def _step(self, stream: Stream) -> None:
        step = stream.version + 1
        batch = await stream.take(step)
        ages = [stream.version - self.source.versions[group.prompt.id] for group in batch.groups]
        assert all(0 <= age <= self.staleness for age in ages), (self.seed, ages)
        self.reached |= self.staleness in ages
        await asyncio.sleep(self.training * self.random.random())
        await stream.settled()
        self.trained += [(group.prompt.id, step) for group in batch.groups]
        self.left_out += batch.dropped_groups + batch.filtered_groups
        stream.pushed(step)

    def check(self, stream: Stream) -> None:
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
        assert counted["ledger/buffered"] == sum(one.kept for one in state.places), self.seed
        until = STEPS if self.served else STEPS + self.staleness
        assert state.drawn - state.opened <= min(stream.version + self.staleness + 1, until) * self.size, self.seed
        assert all(one.answered.reason for one in state.left_out if one.answered is not None)
        assert all(place.birth <= stream.version < place.due for place in state.places), self.seed
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


def taken(places: Sequence[Waiting], *, size: int, staleness: int, version: int) -> list[int] | None:
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
    births = itertools.combinations_with_replacement(range(version - staleness, version + 1), 3 * size)
    for order in births:
        dues = [birth + staleness + 1 for birth in order]
        if not possible(dues, version, size):
            continue  # the rule of admission does not lead here
        for finished in itertools.product([False, True], repeat=3 * size):
            places = [
                Waiting(
                    drawn=Drawn(ordinal=i, prompt=PROMPTS[i], batch=1),
                    birth=birth,
                    due=due,
                    answered=Answered(group=RolloutGroup(prompt=PROMPTS[i], trajectories=())) if done else None,
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
    path = tmp_path / "ledger.jsonl"
    left_out = {f"p{i}" for i in range(0, 600, 3)}
    source = Source(lambda name: 1 + int(name[1:]) % 7, left_out.__contains__)
    options = {"size": 3, "staleness": 2, "path": path, "dynamic_sampling": "refill"}

    async def run(steps: int, state: StreamState | None) -> StreamState:
        stream = stream_over(source, **options)
        if state is None:
            stream.start_over()
        else:
            stream._prompts.take(state.drawn)
            stream.restore(state)
        for step in range(stream.version + 1, stream.version + steps + 1):
            await stream.take(step)
            stream.pushed(step)
        state = stream.state()
        await stream.close()
        return state

    saved = run_at_once(run(3, None))
    run_at_once(run(2, saved))  # lost by a kill
    final = run_at_once(run(4, saved))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    assert {line["step"] for line in lines} == set(range(1, 8))
    order = [prompt.id for prompt in PromptStream(PROMPTS, seed=0).take(final.drawn)]
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
    later = run_at_once(run(1, final))
    run_at_once(run(1, later))  # whose earlier lines are gone, as it knows
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
        return Trajectory(chains=tuple(Chain(token_ids=TOKENS, turns=tuple(row)) for row in rows), reward=0.0)

    group = RolloutGroup(prompt=PROMPTS[0], trajectories=tuple(trajectory() for _ in range(20)))
    drawn = Drawn(ordinal=0, prompt=PROMPTS[0], batch=1)
    ledger.move([0], "queued")
    ledger.move([0], "in_flight")
    ledger.move([0], "buffered")
    ended = [Waiting(drawn=drawn, birth=0, due=4, answered=Answered(group=group))]
    ledger.end(ended, [], lines := lines_of(4, ended))
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
    Ledger(path).restore(LedgerState(trained=4000, digest=f"{digest:064x}"), 500, (), ())
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
    ledger.restore(older, 500, (), ())
    state, size = ledger.state(), path.stat().st_size
    path.write_text(lines(range(4016)))  # of steps that a kill lost
    before = read()
    Ledger(path).restore(state, 500, (), ())
    assert read() - before < size / 4
    assert path.read_text() == lines(range(4000))
    path.write_text(lines(range(4000)).replace("0:1", "0:01"))
    Ledger(path).restore(state, 500, (), ())
    path.write_text(lines([*range(3999), 3998]))
    for held in (state, older):
        with pytest.raises(CheckpointError, match="its 4000 prompts trained on"):
            Ledger(path).restore(held, 500, (), ())


def test_a_run_that_had_dropped_prompts_alone_knows_that_its_ledger_was_removed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    dropped = LedgerState(dropped={"equal_rewards": 1}, digest=f"{1:064x}")
    ledger.restore(dropped, 0, (), ())
    path.write_text(json.dumps({"step": 1, "ordinal": 1, "state": "trained"}) + "\n")
    Ledger(path).restore(ledger.state(), 1, (), ())


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
