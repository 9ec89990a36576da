"""Random conversations of every family: rows, turns and spliced texts, whatever clients and models do."""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from rl_megatron.agents.conversation.conversation import Conversation, TurnPrompt
from rl_megatron.agents.conversation.messages import UnsupportedMessages
from rl_megatron.agents.conversation.templates import PlainText
from rl_megatron.agents.conversation.written import ChatTemplate
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.types import Completion, TokenSequence
from tests.unit.rollout.conversation.families import (
    FAMILIES,
    Reply,
    completion,
    completion_of,
    message_of,
    tokenizer_of,
)

WORDS = (
    *("so", "37", " ", "\n", "naïve", "日本語", "🙂", "{", '"a"', "  ", "</tool_call", "é", "\t", "<think", "e\u0301"),
)
CONVERSATIONS, TURNS = 10, 6
LEAST = dict.fromkeys(FAMILIES, 1.0) | {"qwen3": 0.5, "glm": 0.5, "gptoss": 0.4}  # of turns that go on from a row


def said(rng: random.Random, most: int = 8) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randrange(most)))


def reply(name: str, rng: random.Random) -> Reply:
    family, calls = FAMILIES[name], rng.choice((0, 0, 1, 1, 2))
    calls = min(calls, 1) if family.one_call else calls
    content = "" if name == "gptoss" and calls else said(rng)  # its template takes reasoning or content beside a call
    thoughts = f"1{said(rng)}1" if rng.random() < 0.6 else ""
    cut = not calls and rng.random() < 0.06
    return Reply(content=content, reasoning=thoughts, calls=[{"a": said(rng)} for _ in range(calls)], cut=cut)


