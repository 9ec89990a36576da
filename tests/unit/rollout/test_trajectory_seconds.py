"""What is under way when ``environment.seconds`` run out: a step, an agent's tool, an agent's reward."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from rl_megatron.environments.protocol import EnvironmentStep, LimitReached, Model, Reply
from rl_megatron.environments.registry import EnvironmentMaker
from rl_megatron.types import Prompt
from tests.scripted_engine import Scripted, sampler, trajectories
from tests.unit.rollout.test_environment_source import Talks
from tests.unit.rollout.test_environments_that_fail import FOR_EVER, LIMIT, played


async def agent_that_hangs(task: Prompt, model: Model, turns: int = 0) -> float:
    for _ in range(turns):
        await model.reply([{"role": "user", "content": task.text}])
    await asyncio.sleep(FOR_EVER)
    raise AssertionError


async def agent_that_scores_at_the_limit(task: Prompt, model: Model) -> float:
    with contextlib.suppress(LimitReached):
        while True:
            await model.reply([{"role": "user", "content": task.text}])
            await asyncio.sleep(0.05)
    await asyncio.sleep(1.1)
    return 0.5


def test_an_agent_has_the_seconds_of_a_trajectory() -> None:
    keys = {"seconds": 0.2, "step_seconds": 0.1, "group_size": 1}
    function = f"{__name__}:agent_that_hangs"
    (one,) = played(sampler(Scripted(lambda text: "a"), function=function, on_error="drop", **keys))
    assert one.reason == "environment_error"
    assert "the function did not end within environment.seconds=0.2" in one.problem


def test_an_agent_that_hangs_behind_a_turn_is_trained_on_and_named(caplog: pytest.LogCaptureFixture) -> None:
    keys = {"seconds": 0.2, "step_seconds": 0.1, "group_size": 1, "options": {"turns": 2}}
    (one,) = trajectories(played(sampler(Scripted(lambda text: "a"), function=f"{__name__}:agent_that_hangs", **keys)))
    assert (one.stop, one.reward, len(one.turns)) == ("seconds", 0.0, 2)
    assert "trajectory 0 of step 1, turn 2: the function did not end within environment.seconds=0.2" in caplog.text


def test_an_agent_may_take_step_seconds_for_its_reward_at_the_limit() -> None:
    keys = {"seconds": 0.2, "step_seconds": LIMIT, "group_size": 1, "max_turns": 1000}
    function = f"{__name__}:agent_that_scores_at_the_limit"
    (one,) = trajectories(played(sampler(Scripted(lambda text: "a"), function=function, **keys)))
    assert (one.stop, one.reward) == ("seconds", 0.5)


def test_a_step_that_runs_past_the_end_of_the_trajectory_ends_it_as_it_is() -> None:
    class Works(Talks):
        async def step(self, reply: Reply) -> EnvironmentStep:
            await asyncio.sleep(0.3)
            return await super().step(reply)

    keys = {"seconds": 0.2, "step_seconds": LIMIT, "group_size": 1}
    (one,) = trajectories(played(sampler(Scripted(lambda text: "a"), EnvironmentMaker(Works), **keys)))
    assert (one.stop, one.reward, len(one.turns)) == ("seconds", 1.0, 1)
