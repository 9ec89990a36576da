"""Prompts that servers answer with an error while they live on and answer others, in random worlds on a virtual clock;
and those that were dropped, which are drawn no more.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import TypeAdapter

from rl_megatron.config.io import load_config
from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.errors import PoisonPrompt
from rl_megatron.rollout.servers.engine import ServedEngine
from rl_megatron.rollout.servers.http import AttemptFailed
from rl_megatron.training.checkpoints import TrainerState
from rl_megatron.training.jobs.rl import Reinforcement
from rl_megatron.types import Completion, GenerationRequest
from tests.completions import completion
from tests.streams import PROMPTS, stream_over
from tests.unit.rollout.test_engine_servers import REQUEST, push
from tests.unit.rollout.test_suspects import Deadly, Poisoned, Seat
from tests.virtual_time import run_at_once


@dataclass
class World:
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
        engine = ServedEngine(Failing(self), seats, section, max_length=99, vocab_size=99)
        await push(engine, 1)
        await asyncio.gather(*(self.group(engine, name) for name in self.groups))

    async def group(self, engine: ServedEngine, name: str) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(self.members):
                    tasks.create_task(engine.generate(replace(REQUEST, group=name, id=f"{name}, completion {number}")))
            self.answered.add(name)
        except* PoisonPrompt:
            self.dropped.add(name)


class Failing(Deadly):
    """Answers after some seconds: to bad prompts always with an error."""

    world: Any

    async def generate(self, server: Any, request: GenerationRequest, request_id: str) -> list[Completion]:
        name = str(request.group)
        await asyncio.sleep(self.world.seconds * self.world.random.random())
        if name in self.world.bad:
            self.world.failures[name] += 1
            raise AttemptFailed(f"{server.url}: status 500")
        return [completion([5], spans=((0, 1),))] * request.num_completions


@pytest.fixture(scope="module")
def worlds() -> Sequence[World]:
    found = [World(seed) for seed in range(40)]
    logging.disable(logging.CRITICAL)  # thousands of lines
    try:
        for world in found:
            run_at_once(world.run())  # raises what ends a run
    finally:
        logging.disable(logging.NOTSET)
    return found


def test_each_is_found_and_all_others_are_answered(worlds: Sequence[World]) -> None:
    """None of them ends the run, though what one failed beside another counted for both at first."""
    for world in worlds:
        assert (world.dropped, world.answered) == (world.bad, set(world.groups) - world.bad), world.seed


def test_each_is_asked_a_few_times(worlds: Sequence[World]) -> None:
    tries = sorted(world.failures[name] / world.members for world in worlds for name in world.bad)
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
        return Reinforcement(
            config=load_config("tiny_cpu", []),
            roles=cast(Any, SimpleNamespace(weights=weights)),
            stream=stream,
            prompts=stream._prompts,
            **dict.fromkeys(("evaluation", "start_folder", "recorder", "route"), cast(Any, None)),
            update=cast(Any, SimpleNamespace(state=None, of_models=())),
        )

    async def run() -> int:
        now, dropped = job(), 0
        for step in range(1, 15):
            now.number, batch = step, await now.stream.take(step)
            dropped += batch.dropped_groups
            now.stream.pushed(step)
            if step == 6:
                saved, now = as_json.dump_json(now.state()), job()
                await now.restore(as_json.validate_json(saved))
        return dropped

    assert run_at_once(run()) == 1
    assert asked["p3"] == 1
    assert sum(asked.values()) == 28
    assert {asked[prompt.id] for prompt in prompts} == {1, 3}
