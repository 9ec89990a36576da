"""Messages of the texts that each family's models write, by their model cards, and replies that a parser reads."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import openai
import pytest

from rl_megatron.agents.conversation.templates import decode_text, encode_text
from rl_megatron.agents.conversation.written import ChatTemplate
from rl_megatron.agents.parsers import PARSERS
from rl_megatron.agents.source import EnvironmentSampler, environment_row
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.environments.protocol import AgentModelClient, EnvironmentStep, Observation
from rl_megatron.environments.protocol import Reply as ModelReply
from rl_megatron.environments.registry import EnvironmentFactory
from rl_megatron.errors import ConfigError
from rl_megatron.rollout.stream import GroupResult
from rl_megatron.types import Prompt
from tests.completions import drawn
from tests.scripted_engine import sampler, trajectories
from tests.unit.rollout.conversation.families import FAMILIES, TOOLS, Reply, message_of, tokenizer_of, written
from tests.unit.rollout.endpoint.test_endpoint import ASK, CALLS, STOP, TOKENIZER, Saying, episode
from tests.unit.rollout.test_environment_source import Talks

NAMES = {"qwen3": "hermes", "chatml": "hermes", "llama3": "llama3_json", "deepseek": "deepseek"}
NAMES |= {"glm": "glm", "gptoss": "harmony"}
CITY = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]


def plain(message: Any) -> dict[str, Any]:
    """The message without ids of calls, and with their arguments parsed."""
    calls = [
        (call["type"], call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]
    return {**message, "content": message["content"] or "", "tool_calls": calls}


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize(
    "reply",
    [
        Reply(content="It is 4."),
        Reply(content="It is 4.", reasoning="Two and\ntwo."),
        Reply(calls=({"a": 1},)),
        Reply(calls=({"a": 17},), reasoning="I shall add."),
    ],
    ids=["answer", "thought and answer", "call", "thought and call"],
)
def test_what_a_family_writes(family: str, reply: Reply) -> None:
    text, _ = written(family, reply)
    if family == "deepseek" and reply.calls:
        text = f"<｜tool▁calls▁begin｜>{text}<｜tool▁calls▁end｜>"
    parsed = PARSERS[NAMES[family]](text)
    assert parsed.problem is None
    expected = plain(message_of(family, reply))
    if family == "glm":  # whose text has one key, a, for all arguments
        expected["tool_calls"] = [(kind, name, {"a": arguments}) for kind, name, arguments in expected["tool_calls"]]
    assert plain(parsed.message) == expected


HERMES_TWO = (
    'Both.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "北京 \\"old\\"", "deep": {"x": [1, null]}}}\n</tool_call>'
)
V31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
    '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Bern"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
GLM_TWO = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>123</arg_value>\n"
    '<arg_key>deep</arg_key>\n<arg_value>{"x": [1, null]}</arg_value>\n</tool_call>'
)
HARMONY = (
    "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    '<|constrain|>json<|message|>{"city": "Bern"}'
)
DEEP = {"x": [1, None]}


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", HERMES_TWO, "Both.\n", [("add", {"a": 1}), ("weather", {"city": '北京 "old"', "deep": DEEP})]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}', "", [("add", {"a": 1})]),
        ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
        (
            "llama3_json",
            '{"name": "add", "parameters": {}}; {"name": "weather", "arguments": {"city": "a;b {c}"}}',
            "",
            [("add", {}), ("weather", {"city": "a;b {c}"})],
        ),
        ("llama3_json", '{"sum": 3}', '{"sum": 3}', []),
        ("deepseek", V31, "", [("add", {"a": 1}), ("weather", {"city": "Bern"})]),
        ("glm", GLM_TWO, "", [("add", {"a": 1}), ("weather", {"city": "123", "deep": DEEP})]),
        ("harmony", HARMONY, "I will look.", [("weather", {"city": "Bern"})]),
    ],
)
def test_other_texts(name: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    parsed = PARSERS[name](text, CITY)
    assert parsed.problem is None
    message = plain(parsed.message)
    assert message["content"] == content
    assert [call[1:] for call in message["tool_calls"]] == calls


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1,}}\n</tool_call>', "no JSON"),
        ("hermes", '<tool_call>\n{"arguments": {"a": 1}}\n</tool_call>', "with a name"),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": "1"}\n</tool_call>', "must be an object"),
        ("llama3_json", '<|python_tag|>{"name": "add", "parameters": [1]}', "must be an object"),
        ("llama3_json", '<|python_tag|>{"name": "add"', "no JSON"),
        ("deepseek", V31.replace('{"a": 1}', "a = 1"), "no JSON"),
        ("deepseek", V31[: V31.rindex("<｜tool▁call▁end｜>")], "does not end"),
        ("glm", GLM_TWO.removesuffix("</tool_call>"), "does not end"),
        ("glm", "<tool_call>add\na = 1</tool_call>", "pairs of"),
        ("harmony", HARMONY[:-1], "no JSON"),
    ],
)
def test_calls_that_cannot_be_read_are_content_and_a_problem(name: str, text: str, why: str) -> None:
    parsed = PARSERS[name](text)
    assert why in str(parsed.problem)
    assert parsed.message == {"role": "assistant", "content": text}


CALL_OF = {
    "hermes": '<tool_call>{"name": "f", "arguments": %s}</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "f", "parameters": %s}',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "harmony": "<|channel|>commentary to=functions.f<|message|>%s",
}


@pytest.mark.parametrize("name", CALL_OF)
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (r'{"a": "\ud83d"}', "surrogates not allowed"),
        ('{"a": %s}' % ("[" * 5000 + "]" * 5000), "nested more than 64 deep|recursion depth"),
        ('{"a": %s}' % ("[" * 66 + "]" * 66), "nested more than 64 deep"),
        ('{"a": %s' % ("[" * 5000), "nested more than 64 deep|recursion depth"),
        ('{"a": NaN}', "not JSON compliant"),
    ],
)
def test_calls_that_python_reads_and_others_could_not_are_problems(name: str, arguments: str, why: str) -> None:
    parsed = PARSERS[name](CALL_OF[name] % arguments)
    assert re.search(why, str(parsed.problem))
    assert "tool_calls" not in parsed.message
    assert PARSERS[name](CALL_OF[name] % ('{"a": %s}' % ("[" * 60 + "]" * 60))).problem is None


def test_a_value_of_glm_that_is_no_json_is_its_text() -> None:
    for value in ("[" * 5000, r'"\ud83d"', "NaN"):
        parsed = PARSERS["glm"](f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>")
        assert plain(parsed.message)["tool_calls"] == [("function", "f", {"a": value})]


@pytest.mark.parametrize("name", ["hermes", "deepseek", "glm"])
def test_thoughts_that_the_prompt_opened_or_that_were_cut(name: str) -> None:
    opened = PARSERS[name]("Two and two.\n</think>\n\nIt is 4.").message
    assert (opened["reasoning_content"], opened["content"]) == ("Two and two.", "It is 4.")
    expected = {"role": "assistant", "content": "", "reasoning_content": "Perhaps 42? But"}
    assert PARSERS[name]("Perhaps 42? But", opened=True).message == expected
    cut = PARSERS[name]('<think>\nMaybe <tool_call>{"name": ').message
    assert (cut["reasoning_content"], cut["content"]) == ('Maybe <tool_call>{"name": ', "")


CALL_OF_TEXT = CALL_OF | {"glm": "<tool_call>f<arg_key>a</arg_key><arg_value>x</think>y</arg_value></tool_call>"}
OPENINGS = {  # the reasoning, and whether the prompt opened it
    "": ("", False),
    "I see. ": ("", False),
    "<think>Look.</think>": ("Look.", False),
    "Look.</think>": ("Look.", True),
}


@pytest.mark.parametrize("before", OPENINGS)
@pytest.mark.parametrize("name", ["hermes", "deepseek", "glm"])
def test_an_argument_that_ends_thoughts_is_an_argument(name: str, before: str) -> None:
    written = CALL_OF_TEXT[name].replace("%s", '{"a": "x</think>y"}')
    reasoning, opened = OPENINGS[before]
    message = plain(PARSERS[name](before + written, opened=opened).message)
    assert message["tool_calls"] == [("function", "f", {"a": "x</think>y"})]
    assert message.get("reasoning_content", "") == reasoning


@pytest.mark.parametrize("start", ["", "<think>"])
@pytest.mark.parametrize("name", ["hermes", "deepseek", "glm"])
def test_a_line_that_begins_a_call_ends_the_thought_before_it(name: str, start: str) -> None:
    written = CALL_OF_TEXT[name].replace("%s", '{"a": "xy"}').replace("</think>", "")
    message = plain(PARSERS[name](f"{start}Look.\n{written}", opened=not start).message)
    assert message["tool_calls"] == [("function", "f", {"a": "xy"})]
    assert (message["reasoning_content"], message["content"]) == ("Look.", "")


def called_with(schema: Any, value: str) -> Any:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
    text = f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"
    parsed = PARSERS["glm"](text, [{"type": "function", "function": function}])
    assert parsed.problem is None
    ((_, _, arguments),) = plain(parsed.message)["tool_calls"]
    return arguments["a"]


WRITTEN_VALUES = ["12345", "1.5", "true", "null", '{"x": 1}', "[1]", '"quoted"', "bare"]


@pytest.mark.parametrize(
    ("schema", "read"),
    [
        ({"type": "string"}, set[str]()),
        ({"enum": ["1", "2"]}, set[str]()),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}, {"null"}),
        ({"oneOf": [{"enum": ["1", None]}, {"allOf": [{"type": "string"}]}]}, {"null"}),
        ({"type": ["string", "null"]}, {"null"}),
        ({"type": ["integer", "string"]}, {"12345"}),
        ({"anyOf": [{"type": "string"}, {"type": "object"}]}, {'{"x": 1}'}),
        ({}, {*WRITTEN_VALUES} - {"bare"}),
        ({"type": "integer"}, {*WRITTEN_VALUES} - {"bare"}),
        (None, {*WRITTEN_VALUES} - {"bare"}),
    ],
)
def test_a_value_of_glm_is_a_text_where_the_schema_allows_texts(schema: Any, read: set[str]) -> None:
    expected = {value: json.loads(value) if value in read else value for value in WRITTEN_VALUES}
    assert {value: called_with(schema, value) for value in WRITTEN_VALUES} == expected


@pytest.mark.parametrize(
    "value", ["see <tool_call> docs", "</tool_call>", "<tool_call>f</tool_call>", "<arg_key>a</arg_key>"]
)
def test_a_value_of_glm_may_have_tags_in_it(value: str) -> None:
    assert called_with({"type": "string"}, value) == value


# Replies whose calls a parser reads, under a chat template with tools, and calls that it cannot read.
TASK = Prompt(id="p", text="1 + 22?", token_ids=(1,), answer="23")
BAD = '<tool_call>\n{"name": "add", "arguments": \n</tool_call>'


class Adds(Talks):
    """Answers calls of ``add``; what is no call ends the trajectory, well if it has the sum."""

    async def start(self, task: Prompt, seed: int) -> Observation:
        return Observation(content=[{"role": "user", "content": task.text}], tools=TOOLS, state="asked")

    async def step(self, reply: ModelReply) -> EnvironmentStep:
        calls = reply.message.get("tool_calls", ())
        if not calls:
            return EnvironmentStep(reward=float("23" in reply.message["content"]))
        total = sum(json.loads(call["function"]["arguments"])["a"] for call in calls)
        results = [{"role": "tool", "tool_call_id": call["id"], "content": str(total)} for call in calls]
        return EnvironmentStep(observation=Observation(content=results))


async def leaves_to_the_client(task: Prompt, model: AgentModelClient) -> float:
    async with openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        asked: dict[str, Any] = {"model": "policy", "tools": TOOLS}
        answer = await client.chat.completions.create(messages=[{"role": "user", "content": task.text}], **asked)
    return float(len(answer.choices[0].message.tool_calls or ()))


async def goes_on(task: Prompt, model: AgentModelClient) -> float:
    said = await model.reply([{"role": "user", "content": task.text}])
    await model.reply([{"role": "user", "content": task.text}, said.message, {"role": "user", "content": "?"}])
    return 1.0


def played(made: Any, *texts: str, parser: str | None = "hermes", **section: Any) -> tuple[Saying, list[GroupResult]]:
    engine = Saying(*texts)
    ours: EnvironmentSampler = replace(
        sampler(engine, made, **section),
        template=ChatTemplate(TOKENIZER, options=FAMILIES["qwen3"].options),
        encode=partial(encode_text, TOKENIZER),
        parser=None if parser is None else PARSERS[parser],
        rollout=RolloutSection(group_size=1, max_new_tokens=200, max_prompt_tokens=1000),
        stop_token_ids=(STOP,),
    )
    return engine, asyncio.run(ours.groups(drawn([TASK])))


def shown(found: Sequence[GroupResult]) -> str:
    """All text of the one row."""
    ((row,),) = [one.chains for one in trajectories(found)]
    return decode_text(TOKENIZER, row.token_ids, special=True)


def test_an_environment_gets_calls_and_its_results_go_on_in_one_row() -> None:
    engine, found = played(EnvironmentFactory(Adds), CALLS, "The sum is 23.")
    (one,) = trajectories(found)
    assert (one.reward, one.stop, [turn.state for turn in one.turns]) == (1.0, "done", ["asked", None])
    (row,) = one.chains
    sampled = [[*TOKENIZER(text)["input_ids"], STOP] for text in engine.texts]
    assert [row.token_ids[turn.start : turn.stop].tolist() for turn in one.turns] == sampled
    assert environment_row([one])["environment/tool_calls"] == 2
    assert shown(found).count("<tool_response>\n23\n</tool_response>") == 2


async def test_a_call_that_is_made_again_has_another_id_and_the_same_when_the_trajectory_is_repeated() -> None:
    async def led() -> list[str]:
        turns, messages, ids = episode(Saying(CALLS)), list[Any](ASK), list[str]()
        for _ in range(3):
            reply = await turns.reply(messages, TOOLS)
            new = [call["id"] for call in reply.message["tool_calls"]]
            messages += [reply.message, *({"role": "tool", "tool_call_id": one, "content": "wait"} for one in new)]
            ids += new
        assert len(turns.chains()) == 1
        return ids

    ids = await led()
    assert len(set(ids)) == 6
    assert await led() == ids


async def test_a_thought_that_the_prompt_opened_and_that_was_cut_is_no_answer() -> None:
    """DeepSeek's template ends prompts with ``<think>``."""
    tokenizer = tokenizer_of("deepseek")
    keys = {"template": ChatTemplate(tokenizer), "parser": PARSERS["deepseek"], "vocab_size": len(tokenizer)}
    reply = await episode(Saying("Is it 23? " * 99), **keys).reply([{"role": "user", "content": "1 + 22?"}], ())
    assert reply.finish_reason == "length"
    assert (reply.message["content"], reply.message["reasoning_content"]) == ("", reply.text)


