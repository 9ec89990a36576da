"""Groups that environments and agents lead, over an engine that says what a script has it say."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import openai
import psutil
import pytest

from rl_megatron.agents.source import EnvironmentSampler, RequestBatcher, environment_row
from rl_megatron.agents.threads import EpisodeThreads
from rl_megatron.data.samples import to_samples, tokens_after_prompt
from rl_megatron.environments.protocol import (
    AgentFailed,
    AgentModelClient,
    EnvironmentStep,
    LimitReached,
    Observation,
    Reply,
    Transcript,
)
from rl_megatron.environments.registry import Agent, EnvironmentFactory
from rl_megatron.environments.shipped import Calculator
from rl_megatron.errors import DataError, EngineError, EnvironmentFailure, PoisonPrompt
from rl_megatron.rollout.policy_sampler import EvalRequest
from rl_megatron.rollout.stream import GroupResult, RolloutBatch
from rl_megatron.types import Completion, GenerationRequest, Prompt, Span, TokenSequence, Trajectory, Turn
from tests.completions import drawn
from tests.scripted_engine import EOS, Scripted, sampler, trajectories
from tests.unit.rollout.endpoint.test_endpoint import post

PROMPTS = [Prompt(id=f"{a}*{b}", text=f"{a}*{b}=", token_ids=(1,), answer=str(a * b)) for a, b in ((3, 4), (12, 11))]


def calculates(text: str) -> str:
    return f"!{text.split(':')[1]}" if ":" in text else f"?{text.rstrip('=')}"


def answered(ours: EnvironmentSampler, prompts: Sequence[Prompt] = PROMPTS, batch: int = 1) -> list[GroupResult]:
    return asyncio.run(ours.groups(drawn(prompts, batch)))


def test_a_group_of_calculations() -> None:
    found = answered(sampler(RequestBatcher(Scripted(calculates))))
    assert [one.rewards for one in found] == [(1.0,) * 3] * 2
    for trajectory in trajectories(found):
        (row,) = trajectory.chains
        product = {b"3*4=": (b"?3*4", b":12", b"!12"), b"12*11=": (b"?12*11", b":132", b"!132")}
        prompt = bytes(row.token_ids[: row.turns[0].start].tolist())
        first, seen, last = product[prompt]
        assert row.token_ids.tolist() == [*prompt, *first, EOS, *seen, *last, EOS]
        assert [(turn.start, turn.stop) for turn in row.turns] == [
            (len(prompt), len(prompt) + len(first) + 1),
            (len(row.token_ids) - len(last) - 1, len(row.token_ids)),
        ]
        assert (trajectory.stop, trajectory.metrics["own/calculations"]) == ("done", 1)


async def test_no_more_trajectories_than_allowed_are_under_way_and_cancelled_ones_leave_their_room() -> None:
    class Counting(Calculator):
        under_way, most = 0, 0

        async def start(self, task: Prompt, seed: int) -> Observation:
            Counting.under_way += 1
            Counting.most = max(Counting.most, Counting.under_way)
            return await super().start(task, seed)

        async def close(self) -> None:
            Counting.under_way -= 1

    class Waiting(Scripted):
        async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
            if request.prefix_group.startswith("step 1"):
                await asyncio.Event().wait()
            return await super().generate(request)

    async with asyncio.timeout(60):
        ours = sampler(Waiting(calculates), EnvironmentFactory(Counting), concurrency=2, group_size=20)
        first = asyncio.ensure_future(ours.groups(drawn(PROMPTS, 1)))
        while not Counting.under_way:
            await asyncio.sleep(0)
        first.cancel()  # with two under way, and 38 that wait
        await asyncio.wait({first})
        found = await ours.groups(drawn(PROMPTS, 2))
    assert [one.rewards for one in found] == [(1.0,) * 20] * 2
    assert (Counting.most, Counting.under_way) == (2, 0)


async def test_a_thread_that_was_given_up_before_it_began_leaves_its_room() -> None:
    threads = EpisodeThreads(40)
    takes = [asyncio.ensure_future(threads.take(lambda: None)) for _ in range(40)]
    await asyncio.sleep(0)
    for take in takes:
        take.cancel()
    await asyncio.wait(takes)
    again = await asyncio.wait_for(asyncio.gather(*(threads.take(lambda: None) for _ in takes)), 20)
    for one in again:
        one.end()
    assert (sum(take.cancelled() for take in takes), len(again)) == (40, 40)


def test_only_what_was_sampled_is_trained_on() -> None:
    engine = Scripted(calculates)
    found = answered(sampler(engine))
    samples = to_samples([one.group for one in found if one.group is not None])
    trained = samples.targets[samples.mask].tolist()
    assert sorted(trained) == sorted(token for ids in engine.sampled.values() for token in ids)
    logprobs = [np.linspace(-0.5, -0.1, len(ids), dtype=np.float32) for ids in engine.sampled.values()]
    assert samples.rollout_logprobs[samples.mask].sum() == pytest.approx(sum(float(one.sum()) for one in logprobs))
    assert not samples.rollout_logprobs[~samples.mask].any()


def test_turn_k_of_all_trajectories_is_one_wave() -> None:
    class Engine(Scripted):
        async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
            if not self.together:
                self.waves.append([])
                asyncio.get_running_loop().call_soon(self.next)
            self.together = True
            self.waves[-1].append(request.id)
            await asyncio.sleep(0)
            return await super().generate(request)

        def next(self) -> None:
            self.together = False

        together = False
        waves: ClassVar[list[list[str]]] = []

    answered(sampler(RequestBatcher(Engine(calculates))))
    assert [len(wave) for wave in Engine.waves] == [6, 6]
    assert all(wave == sorted(wave) for wave in Engine.waves)
    assert [{name.rpartition(" ")[2] for name in wave} for wave in Engine.waves] == [{"0"}, {"1"}]


def test_seeds_name_run_batch_task_member_and_turn() -> None:
    def seeds(ours: EnvironmentSampler, batch: int) -> list[int]:
        answered(ours, batch=batch)
        return [one.params.seed for one in sorted(ours.engine.asked, key=lambda one: one.id)]  # type: ignore[attr-defined]

    first = seeds(sampler(Scripted(calculates)), 1)
    assert len(set(first)) == 2 * 3 * 2
    assert seeds(sampler(Scripted(calculates)), 1) == first
    assert not set(seeds(sampler(Scripted(calculates)), 2)) & set(first)
    assert not set(seeds(replace(sampler(Scripted(calculates)), seed=1), 1)) & set(first)


def test_evaluation_counts_right_trajectories() -> None:
    halves = Scripted(lambda text: calculates(text) if text.startswith("3") else "!1")
    ours = sampler(RequestBatcher(halves))
    found = asyncio.run(ours.sample_eval(EvalRequest(prompts=PROMPTS, params=ours.params(temperature=0.0), samples=2)))
    assert [one.rewards for one in found] == [(1.0, 1.0), (0.0, 0.0)]
    assert {one.params.temperature for one in halves.asked} == {0.0}


class Talks:
    """Answers every turn with ``said``."""

    said = "."

    async def start(self, task: Prompt, seed: int) -> Observation:
        return Observation(content=task.text)

    async def step(self, reply: Reply) -> EnvironmentStep:
        return EnvironmentStep(observation=Observation(content=self.said))

    async def score(self, transcript: Transcript) -> float:
        return float(len(transcript.replies))

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("section", "script", "stop", "turns"),
    [
        ({"max_turns": 3}, "ab", "turns", 3),
        ({"max_turns": 99, "max_tokens": 20}, "ab", "tokens", 5),  # 4 tokens a turn and its observation: 20 - 5 * 4 < 4
        ({"max_turns": 99, "max_tokens": 21, "min_turn_tokens": 1}, "ab", "length", 6),  # the last has room for one
        ({}, "abcdefghijkl", "length", 1),
    ],
)
def test_a_limit_ends_a_trajectory_which_is_scored(section: dict[str, Any], script: str, stop: str, turns: int) -> None:
    engine = Scripted(lambda text: script)
    (one,) = trajectories(answered(sampler(engine, EnvironmentFactory(Talks), group_size=1, **section), PROMPTS[:1]))
    assert (one.stop, len(one.turns), one.reward) == (stop, turns, turns)
    assert len(one.chains[0].token_ids) - len("3*4=") <= section.get("max_tokens", 4096)
    assert one.chains[0].token_ids[-1] == (EOS if stop != "length" else engine.sampled[engine.asked[-1].id][-1])


@pytest.mark.parametrize("parts", [False, True])
def test_a_long_observation_is_cut_in_its_middle(parts: bool) -> None:
    class Long(Talks):
        async def step(self, reply: Reply) -> EnvironmentStep:
            texts = [{"type": "text", "text": letter * 500} for letter in "xy"]
            content = texts if parts else "x" * 500 + "y" * 500
            return EnvironmentStep(observation=Observation(content=[{"role": "user", "content": content}]))

    engine = Scripted(lambda text: "a")
    made = sampler(engine, EnvironmentFactory(Long), group_size=1, max_turns=2, max_observation_tokens=20)
    (one,) = trajectories(answered(made, PROMPTS[:1]))
    read = bytes(one.chains[0].token_ids[one.turns[0].stop : one.turns[1].start].tolist()).decode()
    assert read == f"{'x' * 10}\n[980 tokens cut]\n{'y' * 10}"


async def solve(task: Prompt, model: AgentModelClient, extra: str = "") -> float:
    messages: list[Any] = [{"role": "user", "content": task.text}]
    first = await model.reply(messages)
    messages += [first.message, {"role": "user", "content": f":{eval(first.text[1:])}{extra}"}]
    return float((await model.reply(messages)).text == f"!{task.answer}")


def test_a_function_that_is_given_a_model_leads_a_trajectory() -> None:
    (one, *_) = found = trajectories(
        answered(sampler(RequestBatcher(Scripted(calculates)), function=f"{__name__}:solve"))
    )
    assert [each.reward for each in found] == [1.0] * 6
    assert bytes(t for t in one.chains[0].token_ids.tolist() if t != EOS) == b"3*4=?3*4:12!12"
    wrong = sampler(Scripted(calculates), function=f"{__name__}:solve", options={"extra": "0"})
    assert {each.reward for each in trajectories(answered(wrong))} == {0.0}


async def goes_on(task: Prompt, model: AgentModelClient) -> float:
    messages: list[Any] = [{"role": "user", "content": task.text}]
    try:
        while True:
            messages += [(await model.reply(messages)).message, {"role": "user", "content": "."}]
    except LimitReached as limit:
        return 7.0 if limit.stop == "turns" else 0.0


def test_a_function_may_answer_a_limit() -> None:
    ours = sampler(Scripted(lambda text: "a"), function=f"{__name__}:goes_on", max_turns=2)
    (one, *_) = trajectories(answered(ours))
    assert (one.reward, one.stop, len(one.turns)) == (7.0, "turns", 2)


def test_what_fails_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Talks):
        async def step(self, reply: Reply) -> EnvironmentStep:
            raise KeyError("gone")

    batch = RolloutBatch.from_results(
        answered(sampler(Scripted(lambda text: "a"), EnvironmentFactory(Fails), on_error="drop"))
    )
    assert (batch.dropped_groups, batch.reward_errors, batch.groups) == (2, 6, ())
    assert "prompt '3*4', trajectory 0 of step 1, turn 1: step raised KeyError: 'gone'" in caplog.text
    scored = answered(sampler(Scripted(lambda text: "a"), EnvironmentFactory(Fails), on_error=-1.0))
    assert {(one.stop, one.reward, len(one.turns)) for one in trajectories(scored)} == {("environment_error", -1.0, 1)}


def test_each_trajectory_of_a_held_out_problem_is_told() -> None:
    told, ours = list[int](), sampler(Scripted(calculates))
    found = asyncio.run(
        ours.sample_eval(
            EvalRequest(prompts=PROMPTS, params=ours.params(temperature=0.0), samples=2, on_progress=told.append)
        )
    )
    assert [len(one.rewards) for one in found] == [2, 2]
    assert told == [1] * 4


def test_a_held_out_prompt_that_is_poison_is_asked_once_and_more_than_one_in_a_hundred_are_no_accuracy() -> None:
    class Poisoned(Scripted):
        bad: tuple[str, ...] = ("3*4=",)

        async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
            found = await super().generate(request)
            if bytes(request.token_ids).decode().startswith(self.bad):
                raise PoisonPrompt(f"{request.id} ended servers")
            return found

    engine = Poisoned(lambda text: "!132")
    ours = sampler(engine)
    for _ in range(3):
        bad, good = asyncio.run(
            ours.sample_eval(EvalRequest(prompts=PROMPTS, params=ours.params(temperature=0.0), samples=2))
        )
        assert (bad.group, bad.reason, good.rewards) == (None, "poison", (1.0, 1.0))
    assert sum("3*4" in request.id for request in engine.asked) == 2
    assert len({request.params.seed for request in engine.asked}) == 4
    engine.bad = ("3*4=", "12*11=")
    with pytest.raises(EngineError, match="2 of 2 held-out prompts ended servers or were refused"):
        asyncio.run(ours.sample_eval(EvalRequest(prompts=PROMPTS, params=ours.params(temperature=0.0))))


async def edits(task: Prompt, model: AgentModelClient) -> float:
    asked = [{"role": "user", "content": task.text}]
    for messages in (asked, asked, [*asked, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]):
        await model.reply(messages)
    return 1.0


def test_why_rows_begin_is_measured() -> None:
    """Rows are ``3*4=ab.``, the same again, and ``3*4=xyab.``."""
    ours = sampler(Scripted(lambda text: "ab"), function=f"{__name__}:edits", group_size=1)
    found = trajectories(asyncio.run(ours.groups(drawn(PROMPTS[:1]))))
    row = environment_row(found)
    expected = {"environment/branches/again": 1.0, "environment/branches/edited": 1.0}
    assert {name: row[name] for name in row if "branch" in name} == expected
    (one,) = found
    assert tokens_after_prompt(one) - one.num_sampled == len("xy")  # the same prompt again is not read again


def test_what_a_later_row_reads_is_behind_its_longest_common_beginning_with_an_earlier_one() -> None:
    rng = np.random.default_rng(0)

    def turn(start: int, tokens: int) -> Turn:
        logprobs = np.zeros(tokens, np.float32)
        return Turn(start=start, logprobs=logprobs, finish_reason="stop", spans=(Span(0, 0),), text="")

    for _ in range(50):
        rows = [rng.integers(0, 2, rng.integers(8, 16)).astype(np.int32) for _ in range(rng.integers(1, 6))]
        starts = [int(rng.integers(1, 6)) for _ in rows]
        read = len(rows[0]) - starts[0] - 2
        for i, row in enumerate(rows[1:], 1):
            ends = range(len(row) + 1)
            common = max(n for before in rows[:i] for n in ends if row[:n].tolist() == before[:n].tolist())
            read += len(row) - min(common, starts[i]) - 2
        chains = tuple(TokenSequence(token_ids=row, turns=(turn(at, 2),)) for row, at in zip(rows, starts, strict=True))
        assert tokens_after_prompt(Trajectory(chains=chains, reward=0.0)) == read + 2 * len(rows)


def test_counting_what_rows_read_copies_none_of_them() -> None:
    turns = (Turn(start=1, logprobs=np.zeros(2, np.float32), finish_reason="stop", spans=(Span(0, 0),), text=""),)
    rows = [np.arange(50_000, dtype=np.int32) * (1 + (np.arange(50_000) > 100 * i)).astype(np.int32) for i in range(40)]
    one = Trajectory(chains=tuple(TokenSequence(token_ids=row, turns=turns) for row in rows), reward=0.0)
    tokens_after_prompt(one)
    tracemalloc.start()
    tokens_after_prompt(one)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2 * rows[0].nbytes


async def goes_on_edits_and_splits(task: Prompt, model: AgentModelClient) -> float:
    """Five turns: the second and two after it go on, of which the last two from the same turn; the third edits."""
    asked: list[Any] = [{"role": "user", "content": task.text}]
    first = (await model.reply(asked)).message
    second = (await model.reply([*asked, first, {"role": "user", "content": "x"}])).message
    await model.reply([*asked, {**first, "content": "other"}, {"role": "user", "content": "x"}])
    for said in "yz":
        await model.reply([*asked, first, {"role": "user", "content": "x"}, second, {"role": "user", "content": said}])
    return 1.0


def test_turns_that_go_on_are_those_whose_prompts_begin_with_an_earlier_row() -> None:
    engine = Scripted(lambda text: "ab")
    ours = sampler(engine, function=f"{__name__}:goes_on_edits_and_splits", group_size=1)
    row = environment_row(found := trajectories(asyncio.run(ours.groups(drawn(PROMPTS[:1])))))
    rows = [(*one.token_ids, *engine.sampled[one.id]) for one in engine.asked]
    began = [any(one.token_ids[: len(row)] == row for row in rows[:i]) for i, one in enumerate(engine.asked)]
    assert began == [False, True, False, True, True]
    (one,) = found
    assert len(one.chains) == 3  # what goes on twice from one turn has two rows
    assert [name for name in row if "branches" in name] == ["environment/branches/edited"]


async def branches_and_goes_on(task: Prompt, model: AgentModelClient) -> float:
    asked: list[Any] = [{"role": "user", "content": task.text}]
    with contextlib.suppress(LimitReached):
        while True:
            first = (await model.reply(asked)).message
            await model.reply([*asked, first, {"role": "user", "content": "xyz"}])
            await model.reply([*asked, {**first, "content": "x"}, {"role": "user", "content": "yz"}])
    return 1.0


@pytest.mark.parametrize("most", range(8, 60, 6))
def test_the_tokens_of_a_trajectory_are_bounded_in_all_its_rows(most: int) -> None:
    keys = {"function": f"{__name__}:branches_and_goes_on", "max_tokens": most, "max_turns": 1000, "group_size": 1}
    engine = Scripted(lambda text: "ab")
    (one,) = trajectories(asyncio.run(sampler(engine, **keys).groups(drawn(PROMPTS[:1]))))
    first, counted = engine.asked[0].token_ids, 0
    begun = {first[:length] for length in range(1, len(first) + 1)}
    for asked in engine.asked:
        prompt, sampled = asked.token_ids, engine.sampled[asked.id]
        counted += sum(prompt[:length] not in begun for length in range(1, len(prompt) + 1)) + len(sampled)
        row = (*prompt, *sampled)
        begun |= {row[:length] for length in range(1, len(row) + 1)}
    assert one.stop == "tokens"
    assert most - 3 - 4 < counted <= most  # an observation of three tokens, and min_turn_tokens=4
    assert max(map(len, begun)) <= len(first) + most


async def once(task: Prompt, model: AgentModelClient) -> float:
    await model.reply([{"role": "user", "content": task.text}])
    return 1.0


# Agents that ask the model through the openai client: their trajectories are those of ``model.reply``.
KEYS = list[tuple[str, str]]()


async def solves(task: Prompt, model: AgentModelClient) -> float:
    """`test_environment_source.solve`, by the asynchronous client."""
    KEYS.append((model.base_url, model.api_key))
    messages: list[Any] = [{"role": "user", "content": task.text}]
    async with openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        first = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
        messages += [first, {"role": "user", "content": f":{eval(str(first.content)[1:])}"}]
        second = await client.chat.completions.create(model="policy", messages=messages)
    return float(second.choices[0].message.content == f"!{task.answer}")


async def solves_in_a_thread(task: Prompt, model: AgentModelClient) -> float:
    """The same by the synchronous client, in a thread."""

    def lead() -> float:
        messages: list[Any] = [{"role": "user", "content": task.text}]
        with openai.OpenAI(base_url=model.base_url, api_key=model.api_key) as client:
            first = client.chat.completions.create(model="policy", messages=messages).choices[0].message
            messages += [first, {"role": "user", "content": f":{eval(str(first.content)[1:])}"}]
            second = client.chat.completions.create(model="policy", messages=messages)
        return float(second.choices[0].message.content == f"!{task.answer}")

    return await asyncio.to_thread(lead)


async def asks_on(task: Prompt, model: AgentModelClient) -> float:
    async with openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        messages: list[Any] = [{"role": "user", "content": task.text}]
        while True:
            said = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
            messages += [said, {"role": "user", "content": "."}]


async def asks_on_directly(task: Prompt, model: AgentModelClient) -> float:
    messages: list[Any] = [{"role": "user", "content": task.text}]
    while True:
        messages += [(await model.reply(messages)).message, {"role": "user", "content": "."}]


async def goes_on_and_stumbles(task: Prompt, model: AgentModelClient) -> float:
    async with openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        with contextlib.suppress(openai.InternalServerError):
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": task.text}])
    return await stumbles(task, model)


async def stumbles(task: Prompt, model: AgentModelClient) -> float:
    async with openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": task.text}])
    raise KeyError("gone")


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
    expected = trajectories(answered(ours(RequestBatcher(direct), "tests.unit.rollout.test_environment_source:solve")))
    found = trajectories(answered(ours(RequestBatcher(engine), agent)))
    assert [described(one) for one in found] == [described(one) for one in expected]
    asked = [sorted((replace(one, max_seconds=None) for one in each.asked), key=str) for each in (direct, engine)]
    assert asked[0] == asked[1]
    figures = {name: value for name, value in environment_row(found).items() if name.startswith("endpoint/")}
    assert figures == {"endpoint/answered": 2, "endpoint/refused": 0}
    assert not any(name.startswith("endpoint/") for name in environment_row(expected))
    for one in found:
        (row,) = one.chains
        sampled = [row.token_ids[turn.start : turn.stop].tolist() for turn in row.turns]
        assert all(ids in engine.sampled.values() for ids in sampled)


async def asks_for_the_url_alone(task: Prompt, model: AgentModelClient) -> float:
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
    async def leads(task: Prompt, model: AgentModelClient) -> float:
        try:
            await (asks_on(task, model) if client else asks_on_directly(task, model))
        except (openai.APIStatusError, LimitReached):
            if then == "raises in the handler":
                scored()
        return scored() if then == "raises behind it" else 0.5

    def scored() -> float:
        raise OSError("no daemon")

    def played(**section: Any) -> list[GroupResult]:
        made = Agent(leads)
        return answered(sampler(Scripted(lambda text: "a"), made, group_size=1, max_turns=2, **section))

    if then == "returns":
        assert [(one.stop, one.reward) for one in trajectories(played())] == [("turns", 0.5)] * 2
        return
    said = r"turn 2: the function raised OSError: no daemon; it had been refused a turn \(turns\); fix it"
    with pytest.raises(EnvironmentFailure, match=said):
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
        (AgentFailed("verifiers: no turn"), True),
        (RuntimeError("it ended with status 3"), False),
        (Wrapped(400), False),
        (ExceptionGroup("both", [Wrapped(410), OSError("no daemon")]), False),
        (endless(), False),
    ],
)
def test_a_limit_ends_an_agent_that_raises_its_clients_refusal_in_whatever_way(raised: Exception, ends: bool) -> None:
    async def leads(task: Prompt, model: AgentModelClient) -> float:
        with contextlib.suppress(openai.APIStatusError):
            await asks_on(task, model)
        raise raised

    made = sampler(Scripted(lambda text: "a"), Agent(leads), group_size=1, max_turns=1, on_error=-1.0)
    one, *_ = trajectories(answered(made))
    assert (one.stop, one.reward) == (("turns", 0.0) if ends else ("environment_error", -1.0))


def test_what_the_agent_itself_raises_is_its_fault() -> None:
    with pytest.raises(EnvironmentFailure, match="turn 1: the function raised KeyError: 'gone'"):
        answered(ours(Scripted(lambda text: "ab"), "stumbles", group_size=1))


def test_a_failure_that_the_agent_went_on_after_is_not_what_it_ends_with() -> None:
    class FailsOnce(Scripted):
        async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
            if not self.asked:
                self.asked.append(request)
                raise EngineError("no server is left")
            return await super().generate(request)

    engine = FailsOnce(lambda text: "ab")
    with pytest.raises(EnvironmentFailure, match="turn 1: the function raised KeyError: 'gone'"):
        asyncio.run(ours(engine, "goes_on_and_stumbles", group_size=1).groups(drawn(PROMPTS[:1], 1)))


@pytest.mark.parametrize("given", [0.0, None])
@pytest.mark.parametrize("asks", [asks_on, asks_on_directly])
def test_an_agent_that_hides_the_engines_failure_is_not_trained_on(asks: Any, given: float | None) -> None:
    class FailsThen(Scripted):
        async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
            if request.id.endswith("turn 1"):
                raise EngineError("no server is left")
            return await super().generate(request)

    async def leads(task: Prompt, model: AgentModelClient) -> float | None:
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


def test_an_observation_answers_its_fields_former_name() -> None:
    with pytest.raises(TypeError, match="the field's name is now content"):
        Observation(said="2 + 2")  # type: ignore[call-arg]
