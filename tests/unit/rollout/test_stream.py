"""The Stream on a virtual clock: thousands of small worlds, whose groups take any time and whose runs are killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.data.prompts import PromptStream
from rl_megatron.rollout.batch import Answered, Drawn
from rl_megatron.rollout.stream import Stream, StreamState, Waiting
from rl_megatron.types import Prompt, RolloutGroup
from tests.virtual_time import run_at_once

PROMPTS = [Prompt(id=f"p{i}", text="", token_ids=(1,), answer="") for i in range(600)]
STEPS = 12


@dataclass
class Source:
    """Takes ``seconds(prompt)`` for each group, all of those asked together as long as the longest."""

    seconds: Callable[[str], float]
    dropped: Callable[[str], bool] = lambda _: False
    stream: Stream = field(init=False)
    versions: dict[str, int] = field(default_factory=dict)  # served when a prompt was last asked for
    asked: list[list[int]] = field(default_factory=list)
    asked_at: list[float] = field(default_factory=list)

    async def groups(self, drawn: Sequence[Drawn]) -> list[Answered]:
        self.asked.append([one.ordinal for one in drawn])
        self.asked_at.append(asyncio.get_running_loop().time())
        self.versions |= {one.prompt.id: self.stream.version for one in drawn}
        await asyncio.sleep(max(self.seconds(one.prompt.id) for one in drawn))
        return [self._answer(one.prompt) for one in drawn]

    def _answer(self, prompt: Prompt) -> Answered:
        rewards = (0.0, 0.0) if self.dropped(prompt.id) else (0.0, 1.0)
        return Answered(group=RolloutGroup(prompt=prompt, trajectories=()), rewards=rewards)


def stream_over(source: Source, *, size: int, staleness: int, served: bool = True, **section: Any) -> Stream:
    source.stream = Stream(
        prompts=PromptStream(PROMPTS, seed=0),
        source=source,
        section=RolloutSection(prompts_per_step=size, engine="vllm" if served else "local", **section),
        max_staleness=staleness,
        teaches=lambda groups: [not source.dropped(group.prompt.id) for group in groups],
    )
    return source.stream


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
        seconds = {prompt.id: r.random() * r.choice([1, 1, 1, tail]) for prompt in PROMPTS}
        dropped = {prompt.id for prompt in PROMPTS if r.random() < drop}
        self.source = Source(seconds.__getitem__, dropped.__contains__)
        self.order = [prompt.id for prompt in PromptStream(PROMPTS, seed=0).take(len(PROMPTS))]
        self.trained: list[tuple[str, int]] = []  # prompt, step
        self.left_out = 0

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
        options = {"dynamic_sampling": self.mode, "max_refills": self.random.randint(1, 3)}
        stream = stream_over(self.source, size=self.size, staleness=self.staleness, served=self.served, **options)
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
        in_places = [place.answered for place in state.places if place.answered is not None]
        assert len(trained) == len(set(trained)), self.seed
        assert not set(trained) & set(waiting), self.seed
        assert set(trained) | set(waiting) <= set(self.order[: state.drawn]), self.seed
        assert len(trained) + len(waiting) + self.left_out + len(state.left_out) == state.drawn, self.seed
        assert state.drawn - state.opened <= (stream.version + self.staleness + 1) * self.size, self.seed
        assert all(one.reason is not None for one in (*state.left_out, *in_places) if one.group is None)
        assert all(place.birth <= stream.version < place.due for place in state.places), self.seed
        if not self.served:
            assert all(place.answered is not None for place in state.places), self.seed


def test_random_worlds_keep_the_bound_and_lose_nothing() -> None:
    worlds = [World(seed) for seed in range(500)]
    for world in worlds:
        run_at_once(world.run())
    assert sum(world.kills for world in worlds) > 100
    assert sum(world.reached for world in worlds) > 300


def possible(dues: Sequence[int], step: int, size: int) -> bool:
    """Whether groups of these dues can all be trained after ``step``, ``size`` a step."""
    return all(step + 1 + i // size <= due for i, due in enumerate(sorted(dues)))


def taken(places: Sequence[Waiting], *, size: int, staleness: int, version: int) -> list[int] | None:
    """The ordinals that the next step takes at once; None if it waits."""
    source = Source(lambda _: float("inf"))

    async def take() -> list[int]:
        stream = stream_over(source, size=size, staleness=staleness)
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