def test_what_is_wrong_with_a_call_is_observed_without_a_step() -> None:
    _, found = played(EnvironmentFactory(Adds), BAD, "The sum is 23.")
    (one,) = trajectories(found)
    assert (one.reward, one.stop, len(one.turns)) == (1.0, "done", 2)
    assert "<|im_start|>user\nerror: a call is no JSON (" in shown(found)
    assert environment_row([one])["environment/bad_calls"] == 1
    assert [(turn.reward, turn.state) for turn in one.turns] == [(None, "asked"), (1.0, "asked")]


@pytest.mark.parametrize("name", [None, f"{__name__}:goes_on"])
def test_a_turn_that_the_template_cannot_show_ends_the_trajectory(name: str | None) -> None:
    """gpt-oss's template raises for a content with marks of channels, which a call without JSON leaves there."""
    tokenizer = tokenizer_of("gptoss")
    thought = "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant"
    engine = Saying(f"{thought}<|channel|>commentary to=functions.add json<|message|>{{<|call|>")
    ours: EnvironmentSampler = replace(
        sampler(engine, None if name else EnvironmentFactory(Adds), **({"function": name} if name else {})),
        template=ChatTemplate(tokenizer),
        parser=PARSERS["harmony"],
        rollout=RolloutSection(group_size=1, max_new_tokens=200, max_prompt_tokens=2000),
        stop_token_ids=(STOP,),
        vocab_size=len(tokenizer),
    )
    (one,) = trajectories(asyncio.run(ours.groups(drawn([TASK]))))
    assert (one.stop, one.reward, len(one.turns)) == ("bad_call", 0.0 if name else 1.0, 1)


def test_an_agents_client_gets_the_calls_or_is_refused_tools_without_a_parser() -> None:
    name = f"{__name__}:leaves_to_the_client"
    _, found = played(None, CALLS, function=name)
    assert [one.reward for one in trajectories(found)] == [2.0]
    _, found = played(None, CALLS, parser=None, function=name, on_error="drop")
    assert "set environment.tool_parser" in found[0].problem


@pytest.mark.parametrize(
    ("keys", "said"), [(["environment.tool_parser=hermes"], "plain texts show neither tools nor calls")]
)
def test_keys_that_nothing_would_read_are_refused(keys: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config("calculator", keys)
