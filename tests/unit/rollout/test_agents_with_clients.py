"""Agents that ask the model through the openai client: their trajectories are those of ``model.reply``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import openai
import psutil
import pytest

from rl_megatron.environments.adapters.verifiers import InterpreterFailed, PackageFailed
from rl_megatron.environments.protocol import LimitReached, Model
from rl_megatron.environments.registry import Agent
from rl_megatron.errors import DataError, EngineError, EnvironmentFailed
from rl_megatron.rollout.batch import Answered
from rl_megatron.rollout.environments.figures import environment_row
from rl_megatron.rollout.environments.source import EnvironmentSampler
from rl_megatron.rollout.environments.waves import Waves
from rl_megatron.types import Completion, GenerationRequest, Prompt, Trajectory
from tests.completions import drawn
from tests.scripted_engine import Scripted, sampler, trajectories
from tests.unit.rollout.endpoint.serving import post
from tests.unit.rollout.test_environment_source import PROMPTS, calculates

KEYS = list[tuple[str, str]]()


async def solves(task: Prompt, model: Model) -> float:
    """`test_environment_source.solve`, by the asynchronous client."""
    KEYS.append((model.base_url, model.api_key))
    messages: list[Any] = [{"role": "user", "content": task.text}]
    async with openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        first = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
        messages += [first, {"role": "user", "content": f":{eval(str(first.content)[1:])}"}]
        second = await client.chat.completions.create(model="policy", messages=messages)
    return float(second.choices[0].message.content == f"!{task.answer}")


async def solves_in_a_thread(task: Prompt, model: Model) -> float:
    """The same by the synchronous client, in a thread."""

    def lead() -> float:
        messages: list[Any] = [{"role": "user", "content": task.text}]
        with openai.OpenAI(base_url=model.base_url, api_key=model.api_key) as client:
            first = client.chat.completions.create(model="policy", messages=messages).choices[0].message
            messages += [first, {"role": "user", "content": f":{eval(str(first.content)[1:])}"}]
            second = client.chat.completions.create(model="policy", messages=messages)
        return float(second.choices[0].message.content == f"!{task.answer}")

    return await asyncio.to_thread(lead)


async def asks_on(task: Prompt, model: Model) -> float:
    async with openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        messages: list[Any] = [{"role": "user", "content": task.text}]
        while True:
            said = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
            messages += [said, {"role": "user", "content": "."}]


async def asks_on_directly(task: Prompt, model: Model) -> float:
    messages: list[Any] = [{"role": "user", "content": task.text}]
    while True:
        messages += [(await model.reply(messages)).message, {"role": "user", "content": "."}]


async def goes_on_and_stumbles(task: Prompt, model: Model) -> float:
    async with openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        with contextlib.suppress(openai.InternalServerError):
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": task.text}])
    return await stumbles(task, model)


async def stumbles(task: Prompt, model: Model) -> float:
    async with openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": task.text}])
    raise KeyError("gone")


def answered(ours: EnvironmentSampler) -> list[Answered]:
    return asyncio.run(ours.groups(drawn(PROMPTS, 1)))


def ours(engine: Any, agent: str, **section: Any) -> EnvironmentSampler:
    name = agent if ":" in agent else f"{__name__}:{agent}"
    return sampler(engine, function=name, **section)


def described(one: Trajectory) -> list[Any]:
    """All that is trained on."""
    turns = [(turn.start, turn.logprobs.tolist(), turn.spans, turn.text) for turn in one.turns]
    return [one.reward, one.stop, [row.token_ids.tolist() for row in one.chains], turns]


@pytest.mark.parametrize("agent", ["solves", "solves_in_a_thread"])
def test_clients_turns_are_trained_as_those_of_reply(agent: str) -> None:
    direct, engine = Scripted(calculates), Scripted(calculates)
    expected = trajectories(answered(ours(Waves(direct), "tests.unit.rollout.test_environment_source:solve")))
    found = trajectories(answered(ours(Waves(engine), agent)))
    assert [described(one) for one in found] == [described(one) for one in expected]
    asked = [sorted((replace(one, max_seconds=None) for one in each.asked), key=str) for each in (direct, engine)]
    assert asked[0] == asked[1]
    assert [len(one.overhead_ms) for one in found] == [len(one.turns) for one in found]
    figures = {name: value for name, value in environment_row(found).items() if name.startswith("endpoint/")}
    assert 0 < figures.pop("endpoint/overhead_ms_p50") <= figures.pop("endpoint/overhead_ms_p99")
    assert figures == {"endpoint/answered": 2, "endpoint/retried": 0, "endpoint/refused": 0, "endpoint/overridden": 0}
    assert not any(name.startswith("endpoint/") for name in environment_row(expected))
    for one in found:
        (row,) = one.chains
        sampled = [row.token_ids[turn.start : turn.stop].tolist() for turn in row.turns]
        assert all(ids in engine.sampled.values() for ids in sampled)


async def asks_for_the_url_alone(task: Prompt, model: Model) -> float:
    return float(model.base_url.startswith("http://127.0.0.1:"))


def test_an_agent_whose_time_is_up_gets_the_url() -> None:
    found = trajectories(answered(ours(Scripted(calculates), "asks_for_the_url_alone", seconds=1e-6)))
    assert [one.reward for one in found] == [1.0] * len(found)


def test_each_trajectory_has_a_key_that_ends_with_it_and_the_server_ends_with_the_loop() -> None:
    made, mine = ours(Scripted(calculates), "solves"), psutil.Process()

    def ports() -> set[int]:
        return {one.laddr.port for one in mine.net_connections("tcp") if one.status == psutil.CONN_LISTEN}

    async def played() -> None:
        KEYS.clear()
        await made.groups(drawn(PROMPTS, 1))
        (listening,) = ports() - before
        assert {url for url, _ in KEYS} == {f"http://127.0.0.1:{listening}/v1"}
        assert len({key for _, key in KEYS}) == len(KEYS) == 6
        late = [await asyncio.to_thread(post, served, None, "/v1/models", "GET") for served in KEYS]
        assert {(status, said["error"]["message"]) for status, said in late} == {(410, "this conversation has ended")}

    before = ports()
    for _ in range(2):
        asyncio.run(played())
        assert ports() == before


@pytest.mark.parametrize(
    ("section", "stop", "turns"), [({"max_turns": 2}, "turns", 2), ({"max_turns": 99, "max_tokens": 20}, "tokens", 5)]
)
def test_a_limit_ends_an_agent_whose_client_raises_it(section: dict[str, Any], stop: str, turns: int) -> None:
    one, *_ = trajectories(answered(ours(Scripted(lambda text: "ab"), "asks_on", group_size=1, **section)))
    assert (one.stop, one.reward, len(one.turns)) == (stop, 0.0, turns)


@pytest.mark.parametrize("then", ["returns", "raises in the handler", "raises behind it"])
@pytest.mark.parametrize("client", [True, False])
def test_what_fails_after_a_limit_is_a_fault_as_before_it(client: bool, then: str) -> None:
    async def leads(task: Prompt, model: Model) -> float:
        try:
            await (asks_on(task, model) if client else asks_on_directly(task, model))
        except (openai.APIStatusError, LimitReached):
            if then == "raises in the handler":
                scored()
        return scored() if then == "raises behind it" else 0.5

    def scored() -> float:
        raise OSError("no daemon")

    def played(**section: Any) -> list[Answered]:
        made = Agent(leads)
        return answered(sampler(Scripted(lambda text: "a"), made, group_size=1, max_turns=2, **section))

    if then == "returns":
        assert [(one.stop, one.reward) for one in trajectories(played())] == [("turns", 0.5)] * 2
        return
    said = r"turn 2: the function raised OSError: no daemon; it had been refused a turn \(turns\); fix it"
    with pytest.raises(EnvironmentFailed, match=said):
        played()
    assert [one.reason for one in played(on_error="drop")] == ["environment_error"] * 2


class Wrapped(Exception):
    """A client's own error."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.response = SimpleNamespace(status_code=status)


