"""Replies whose calls a parser reads, under a chat template with tools, and calls that it cannot read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import openai
import pytest

from rl_megatron.config.io import load_config
from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.environments.protocol import EnvironmentStep, Model, Observed, Reply
from rl_megatron.environments.registry import EnvironmentMaker
from rl_megatron.errors import ConfigError
from rl_megatron.rollout.batch import Answered
from rl_megatron.rollout.conversation.chat import ChatTemplate
from rl_megatron.rollout.conversation.templates import text_of, tokens_of_text
from rl_megatron.rollout.environments.figures import environment_row
from rl_megatron.rollout.environments.source import EnvironmentSampler
from rl_megatron.rollout.parsers.table import PARSERS
from rl_megatron.types import Prompt
from tests.completions import drawn
from tests.scripted_engine import sampler, trajectories
from tests.unit.rollout.conversation.families import FAMILIES, TOOLS, tokenizer_of
from tests.unit.rollout.endpoint.serving import ASK, CALLS, STOP, TOKENIZER, Saying, episode
from tests.unit.rollout.test_environment_source import Talks

TASK = Prompt(id="p", text="1 + 22?", token_ids=(1,), answer="23")
BAD = '<tool_call>\n{"name": "add", "arguments": \n</tool_call>'


class Adds(Talks):
    """Answers calls of ``add``; what is no call ends the trajectory, well if it has the sum."""

    async def start(self, task: Prompt, seed: int) -> Observed:
        return Observed(said=[{"role": "user", "content": task.text}], tools=TOOLS, state="asked")

    async def step(self, reply: Reply) -> EnvironmentStep:
        calls = reply.message.get("tool_calls", ())
        if not calls:
            return EnvironmentStep(reward=float("23" in reply.message["content"]))
        total = sum(json.loads(call["function"]["arguments"])["a"] for call in calls)
        results = [{"role": "tool", "tool_call_id": call["id"], "content": str(total)} for call in calls]
        return EnvironmentStep(observation=Observed(said=results))


async def leaves_to_the_client(task: Prompt, model: Model) -> float:
    async with openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        asked: dict[str, Any] = {"model": "policy", "tools": TOOLS}
        answer = await client.chat.completions.create(messages=[{"role": "user", "content": task.text}], **asked)
    return float(len(answer.choices[0].message.tool_calls or ()))


async def goes_on(task: Prompt, model: Model) -> float:
    said = await model.reply([{"role": "user", "content": task.text}])
    await model.reply([{"role": "user", "content": task.text}, said.message, {"role": "user", "content": "?"}])
    return 1.0


def played(made: Any, *texts: str, parser: str | None = "hermes", **section: Any) -> tuple[Saying, list[Answered]]:
    engine = Saying(*texts)
    ours: EnvironmentSampler = replace(
        sampler(engine, made, **section),
        template=ChatTemplate(TOKENIZER, options=FAMILIES["qwen3"].options),
        encode=partial(tokens_of_text, TOKENIZER),
        parser=None if parser is None else PARSERS[parser],
        rollout=RolloutSection(group_size=1, max_new_tokens=200, max_prompt_tokens=1000),
        stop_token_ids=(STOP,),
    )
    return engine, asyncio.run(ours.groups(drawn([TASK])))


def shown(found: Sequence[Answered]) -> str:
    """All text of the one row."""
    ((row,),) = [one.chains for one in trajectories(found)]
    return text_of(TOKENIZER, row.token_ids, special=True)


def test_an_environment_gets_calls_and_its_results_go_on_in_one_row() -> None:
    engine, found = played(EnvironmentMaker(Adds), CALLS, "The sum is 23.")
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
    _, found = played(EnvironmentMaker(Adds), BAD, "The sum is 23.")
    (one,) = trajectories(found)
    assert (one.reward, one.stop, len(one.turns)) == (1.0, "done", 2)
    assert "<|im_start|>user\nerror: a call is no JSON (" in shown(found)
    assert environment_row([one])["environment/bad_calls"] == 1
    assert [(turn.reward, turn.state) for turn in one.turns] == [(None, "asked"), (1.0, "asked")]


@pytest.mark.parametrize("name", [None, f"{__name__}:goes_on"])
def test_a_turn_that_the_template_cannot_show_ends_the_trajectory_and_is_no_fault_of_the_environment(
    name: str | None,
) -> None:
    """gpt-oss's template raises for a content with marks of channels, which a call without JSON leaves there."""
    tokenizer = tokenizer_of("gptoss")
    thought = "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant"
    engine = Saying(f"{thought}<|channel|>commentary to=functions.add json<|message|>{{<|call|>")
    ours: EnvironmentSampler = replace(
        sampler(engine, None if name else EnvironmentMaker(Adds), **({"function": name} if name else {})),
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
