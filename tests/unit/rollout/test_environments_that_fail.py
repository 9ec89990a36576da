"""Environments that hang, block, exit or leave processes; trajectories over their time; what is then left out."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from rl_megatron.agents import playing as playing_module
from rl_megatron.engines.engine import ServerEngine
from rl_megatron.engines.http import Server
from rl_megatron.environments.protocol import AgentModelClient, EnvironmentStep, LimitReached, Observation, Reply
from rl_megatron.environments.registry import Agent, EnvironmentFactory
from rl_megatron.errors import EnvironmentFailure, PoisonPrompt
from rl_megatron.rollout.stream import GroupResult, RolloutBatch
from rl_megatron.types import Completion, GenerationRequest, Prompt
from tests.completions import drawn
from tests.scripted_engine import EOS, Scripted, sampler, trajectories
from tests.streams import Source, stream_over
from tests.unit.rollout.test_engine_servers import SECTION, Words, push, running
from tests.unit.rollout.test_environment_source import PROMPTS, Talks
from tests.unit.rollout.test_requests import Slow
from tests.virtual_time import run_at_once

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
        return EnvironmentStep(observation=Observation(content=self.said))


class SaysManyOfThem(SaysHalfACharacter):
    said = "\ud83d" * 2000  # which environment.max_observation_tokens would cut


class SaysANumber(Talks):
    async def step(self, reply: Reply) -> EnvironmentStep:
        return EnvironmentStep(observation=Observation(content=12))  # type: ignore[arg-type]


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


def played(ours: Any) -> list[GroupResult]:
    async def groups() -> list[GroupResult]:
        found: list[GroupResult] = await ours.groups(drawn(PROMPTS[:1], 1))
        await ours.wait_closed()
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
        (SaysANumber, r"step returned an Observation of 12, which is not text"),
        (HasNoMetrics, r"step returned the metrics None, which are no mapping"),
        (IsNoNumber, r"step returned nan, which is no finite number"),
        (IsAText, r"step returned '1', which is no finite number"),
        (IsTooLarge, r"step returned -1e\+39, which is no finite number of at most 1e\+30"),
    ],
)
def test_each_is_given_up_and_named(made: type[Talks], said: str) -> None:
    late = made in (Hangs, Blocks, Refuses)
    keys = {"step_seconds": 1.0 if late else LIMIT}
    scored = played(sampler(Scripted(lambda text: "a"), EnvironmentFactory(made), on_error=-1.0, **keys))
    assert {(one.stop, one.reward, len(one.turns)) for one in trajectories(scored)} == {("environment_error", -1.0, 1)}
    counted = RolloutBatch.from_results(scored)
    assert (counted.reward_errors, counted.timed_out_rewards) == (3, 3 if late else 0)
    with pytest.raises(EnvironmentFailure, match=rf"prompt '3\*4', trajectory . of step 1, turn 1: {said}.*on_error"):
        played(sampler(Scripted(lambda text: "a"), EnvironmentFactory(made), **keys))


@pytest.mark.parametrize("given", [np.float32(0.5), torch.tensor(0.5), Fraction(1, 2)])
def test_a_number_of_any_kind_is_a_reward(given: Any) -> None:
    class Gives(Talks):
        async def step(self, reply: Reply) -> EnvironmentStep:
            return EnvironmentStep(reward=given, metrics={"half": given})

    one, *_ = trajectories(played(sampler(Scripted(lambda text: "a"), EnvironmentFactory(Gives))))
    assert (one.reward, one.metrics["own/half"]) == (0.5, 0.5)


def test_others_of_the_group_are_not_held_up() -> None:
    class Sometimes(Talks):
        async def start(self, task: Prompt, seed: int) -> Any:
            if seed == first:
                await asyncio.sleep(FOR_EVER)
            return await super().start(task, seed)

    engine = Scripted(lambda text: "a")
    ours = sampler(engine, EnvironmentFactory(Sometimes), on_error=0.0, step_seconds=1.0, max_turns=2)
    first = ours._place(PROMPTS[0], "step 1", 0).seed
    (one,) = played(ours)
    assert one.reason == "environment_error"  # of the first, so of the group: it has no turn to train on
    assert "start did not end within environment.step_seconds=1" in one.problem
    assert len(engine.asked) == 2 * 2


def test_one_that_hangs_in_close_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Stays(Talks):
        async def close(self) -> None:
            await asyncio.sleep(FOR_EVER)

    found = trajectories(played(sampler(Scripted(lambda text: "a"), EnvironmentFactory(Stays))))
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
            sampler(Scripted(lambda text: "a"), EnvironmentFactory(Cleans)).groups(drawn(PROMPTS[:1], 1))
        )
        if how != "fails":
            while len(begun) < (3 if how == "cancelled" else 6):
                await asyncio.sleep(0)
            playing.cancel()
        with pytest.raises((asyncio.CancelledError, EnvironmentFailure)):
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
    (one,) = played(replace(ours, factory=EnvironmentFactory(numbered(ours, fail))))
    assert (one.reason, one.problem) == ("poison", "servers ended under it")


def test_one_that_a_limit_ends_is_trained_on() -> None:
    engine = Scripted(lambda text: "a")
    (one,) = played(sampler(engine, EnvironmentFactory(Talks), on_error="drop", max_turns=1))
    assert [trajectory.stop for trajectory in trajectories([one])] == ["turns"] * 3
    assert len(engine.asked) == 3


# What is under way when ``environment.seconds`` run out: a turn, a step, an agent's tool, an agent's reward.
async def agent_that_hangs(task: Prompt, model: AgentModelClient, turns: int = 0) -> float:
    for _ in range(turns):
        await model.reply([{"role": "user", "content": task.text}])
    await asyncio.sleep(FOR_EVER)
    raise AssertionError


async def agent_that_scores_at_the_limit(task: Prompt, model: AgentModelClient) -> float:
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
    (one,) = trajectories(played(sampler(Scripted(lambda text: "a"), EnvironmentFactory(Works), **keys)))
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
        engine = ServerEngine(Words(), [server], SECTION, max_length=300, vocab_size=259)
        await push(engine, 7)
        fake.answer = answer
        keys = {"seconds": 1.0, "step_seconds": LIMIT, "group_size": 1, "on_error": "drop"}
        async with asyncio.timeout(LIMIT):
            (one,) = trajectories(await sampler(engine, EnvironmentFactory(Talks), **keys).groups(drawn(PROMPTS[:1])))
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
    (one,) = trajectories(played(sampler(Hanging(1), EnvironmentFactory(Talks), **keys)))
    assert (one.stop, one.reward, len(one.turns)) == ("seconds", 1.0, 1)


async def asks(task: Prompt, model: AgentModelClient) -> float:
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
    (dropped,) = played(sampler(SaysNothing(lambda text: "a"), EnvironmentFactory(Talks), **keys))
    assert (dropped.group, dropped.reason) == (None, "nothing_sampled")
    assert "trajectory 1 of step 1 has no turn: it ended as length" in caplog.text


@pytest.mark.parametrize(
    ("named", "turns", "stop"), [("seconds", 8, "seconds"), ("tokens", 8, "tokens"), ("tokens", 1, "turns")]
)
def test_an_agent_that_ends_itself_names_its_limit_where_the_run_has_none(named: Any, turns: int, stop: str) -> None:
    async def leads(task: Prompt, model: AgentModelClient) -> float:
        with contextlib.suppress(LimitReached):
            for _ in range(2):
                await model.reply([{"role": "user", "content": task.text}])
        raise LimitReached(named)

    (one,) = trajectories(played(sampler(Scripted(lambda text: "a"), Agent(leads), group_size=1, max_turns=turns)))
    assert (one.stop, one.reward) == (stop, 0.0)


def test_a_limit_that_there_is_not_is_an_error_of_the_agent() -> None:
    async def leads(task: Prompt, model: AgentModelClient) -> float:
        raise LimitReached("hours")  # type: ignore[arg-type]

    said = r"raised ValueError: LimitReached\('hours'\): a trajectory ends by one of done, length, turns, tokens"
    with pytest.raises(EnvironmentFailure, match=said):
        played(sampler(Scripted(lambda text: "a"), Agent(leads), group_size=1))


# What is not trained on is counted: tokens of what failed and of groups whose rewards are equal, and failures.
@pytest.mark.parametrize("fail", [set[int](), {1}, {0, 1, 2}])
def test_what_those_that_fail_or_are_poison_sampled_is_counted(fail: set[int]) -> None:
    class TwoTurns(Talks):
        async def start(self, task: Prompt, seed: int) -> Any:
            self.number, self.turns = numbers[seed], 0
            return await super().start(task, seed)

        async def step(self, reply: Reply) -> EnvironmentStep:
            self.turns += 1
            if self.turns == 2 and self.number in fail:
                raise KeyError(self.number)
            return EnvironmentStep(reward=1.0, observation=None if self.turns == 2 else Observation(content="."))

    class PoisonBehind(Scripted):
        async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
            if "trajectory 2, turn 1" in request.id and not fail:
                raise PoisonPrompt("servers ended under it")
            return await super().generate(request)

    engine = PoisonBehind(lambda text: "ab")
    ours = sampler(engine, on_error="drop")
    numbers = {ours._place(PROMPTS[0], "step 1", number).seed: number for number in range(12)}
    (one,) = played(replace(ours, factory=EnvironmentFactory(TwoTurns)))
    assert one.group is None
    assert RolloutBatch.from_results([one]).num_tokens == sum(map(len, engine.sampled.values()))


@pytest.mark.parametrize("equal", [False, True])
def test_those_of_a_kept_group_stay_counted_where_its_rewards_are_equal(equal: bool) -> None:
    class Spared(Source):
        def _answer(self, prompt: Prompt) -> GroupResult:
            return replace(super()._answer(prompt), left_out_tokens=5)

    async def taken() -> RolloutBatch:
        source = Spared(lambda _: 1.0, dropped=lambda _: equal)
        stream = stream_over(source, size=4, staleness=0, dynamic_sampling="drop")
        stream.restart()
        try:
            return await stream.take(1)
        finally:
            await stream.close()

    batch = run_at_once(taken())
    assert (len(batch.groups), batch.filtered_groups > 0) == (0 if equal else 4, equal)
    assert batch.num_tokens == 5 * (len(batch.groups) + batch.filtered_groups)


class SaysMuch(Talks):
    async def start(self, task: Prompt, seed: int) -> Observation:
        return Observation(content=task.text * 40)


class Poisonous(Scripted):
    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        raise PoisonPrompt("servers ended under it")


@pytest.mark.parametrize(
    ("made", "engine", "seconds", "reason"),
    [
        (SaysMuch, Scripted, LIMIT, "long_prompt"),
        (Talks, Poisonous, LIMIT, "poison"),
        (Talks, Scripted, 1e-6, "nothing_sampled"),
    ],
)
def test_other_failures_are_no_errors(made: type[Talks], engine: type[Scripted], seconds: float, reason: str) -> None:
    ours = sampler(engine(lambda text: "a"), EnvironmentFactory(made), on_error="drop", seconds=seconds)
    ours = replace(ours, rollout=ours.rollout.model_copy(update={"on_long_prompt": "drop"}))
    (one,) = played(ours)
    batch = RolloutBatch.from_results([one])
    assert (one.reason, batch.dropped_groups, batch.reward_errors) == (reason, 1, 0)
