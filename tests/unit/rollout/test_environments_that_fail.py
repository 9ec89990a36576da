"""Environments that hang, block, refuse to be cancelled, exit or leave processes: each is given up within its limit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from rl_megatron.environments.protocol import EnvironmentStep, Observed, Reply
from rl_megatron.environments.registry import EnvironmentMaker
from rl_megatron.errors import EnvironmentFailed, PoisonPrompt
from rl_megatron.rollout.batch import Answered, RolloutBatch
from rl_megatron.rollout.environments import playing as playing_module
from rl_megatron.types import Completion, GenerationRequest, Prompt
from tests.completions import drawn
from tests.scripted_engine import Scripted, sampler, trajectories
from tests.unit.rollout.test_environment_source import PROMPTS, Talks

FOR_EVER, LIMIT = 1000.0, 60.0  # seconds; no test is near the second on any machine


@pytest.fixture(autouse=True)
def _short_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playing_module, "_CLOSE_SECONDS", 0.2)


class Hangs(Talks):
    async def step(self, reply: Reply) -> EnvironmentStep:
        await asyncio.sleep(FOR_EVER)
        raise AssertionError


class Blocks(Talks):
    async def step(self, reply: Reply) -> EnvironmentStep:
        time.sleep(LIMIT / 2)  # a thread that blocks cannot be ended, and holds up nobody
        raise AssertionError


class Refuses(Talks):
    async def step(self, reply: Reply) -> EnvironmentStep:
        ends = time.monotonic() + LIMIT / 2
        while time.monotonic() < ends:
            try:
                await asyncio.sleep(FOR_EVER)
            except asyncio.CancelledError:
                continue
        raise AssertionError


class Exits(Talks):
    async def step(self, reply: Reply) -> EnvironmentStep:
        raise SystemExit(3)


class Lies(Talks):
    async def step(self, reply: Reply) -> Any:
        return {"observation": "all is well", "reward": 1.0}


class SaysHalfACharacter(Talks):
    said = "\ud83d"

    async def step(self, reply: Reply) -> EnvironmentStep:
        return EnvironmentStep(observation=Observed(said=self.said))


class SaysManyOfThem(SaysHalfACharacter):
    said = "\ud83d" * 2000  # which environment.max_observation_tokens would cut


class SaysANumber(Talks):
    async def step(self, reply: Reply) -> EnvironmentStep:
        return EnvironmentStep(observation=Observed(said=12))  # type: ignore[arg-type]


class HasNoMetrics(Talks):
    async def step(self, reply: Reply) -> EnvironmentStep:
        return EnvironmentStep(reward=1.0, metrics=None)  # type: ignore[arg-type]


class IsNoNumber(Talks):
    async def step(self, reply: Reply) -> EnvironmentStep:
        return EnvironmentStep(reward=float("nan"))


class IsAText(Talks):
    async def step(self, reply: Reply) -> EnvironmentStep:
        return EnvironmentStep(reward="1")  # type: ignore[arg-type]


class IsTooLarge(Talks):
    async def step(self, reply: Reply) -> EnvironmentStep:
        return EnvironmentStep(reward=-1e39)  # which float32 has not


def played(ours: Any) -> list[Answered]:
    async def groups() -> list[Answered]:
        found: list[Answered] = await ours.groups(drawn(PROMPTS[:1], 1))
        await ours.closed()
        return found

    return asyncio.run(asyncio.wait_for(groups(), LIMIT))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (Hangs, r"step did not end within environment.step_seconds=1"),
        (Blocks, r"step did not end within environment.step_seconds=1"),
        (Refuses, r"step did not end within environment.step_seconds=1"),
        (Exits, r"step raised SystemExit"),
        (Lies, r"step returned a dict, which is no EnvironmentStep"),
        (SaysHalfACharacter, r"step character 0 .*half of a surrogate pair"),
        (SaysManyOfThem, r"step character 0 .*half of a surrogate pair"),
        (SaysANumber, r"step returned an Observed that said 12, which is no text"),
        (HasNoMetrics, r"step returned the metrics None, which are no mapping"),
        (IsNoNumber, r"step returned nan, which is no finite number"),
        (IsAText, r"step returned '1', which is no finite number"),
        (IsTooLarge, r"step returned -1e\+39, which is no finite number of at most 1e\+30"),
    ],
)
def test_each_is_given_up_and_named(made: type[Talks], said: str) -> None:
    late = made in (Hangs, Blocks, Refuses)
    keys = {"step_seconds": 1.0 if late else LIMIT}
    scored = played(sampler(Scripted(lambda text: "a"), EnvironmentMaker(made), on_error=-1.0, **keys))
    assert {(one.stop, one.reward, len(one.turns)) for one in trajectories(scored)} == {("environment_error", -1.0, 1)}
    counted = RolloutBatch.of(scored)
    assert (counted.reward_errors, counted.late_rewards) == (3, 3 if late else 0)
    with pytest.raises(EnvironmentFailed, match=rf"prompt '3\*4', trajectory . of step 1, turn 1: {said}.*on_error"):
        played(sampler(Scripted(lambda text: "a"), EnvironmentMaker(made), **keys))


@pytest.mark.parametrize("given", [np.float32(0.5), torch.tensor(0.5), Fraction(1, 2)])
def test_a_number_of_any_kind_is_a_reward(given: Any) -> None:
    class Gives(Talks):
        async def step(self, reply: Reply) -> EnvironmentStep:
            return EnvironmentStep(reward=given, metrics={"half": given})

    one, *_ = trajectories(played(sampler(Scripted(lambda text: "a"), EnvironmentMaker(Gives))))
    assert (one.reward, one.metrics["own/half"]) == (0.5, 0.5)


def test_others_of_the_group_are_not_held_up() -> None:
    class Sometimes(Talks):
        async def start(self, task: Prompt, seed: int) -> Any:
            if seed == first:
                await asyncio.sleep(FOR_EVER)
            return await super().start(task, seed)

    engine = Scripted(lambda text: "a")
    ours = sampler(engine, EnvironmentMaker(Sometimes), on_error=0.0, step_seconds=1.0, max_turns=2)
    first = ours._place(PROMPTS[0], "step 1", 0).seed
    (one,) = played(ours)
    assert one.reason == "environment_error"  # of the first, so of the group: it has no turn to train on
    assert "start did not end within environment.step_seconds=1" in one.problem
    assert len(engine.asked) == 2 * 2


def test_one_that_hangs_in_close_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Stays(Talks):
        async def close(self) -> None:
            await asyncio.sleep(FOR_EVER)

    found = trajectories(played(sampler(Scripted(lambda text: "a"), EnvironmentMaker(Stays))))
    assert [one.stop for one in found] == ["turns"] * 3
    assert "trajectory 0 of step 1, close did not end within 0.2 s" in caplog.text


@pytest.mark.parametrize("how", ["cancelled", "cancelled as it closes", "fails"])
async def test_whoever_ends_trajectories_waits_until_they_are_closed(how: str) -> None:
    closed, begun = list[int](), list[int]()

    class Cleans(Talks):
        async def step(self, reply: Reply) -> EnvironmentStep:
            begun.append(1)
            if how == "cancelled as it closes":
                return EnvironmentStep()
            if how == "fails" and len(begun) == 3:
                raise ValueError("no")
            await asyncio.sleep(FOR_EVER)
            raise AssertionError

        async def close(self) -> None:
            begun.append(1)
            await asyncio.sleep(0.05)
            closed.append(1)

    async with asyncio.timeout(LIMIT):
        playing = asyncio.ensure_future(
            sampler(Scripted(lambda text: "a"), EnvironmentMaker(Cleans)).groups(drawn(PROMPTS[:1], 1))
        )
        if how != "fails":
            while len(begun) < (3 if how == "cancelled" else 6):
                await asyncio.sleep(0)
            playing.cancel()
        with pytest.raises((asyncio.CancelledError, EnvironmentFailed)):
            await playing
        assert len(closed) == 3  # what the loop's end would cancel


def numbered(ours: Any, fail: set[int], last: int | None = None) -> type[Talks]:
    """Its reward is its trajectory's number in the group. Those of ``fail`` fail, ``last`` once a spare has begun."""
    numbers = {ours._place(PROMPTS[0], "step 1", number).seed: number for number in range(9)}
    begun = threading.Event()

    class Numbered(Talks):
        async def start(self, task: Prompt, seed: int) -> Any:
            self.number = numbers[seed]
            if self.number >= ours.rollout.group_size:
                begun.set()
            return await super().start(task, seed)

        async def step(self, reply: Reply) -> EnvironmentStep:
            if self.number == last:
                assert begun.wait(LIMIT / 2)
            if self.number in fail:
                raise KeyError(self.number)
            return EnvironmentStep(reward=float(self.number))

    return Numbered


@pytest.mark.parametrize("fail", [set[int](), {0}])
def test_a_prompt_that_is_poison_is_known_as_that_whatever_else_fails(fail: set[int]) -> None:
    class OfTheLast(Scripted):
        async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
            if "trajectory 2" in request.id:
                raise PoisonPrompt("servers ended under it")
            return await super().generate(request)

    ours = sampler(OfTheLast(lambda text: "a"), on_error="drop")
    (one,) = played(replace(ours, made=EnvironmentMaker(numbered(ours, fail))))
    assert (one.reason, one.problem) == ("poison", "servers ended under it")


def test_one_that_a_limit_ends_is_trained_on() -> None:
    engine = Scripted(lambda text: "a")
    (one,) = played(sampler(engine, EnvironmentMaker(Talks), on_error="drop", max_turns=1))
    assert [trajectory.stop for trajectory in trajectories([one])] == ["turns"] * 3
    assert len(engine.asked) == 3