def chained(error: Exception) -> Exception:
    made = RuntimeError("the model failed")
    made.__cause__ = error
    return made


def endless() -> Exception:
    made = RuntimeError("of itself")
    made.__cause__ = made
    return made


@pytest.mark.parametrize(
    ("raised", "ends"),
    [
        (Wrapped(410), True),
        (chained(chained(Wrapped(410))), True),
        (ExceptionGroup("both", [Wrapped(410), chained(Wrapped(410))]), True),
        (chained(LimitReached("turns")), True),
        (PackageFailed("verifiers: no turn"), True),
        (InterpreterFailed("it ended with status 3"), False),
        (Wrapped(400), False),
        (ExceptionGroup("both", [Wrapped(410), OSError("no daemon")]), False),
        (endless(), False),
    ],
)
def test_a_limit_ends_an_agent_that_raises_its_clients_refusal_in_whatever_way(raised: Exception, ends: bool) -> None:
    async def leads(task: Prompt, model: Model) -> float:
        with contextlib.suppress(openai.APIStatusError):
            await asks_on(task, model)
        raise raised

    made = sampler(Scripted(lambda text: "a"), Agent(leads), group_size=1, max_turns=1, on_error=-1.0)
    one, *_ = trajectories(answered(made))
    assert (one.stop, one.reward) == (("turns", 0.0) if ends else ("environment_error", -1.0))


