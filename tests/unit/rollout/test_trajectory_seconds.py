"""What is under way when ``environment.seconds`` run out: a turn, a step, an agent's tool, an agent's reward."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rl_megatron.environments.protocol import EnvironmentStep, LimitReached, Model, Reply
from rl_megatron.environments.registry import Agent, EnvironmentMaker
from rl_megatron.errors import EnvironmentFailed
from rl_megatron.rollout.servers.engine import ServedEngine
from rl_megatron.rollout.servers.http import Server
from rl_megatron.types import Completion, GenerationRequest, Prompt
from tests.completions import drawn
from tests.scripted_engine import EOS, Scripted, sampler, trajectories
from tests.unit.rollout.test_engine_servers import SECTION, Words, push, running
from tests.unit.rollout.test_environment_source import PROMPTS, Talks
from tests.unit.rollout.test_environments_that_fail import FOR_EVER, LIMIT, played
from tests.unit.rollout.test_time_limit import Slow


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
    keys = {"seconds": 2.0, "step_seconds": 0.1, "group_size": 1, "options": {"turns": 2}}
    (one,) = trajectories(played(sampler(Scripted(lambda text: "a"), function=f"{__name__}:agent_that_hangs", **keys)))
    assert (one.stop, one.reward, len(one.turns)) == ("seconds", 0.0, 2)
    assert "trajectory 0 of step 1, turn 2: the function did not end within environment.seconds=2" in caplog.text


def test_an_agent_may_take_step_seconds_for_its_reward_at_the_limit() -> None:
    keys = {"seconds": 0.2, "step_seconds": LIMIT, "group_size": 1, "max_turns": 1000}
    function = f"{__name__}:agent_that_scores_at_the_limit"
    (one,) = trajectories(played(sampler(Scripted(lambda text: "a"), function=function, **keys)))
    assert (one.stop, one.reward) == ("seconds", 0.5)


def test_a_step_that_runs_past_the_end_of_the_trajectory_ends_it_as_it_is() -> None:
    class Works(Talks):
        async def step(self, reply: Reply) -> EnvironmentStep:
            await asyncio.sleep(1.2)
            return await super().step(reply)

    keys = {"seconds": 1.0, "step_seconds": LIMIT, "group_size": 1}
    (one,) = trajectories(played(sampler(Scripted(lambda text: "a"), EnvironmentMaker(Works), **keys)))
    assert (one.stop, one.reward, len(one.turns)) == ("seconds", 1.0, 1)


@pytest.mark.parametrize(("turn", "parts"), [(0, [[98]]), (1, [[98]]), (0, [[], [98]])])
async def test_a_turn_that_a_server_samples_ends_with_what_it_has(turn: int, parts: list[list[int]]) -> None:
    """Without a token the first waits for a slot, and gets twice as long."""
    slow = Slow(*parts)

    def answer(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        if path == "/generate" and f"turn {turn}" not in body["id"]:
            return 200, {"label": "7@t", "tokens": [97, EOS]}
        return slow(path, body, number)

    with running(1) as (fake,):
        server = Server(fake.url, token="t", timeout_seconds=LIMIT)
        engine = ServedEngine(Words(), [server], SECTION, max_length=300, vocab_size=259)
        await push(engine, 7)
        fake.answer = answer
        keys = {"seconds": 1.0, "step_seconds": LIMIT, "group_size": 1, "on_error": "drop"}
        async with asyncio.timeout(LIMIT):
            (one,) = trajectories(await sampler(engine, EnvironmentMaker(Talks), **keys).groups(drawn(PROMPTS[:1])))
        await engine.close()
    assert one.stop == "seconds"
    assert [(each.finish_reason, len(each.logprobs)) for each in one.turns] == [("stop", 2)] * turn + [("length", 1)]


class Hanging(Scripted):
    """Never answers the request for a turn."""

    def __init__(self, turn: int) -> None:
        super().__init__(lambda text: "a")
        self.turn = turn

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        if f"turn {self.turn}" in request.id:
            await asyncio.sleep(FOR_EVER)
        return await super().generate(request)


def test_a_later_turn_that_no_engine_ends_is_left_out() -> None:
    keys = {"seconds": 3.0, "step_seconds": 1.0, "group_size": 1}
    (one,) = trajectories(played(sampler(Hanging(1), EnvironmentMaker(Talks), **keys)))
    assert (one.stop, one.reward, len(one.turns)) == ("seconds", 1.0, 1)


async def asks(task: Prompt, model: Model) -> float:
    await model.reply([{"role": "user", "content": task.text}])
    raise AssertionError


def test_an_agent_whose_first_turn_does_not_come_has_not_failed(caplog: pytest.LogCaptureFixture) -> None:
    keys = {"seconds": 3.0, "step_seconds": 1.0, "group_size": 1}
    (one,) = played(sampler(Hanging(0), function=f"{__name__}:asks", **keys))
    assert one.reason == "nothing_sampled"
    said = "prompt '3*4', trajectory 0 of step 1 has no turn: environment.seconds=3 passed before its first"
    assert said in one.problem
    assert said in caplog.text


def test_one_without_a_turn_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class SaysNothing(Scripted):
        async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
            (one,) = await super().generate(request)
            if "trajectory 1," not in request.id:
                return [one]
            return [replace(one, token_ids=np.array([], np.int32), logprobs=np.array([], np.float32))]

    keys = {"on_error": "drop", "max_turns": 1}
    (dropped,) = played(sampler(SaysNothing(lambda text: "a"), EnvironmentMaker(Talks), **keys))
    assert (dropped.group, dropped.reason) == (None, "nothing_sampled")
    assert "trajectory 1 of step 1 has no turn: it ended as length" in caplog.text


@pytest.mark.parametrize(
    ("named", "turns", "stop"), [("seconds", 8, "seconds"), ("tokens", 8, "tokens"), ("tokens", 1, "turns")]
)
def test_an_agent_that_ends_itself_names_its_limit_where_the_run_has_none(named: Any, turns: int, stop: str) -> None:
    async def leads(task: Prompt, model: Model) -> float:
        with contextlib.suppress(LimitReached):
            for _ in range(2):
                await model.reply([{"role": "user", "content": task.text}])
        raise LimitReached(named)

    (one,) = trajectories(played(sampler(Scripted(lambda text: "a"), Agent(leads), group_size=1, max_turns=turns)))
    assert (one.stop, one.reward) == (stop, 0.0)


def test_a_limit_that_there_is_not_is_an_error_of_the_agent() -> None:
    async def leads(task: Prompt, model: Model) -> float:
        raise LimitReached("hours")  # type: ignore[arg-type]

    said = (
        r"raised ValueError: LimitReached\('hours'\): a trajectory ends by one of done, length, turns, tokens, seconds"
    )
    with pytest.raises(EnvironmentFailed, match=said):
        played(sampler(Scripted(lambda text: "a"), Agent(leads), group_size=1))
