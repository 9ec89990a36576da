"""Sampled tokens stay as they are through every kind of history, and each turn is trained on once."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.rollout.conversation.chat import ChatTemplate
from rl_megatron.rollout.conversation.conversation import Conversation, TurnPrompt
from rl_megatron.rollout.conversation.templates import PlainText
from rl_megatron.types import Turn
from tests.unit.rollout.conversation.families import (
    FAMILIES,
    TOOLS,
    Reply,
    completion,
    completion_of,
    message_of,
    tokenizer_of,
)

IM = {
    "tool": "\n<|im_start|>user\n<tool_response>\n{0}\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "tools": "\n<|im_start|>user\n<tool_response>\n{0}\n</tool_response>\n<tool_response>\n{1}\n</tool_response>"
    "<|im_end|>\n<|im_start|>assistant\n",
    "user": "\n<|im_start|>user\n{0}<|im_end|>\n<|im_start|>assistant\n",
}
LLAMA_OPENS = "<|start_header_id|>assistant<|end_header_id|>\n\n"
BEHIND = {  # what each family writes behind a stop token, by its model card
    "chatml": IM,
    "qwen3": {name: text for name, text in IM.items() if name != "user"},
    "qwen3_without_thinking": {name: text + "<think>\n\n</think>\n\n" for name, text in IM.items()},
    "llama3": {
        "tool": '<|start_header_id|>ipython<|end_header_id|>\n\n"{0}"<|eot_id|>' + LLAMA_OPENS,
        "user": "<|start_header_id|>user<|end_header_id|>\n\n{0}<|eot_id|>" + LLAMA_OPENS,
    },
    "glm": {
        "tool": "\n<tool_response>\n{0}\n</tool_response><|assistant|>",
        "tools": "\n<tool_response>\n{0}\n</tool_response>\n<tool_response>\n{1}\n</tool_response><|assistant|>",
    },
    "deepseek": {
        "tool": "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{0}<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
        "tools": "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{0}<｜tool▁output▁end｜><｜tool▁output▁begin｜>{1}"
        "<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
        "user": "<｜User｜>{0}<｜Assistant｜><think>\n",
    },
    "gptoss": {
        "tool": '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"{0}"<|end|><|start|>assistant'
    },
}


def opened(name: str, **options: Any) -> Conversation:
    return Conversation(ChatTemplate(tokenizer_of(name), options=FAMILIES[name].options, **options))


def answered(conversation: Conversation, asked: TurnPrompt, content: str, rng: random.Random) -> Turn | None:
    reply = Reply(content=content)
    return conversation.add(asked, completion_of("chatml", reply, rng), message_of("chatml", reply))


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in BEHIND for kind in BEHIND[name]])
def test_behind_a_turn_is_the_text_that_its_family_writes_there(name: str, kind: str) -> None:
    rng = random.Random(name + kind)
    tokenizer, conversation = tokenizer_of(name), opened(name)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "häufig 37+1?"}]
    asked = conversation.prompt_for(messages, TOOLS)
    calls = [{"a": 37}, {"a": 1}][: ("tool", "tools").index(kind) + 1] if kind != "user" else []
    reply = Reply(content="" if name == "gptoss" else "Ich  rechne.", reasoning="Hm,\n so.", calls=calls)
    answer = completion_of(name, reply, rng)
    conversation.add(asked, answer, message_of(name, reply))
    results = ["38", "naïve ⏎"]
    messages.append(message_of(name, reply))
    messages += [{"role": "tool", "tool_call_id": f"call_{i}", "content": results[i]} for i in range(len(calls))]
    messages += [] if calls else [{"role": "user", "content": results[1]}]
    then = conversation.prompt_for(messages, TOOLS)
    assert then.branch is None
    row = np.concatenate((asked.token_ids, answer.token_ids))
    assert then.token_ids[: len(row)].tolist() == row.tolist()
    behind = BEHIND[name][kind].format(*(results if calls else results[1:]))
    assert tokenizer.decode(then.token_ids[len(row) :]) == behind


def test_plain_texts_are_appended_as_they_are() -> None:
    tokenizer, rng = byte_tokenizer(), random.Random(1)
    conversation = Conversation(PlainText(tokenizer))
    asked = conversation.prompt_for([{"role": "user", "content": "37*45="}])
    assert asked.token_ids.tolist() == [*b"37*45="]
    first = completion([*b"?37*45", tokenizer.eos_token_id], rng)
    turn = conversation.add(asked, first, {"role": "assistant", "content": "?37*45"})
    assert turn is not None
    assert (turn.start, turn.stop, turn.text) == (6, 13, "?37*45")
    messages = [
        {"role": "user", "content": "37*45="},
        {"role": "assistant", "content": "?37*45"},
        {"role": "tool", "content": ":1665"},
    ]
    then = conversation.prompt_for(messages)
    assert then.token_ids.tolist() == [*b"37*45=?37*45", tokenizer.eos_token_id, *b":1665"]
    second = completion([*b"!1665", tokenizer.eos_token_id], rng)
    conversation.add(then, second, {"role": "assistant", "content": "!1665"})
    (chain,) = conversation.chains()
    assert chain.token_ids.tolist() == [*then.token_ids.tolist(), *second.token_ids.tolist()]
    assert [(turn.start, turn.text) for turn in chain.turns] == [(6, "?37*45"), (18, "!1665")]


def test_parallel_calls_share_a_row_that_is_trained_on_once() -> None:
    rng, conversation = random.Random(2), opened("chatml")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1+1?"}]
    asked = conversation.prompt_for(messages)
    first = conversation.add(
        asked, completion_of("chatml", Reply(content="2"), rng), message_of("chatml", Reply(content="2"))
    )
    messages += [message_of("chatml", Reply(content="2")), {"role": "user", "content": "sure?"}]
    both = [conversation.prompt_for(messages) for _ in range(2)]
    assert [one.branch for one in both] == [None, None]
    assert both[0].token_ids.tolist() == both[1].token_ids.tolist()
    for one, said in zip(both, ("yes", "no"), strict=True):
        conversation.add(
            one, completion_of("chatml", Reply(content=said), rng), message_of("chatml", Reply(content=said))
        )
    yes, no = conversation.chains()
    assert yes.turns[0] is first
    assert [turn.text for turn in (*yes.turns, *no.turns)] == ["2", "yes", "no"]
    edited = conversation.prompt_for(
        [*messages, {"role": "assistant", "content": "maybe"}, {"role": "user", "content": "?"}]
    )
    assert edited.branch == "edited"
    assert edited.token_ids.tolist()[:10] == asked.token_ids.tolist()[:10]