def test_what_the_agent_itself_raises_is_its_fault() -> None:
    with pytest.raises(EnvironmentFailed, match="turn 1: the function raised KeyError: 'gone'"):
        answered(ours(Scripted(lambda text: "ab"), "stumbles", group_size=1))


def test_a_failure_that_the_agent_went_on_after_is_not_what_it_ends_with() -> None:
    class FailsOnce(Scripted):
        async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
            if not self.asked:
                self.asked.append(request)
                raise EngineError("no server is left")
            return await super().generate(request)

    engine = FailsOnce(lambda text: "ab")
    with pytest.raises(EnvironmentFailed, match="turn 1: the function raised KeyError: 'gone'"):
        asyncio.run(ours(engine, "goes_on_and_stumbles", group_size=1).groups(drawn(PROMPTS[:1], 1)))


@pytest.mark.parametrize("given", [0.0, None])
@pytest.mark.parametrize("asks", [asks_on, asks_on_directly])
def test_an_agent_that_hides_the_engines_failure_is_not_trained_on(asks: Any, given: float | None) -> None:
    class FailsThen(Scripted):
        async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
            if request.id.endswith("turn 1"):
                raise EngineError("no server is left")
            return await super().generate(request)

    async def leads(task: Prompt, model: Model) -> float | None:
        with contextlib.suppress(Exception):
            await asks(task, model)
        return given

    made: Any = Agent(leads)  # type: ignore[arg-type]
    for on_error in ("fail", 0.0):
        with pytest.raises(EngineError, match="no server is left"):
            answered(sampler(FailsThen(lambda text: "a"), made, group_size=1, on_error=on_error))


def test_an_engine_that_fails_and_a_long_prompt_are_named_through_the_client() -> None:
    class Fails(Scripted):
        async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
            raise EngineError("no server is left")

    with pytest.raises(EngineError, match="no server is left"):
        answered(ours(Fails(lambda text: "a"), "solves", group_size=1))
    long = [Prompt(id="long", text="1" * 41, token_ids=(1,), answer="")]
    with pytest.raises(DataError, match="the first prompt has 41 tokens"):
        asyncio.run(ours(Scripted(calculates), "solves", group_size=1).groups(drawn(long, 1)))