def echoed(message: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The message as a client may send it back."""
    echo = {key: copy.deepcopy(message[key]) for key in sorted(message, reverse=rng.random() < 0.5)}
    for call in echo.get("tool_calls", ()):
        call["id"] = f"other_{rng.random()}"
    if rng.random() < 0.5:
        echo |= {"refusal": None, "audio": None}
    if rng.random() < 0.5:
        echo |= {"name": "coder", "provider_specific_fields": {"refusal": None}}  # as LangGraph's and litellm's
    if rng.random() < 0.3:
        echo.pop("reasoning_content", None)
    return echo


def own_text(name: str, messages: list[dict[str, Any]], place: int, stop: str | None) -> str:
    """What the template writes behind the turn at ``place``, if its content were one word."""
    turn = {"role": "assistant", "content": "PLACE"}
    if name == "gptoss" and "tool_calls" in messages[place]:
        turn["tool_calls"] = messages[place]["tool_calls"]
    shown = [*messages[:place], turn, *messages[place + 1 :]]
    for message in shown:
        if message["content"] is None and name != "deepseek":
            message["content"] = ""
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = {"a": "?"} if name != "deepseek" else "?"
    text = tokenizer_of(name).apply_chat_template(
        shown, tools=FAMILIES[name].tools, tokenize=False, add_generation_prompt=True, **FAMILIES[name].options
    )
    behind = text.partition("PLACE")[2]
    return behind if stop is None else behind.partition(stop)[2]


def next_messages(name: str, messages: list[dict[str, Any]], turn: Reply, rng: random.Random) -> list[dict[str, Any]]:
    """The history that the client sends after this turn."""
    new = [{"role": "tool", "tool_call_id": f"call_{i}", "content": said(rng)} for i in range(len(turn.calls))]
    new += [] if turn.calls else [{"role": "user", "content": said(rng)}]
    return [*messages, echoed(message_of(name, turn), rng), *new]


def check_rows(chains: tuple[TokenSequence, ...], sampled: list[tuple[TurnPrompt, Completion]]) -> None:
    """Each turn once, with the tokens sampled and behind the prompt that the engine saw."""
    turns = Counter[int]()
    by_logprobs = {id(got.logprobs): (asked, got) for asked, got in sampled}
    for chain in chains:
        assert chain.turns
        for turn in chain.turns:
            asked, got = by_logprobs[id(turn.logprobs)]
            assert chain.token_ids[turn.start : turn.stop].tolist() == got.token_ids.tolist()
            assert chain.token_ids[: turn.start].tolist() == asked.token_ids.tolist()
            assert (turn.finish_reason, turn.spans) == (got.finish_reason, got.spans)
            turns[id(got)] += 1
        assert [turn.start for turn in chain.turns] == sorted(turn.start for turn in chain.turns)
        assert len(chain.token_ids) == chain.turns[-1].stop
    assert turns == {id(got): 1 for _, got in sampled if len(got.token_ids)}


@pytest.mark.parametrize("name", FAMILIES)
def test_trained_tokens_are_the_sampled_ones_and_spliced_texts_the_templates_own(name: str) -> None:
    rng, tokenizer, spliced = random.Random(name), tokenizer_of(name), Counter[bool]()
    for _ in range(CONVERSATIONS):
        conversation = Conversation(ChatTemplate(tokenizer, options=FAMILIES[name].options))
        messages: list[dict[str, Any]] = [{"role": "user", "content": said(rng)}]
        if rng.random() < 0.5:
            messages.insert(0, {"role": "system", "content": said(rng)})
        sampled: list[tuple[TurnPrompt, Completion]] = []
        row, stop = np.zeros(0, np.int32), None
        for number in range(TURNS):
            asked = conversation.prompt_for(messages, FAMILIES[name].tools)
            if number:
                spliced[asked.branch is None] += 1
            if number and asked.branch is None:
                assert asked.token_ids[: len(row)].tolist() == row.tolist()
                place = max(i for i, one in enumerate(messages) if one["role"] == "assistant")
                text = own_text(name, copy.deepcopy(messages), place, stop)
                assert tokenizer.decode(asked.token_ids[len(row) :]) == text
            turn = reply(name, rng)
            got = completion_of(name, turn, rng)
            if turn.cut:
                turn = Reply(content=tokenizer.decode(got.token_ids, skip_special_tokens=True), cut=True)
            conversation.add(asked, got, message_of(name, turn))
            sampled.append((asked, got))
            row = np.concatenate((asked.token_ids, got.token_ids))
            stop = None if turn.cut else tokenizer.decode(got.token_ids[-1:])
            messages = next_messages(name, messages, turn, rng)
        check_rows(conversation.chains(), sampled)
    assert spliced[True] >= LEAST[name] * spliced.total()


NAMED = "{% for m in messages %}<|im_start|>{{ m.name or m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
WHOLE = "{% for m in messages %}<|im_start|>{{ m | tojson }}<|im_end|>\n{% endfor %}"
REFUSING = "{% for m in messages %}{% if m.name %}{{ raise_exception('a name') }}{% endif %}{% endfor %}" + WHOLE


def templated(template: str) -> ChatTemplate:
    tokenizer = copy.deepcopy(tokenizer_of("qwen3"))
    tokenizer.chat_template = template + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    return ChatTemplate(tokenizer)


@pytest.mark.parametrize(
    ("template", "others", "branches"),
    [
        (ChatTemplate(tokenizer_of("qwen3")), {"name": "coder"}, {}),  # its source has the word, of tools
        (templated(NAMED), {"provider_specific_fields": {"refusal": None}}, {}),
        (templated(NAMED), {"name": "coder"}, {"edited": 3}),
        (templated(NAMED), {"name": "assistant"}, {}),
        (templated(WHOLE), {"provider_specific_fields": {"refusal": None}}, {"edited": 3}),
    ],
)
def test_keys_added_begin_rows(template: ChatTemplate, others: dict[str, Any], branches: dict[str, int]) -> None:
    rng, conversation = random.Random(4), Conversation(template)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1+1?"}]
    for number in range(4):
        asked = conversation.prompt_for(messages)
        assert template.decode(asked.token_ids, special=True) == template.render(messages, ())
        turn = Reply(content=f"{number}")
        conversation.add(asked, completion_of("qwen3", turn, rng), message_of("qwen3", turn))
        messages += [message_of("qwen3", turn) | others, {"role": "user", "content": "sure?"}]
    assert (conversation.branches(), len(conversation.chains())) == (branches, 1 + sum(branches.values()))


def test_a_key_that_the_template_refuses_is_not_the_turns_doing() -> None:
    conversation, turn = Conversation(templated(REFUSING)), Reply(content="2")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1+1?"}]
    asked = conversation.prompt_for(messages)
    conversation.add(asked, completion_of("qwen3", turn, random.Random(4)), message_of("qwen3", turn))
    messages += [message_of("qwen3", turn) | {"name": "coder"}]
    with pytest.raises(UnsupportedMessages, match="a name"):
        conversation.prompt_for(messages)
    assert not conversation.cannot_show_turn(messages)


DONE = strategies.sampled_from(("append", "repeat", "edit", "parallel", "drop"))


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
@hypothesis.given(strategies.lists(strategies.tuples(DONE, strategies.integers(0, 7)), max_size=10))
@hypothesis.example([("append", 0), ("parallel", 0), ("parallel", 1), ("append", 3)])
def test_each_turn_is_trained_on_once_whatever_is_appended_edited_or_asked_again(done: list[tuple[str, int]]) -> None:
    rng, tokenizer = random.Random(5), byte_tokenizer()
    conversation = Conversation(PlainText(tokenizer))
    history: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
    sampled: list[tuple[TurnPrompt, Completion]] = []

    def answer(asked: TurnPrompt) -> dict[str, Any]:
        text = rng.choice(("a", "b", ""))  # often equal to another turn of the same messages
        ends = [tokenizer.eos_token_id] if text or rng.random() < 0.5 else []
        got = completion([*text.encode(), *ends], rng, cut=not ends)
        conversation.add(asked, got, {"role": "assistant", "content": text})
        sampled.append((asked, got))
        return {"role": "assistant", "content": text}

    for what, number in [("append", 0), *done]:
        if what == "edit":
            place = number % len(history)
            history = [*history[:place], {**history[place], "content": f"edited {number}"}, *history[place + 1 :]]
        elif what == "drop":
            history = history[: 1 + number % len(history)]
        elif what == "parallel":
            both = [conversation.prompt_for(history) for _ in range(2)]
            answer(both[1])
            history = [*history, answer(both[0]), {"role": "user", "content": str(number)}]
        else:
            said_now = answer(conversation.prompt_for(history))
            history = [*history, said_now, {"role": "user", "content": str(number)}] if what == "append" else history
    check_rows(conversation.chains(), sampled)
    total = sum(len(turn.logprobs) for chain in conversation.chains() for turn in chain.turns)
    assert total == sum(len(got.token_ids) for _, got in sampled)
