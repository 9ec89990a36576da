"""Sampled tokens stay as they are through every kind of history, and each turn is trained on once."""

from __future__ import annotations

import copy
import random
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from rl_megatron.data.routes import decode_routes, encode_routes
from rl_megatron.errors import ConfigError, DataError
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.rollout.conversation.chat import _BACK, _FRONT, ChatTemplate
from rl_megatron.rollout.conversation.conversation import Conversation, TurnPrompt
from rl_megatron.rollout.conversation.messages import MessagesRefused
from rl_megatron.rollout.conversation.templates import PlainText
from rl_megatron.types import Completion, Turn
from tests.unit.rollout.conversation.families import (
    FAMILIES,
    TOOLS,
    Reply,
    completion,
    completion_of,
    message_of,
    pieces,
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
    asked = conversation.prompt_for(messages, FAMILIES[name].tools)
    calls = [{"a": 37}, {"a": 1}][: ("tool", "tools").index(kind) + 1] if kind != "user" else []
    reply = Reply(content="" if name == "gptoss" else "Ich  rechne.", reasoning="Hm,\n so.", calls=calls)
    answer = completion_of(name, reply, rng)
    conversation.add(asked, answer, message_of(name, reply))
    results = ["38", "naïve ⏎"]
    messages.append(message_of(name, reply))
    messages += [{"role": "tool", "tool_call_id": f"call_{i}", "content": results[i]} for i in range(len(calls))]
    messages += [] if calls else [{"role": "user", "content": results[1]}]
    then = conversation.prompt_for(messages, FAMILIES[name].tools)
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


def played(name: str, replies: list[Reply], **options: Any) -> tuple[list[str | None], int]:
    """Why each prompt began a row, and the number of rows; tools answer calls, and users all else."""
    rng, conversation = random.Random(3), opened(name, **options)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    branches: list[str | None] = []
    for reply in replies:
        asked = conversation.prompt_for(messages, FAMILIES[name].tools)
        branches.append(asked.branch)
        conversation.add(asked, completion_of(name, reply, rng), message_of(name, reply))
        messages.append(message_of(name, reply))
        messages.append({"role": "tool", "content": "1"} if reply.calls else {"role": "user", "content": "on"})
    assert sum(len(chain.turns) for chain in conversation.chains()) == len(replies)
    return branches, len(conversation.chains())


CALLS = Reply(reasoning="I call.", calls=[{"a": 1}])
SAYS = Reply(reasoning="I say.", content="It is so.")
PLAIN = Reply(content="It is so.")


@pytest.mark.parametrize(
    ("name", "replies", "branches"),
    [
        ("qwen3", [CALLS, CALLS, SAYS], [None, None, None]),  # a tool cycle
        ("qwen3", [CALLS, SAYS, CALLS, SAYS, SAYS], [None, None, "thinking", None, "thinking"]),
        ("qwen3", [PLAIN, PLAIN, SAYS], [None, None, None]),
        ("glm", [CALLS, SAYS, CALLS, SAYS], [None, None, "thinking", None]),
        ("glm", [PLAIN, PLAIN], [None, None]),
        ("gptoss", [CALLS, CALLS, SAYS, SAYS], [None, None, None, "thinking"]),
        ("gptoss", [PLAIN, PLAIN], [None, "closing"]),  # <|return|> is sampled, and history has <|end|>
        ("deepseek", [Reply(content="Hm.</think>Yes."), PLAIN], [None, "thinking"]),
        ("chatml", [Reply(content="<think>Hm.</think>Yes."), CALLS, PLAIN], [None, None, None]),
    ],
)
def test_a_row_begins_where_the_template_shows_the_context_otherwise(
    name: str, replies: list[Reply], branches: list[str | None]
) -> None:
    assert played(name, replies) == (branches, 1 + sum(branch is not None for branch in branches))


@pytest.mark.parametrize("name", ["qwen3", "glm"])
def test_with_thinking_kept_a_trajectory_is_one_row(name: str) -> None:
    assert played(name, [CALLS, SAYS, CALLS, SAYS, SAYS], thinking="keep") == ([None] * 5, 1)


def test_other_tools_and_moving_texts_begin_a_row() -> None:
    rng, conversation = random.Random(4), opened("chatml")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1+1?"}]
    answered(conversation, conversation.prompt_for(messages, TOOLS), "2", rng)
    messages += [{"role": "assistant", "content": "2"}, {"role": "user", "content": "sure?"}]
    assert conversation.prompt_for(messages, TOOLS).branch is None
    assert conversation.prompt_for(messages).branch == "context"
    assert conversation.prompt_for([{"role": "system", "content": "Be brief."}, *messages], TOOLS).branch == "edited"
    counting = copy.deepcopy(tokenizer_of("chatml"))
    counting.chat_template = "{{ messages | length }}" + str(counting.chat_template)
    conversation = Conversation(ChatTemplate(counting))
    answered(conversation, conversation.prompt_for(messages[:1]), "2", rng)
    assert conversation.prompt_for(messages).branch == "context"
    assert conversation.prompt_for(messages[:1]).branch == "again"


def test_a_text_that_shows_a_turn_in_its_own_way_is_taken_apart_behind_it_or_begins_a_row() -> None:
    rng, tokenizer = random.Random(4), copy.deepcopy(tokenizer_of("chatml"))

    def behind(source: str, first: str, turn: dict[str, str], then: str) -> str | None:
        """The text between the turn and the next one; None if a row begins, as the turn's context is another."""
        tokenizer.chat_template = source
        conversation = Conversation(ChatTemplate(tokenizer))
        messages: list[dict[str, Any]] = [{"role": "user", "content": first}]
        asked = conversation.prompt_for(messages)
        conversation.add(asked, completion([5], rng, cut=True), {"role": "assistant", **turn})
        messages += [{"role": "assistant", **turn}, {"role": "user", "content": then}]
        later = conversation.prompt_for(messages)
        assert later.branch in (None, "context")
        return None if later.branch else tokenizer.decode(later.token_ids[len(asked.token_ids) + 1 :])

    each = "{% for one in messages %}{{ one.content }}{% endfor %}"
    assert behind(each, "a", {"content": "b"}, "c") == "c"
    thought = "{% for one in messages %}{{ one.content }}{{ one.reasoning_content or '' }}.{% endfor %}"
    assert behind(thought, "a", {"content": "b", "reasoning_content": "Hm"}, "c") == ".c."
    assert behind(each.replace("messages", "messages[::-1]"), "aa", {"content": "aa"}, "") is None
    for mark in (_FRONT, _BACK):  # a text may have a mark, too
        assert behind(each, mark, {"content": "b"}, "c") is behind(each, "a", {"content": "b"}, f"c{mark}") is None


def test_a_text_that_moves_late_begins_a_row_and_one_that_is_trimmed_does_not() -> None:
    rng, late = random.Random(4), copy.deepcopy(tokenizer_of("chatml"))
    late.chat_template = "{% if messages | length > 4 %}late{% endif %}" + str(late.chat_template)
    conversation = Conversation(ChatTemplate(late))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1+1?"}]
    branches = []
    for _ in range(4):
        asked = conversation.prompt_for(messages)
        branches.append(asked.branch)
        answered(conversation, asked, " 2 ", rng)
        messages += [{"role": "assistant", "content": " 2 "}, {"role": "user", "content": "sure?"}]
    assert branches == [None, None, "context", None]
    assert played("llama3", [Reply(content=" so \n")] * 4) == ([None] * 4, 1)  # its template trims contents


LIKE_LLAMA2 = (
    "{% for one in messages %}{% if one.role == 'user' %}<|im_start|>[INST] {{ one.content.strip() }} [/INST]"
    "{% else %} {{ one.content.strip() }} <|im_end|>{% endif %}{% endfor %}"
)
A_LINE = (
    "{% for one in messages %}<|im_start|>{{ one.role }}\n{{ one.content }}\n<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "opens", "goes_on", "before_stop"),
    [
        (LIKE_LLAMA2, "<|im_start|>[INST] {} [/INST]", "<|im_start|>[INST] {} [/INST]", " "),
        (
            A_LINE,
            "<|im_start|>user\n{}\n<|im_end|>\n<|im_start|>assistant\n",
            "\n<|im_start|>user\n{}\n<|im_end|>\n<|im_start|>assistant\n",
            "\n",
        ),
    ],
    ids=["a_space", "a_line"],
)
def test_a_row_has_each_turns_stop_once_where_the_template_puts_white_space_before_it(
    source: str, opens: str, goes_on: str, before_stop: str
) -> None:
    rng, tokenizer = random.Random(5), copy.deepcopy(tokenizer_of("chatml"))
    tokenizer.chat_template = source

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    conversation, row = Conversation(ChatTemplate(tokenizer)), tokens(opens.format("one"))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "one"}]
    for said, then in (("häufig so", "two"), (f" ja{before_stop}", "three"), ("", "four")):
        asked = conversation.prompt_for(messages)
        assert (asked.branch, asked.token_ids.tolist()) == (None, row)
        sampled = [*pieces(rng, tokenizer, said), *tokens("<|im_end|>")]
        conversation.add(asked, completion(sampled, rng), {"role": "assistant", "content": said})
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": then}]
        row = [*row, *sampled, *tokens(goes_on.format(then))]
    asked = conversation.prompt_for(messages)
    assert (asked.branch, asked.token_ids.tolist()) == (None, row)
    cut = tokens("nein")
    conversation.add(asked, completion(cut, rng, cut=True), {"role": "assistant", "content": "nein"})
    messages += [{"role": "assistant", "content": "nein"}, {"role": "user", "content": "five"}]
    whole = [*row, *cut, *tokens(f"{before_stop}<|im_end|>{goes_on.format('five')}")]
    assert conversation.prompt_for(messages).token_ids.tolist() == whole  # the template ends a turn that was cut


def test_a_turn_holds_no_history_again() -> None:
    rng, conversation, held = random.Random(4), opened("chatml"), list[int]()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1+1? " * 20_000}]
    tracemalloc.start()
    try:
        for _ in range(12):
            answered(conversation, conversation.prompt_for(messages), "2", rng)
            messages += [{"role": "assistant", "content": "2"}, {"role": "user", "content": "sure?"}]
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[-1] - held[1] < 100_000  # characters of the first message, with which every text and row begins
    older = conversation.prompt_for(messages[:7])  # whose turn a row has gone on from
    assert (older.branch, older.token_ids[-1]) == (None, conversation.prompt_for(messages).token_ids[-1])


@pytest.mark.parametrize("name", ["chatml", "qwen3_without_thinking", "llama3", "deepseek"])
def test_the_text_that_the_next_turn_must_extend_is_the_templates(name: str) -> None:
    template = ChatTemplate(tokenizer_of(name), options=FAMILIES[name].options)
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    _, before = template.begin(messages[:1], ())
    messages.append({"role": "user", "content": "sure?"})
    found = template.proceed(before, messages, (), tokenizer_of(name).convert_tokens_to_ids(FAMILIES[name].stop))
    assert not isinstance(found, str)
    assert found[1].text == template.render(messages, ())


def test_a_turn_that_was_cut_is_closed_by_the_template() -> None:
    rng, conversation, tokenizer = random.Random(4), opened("chatml"), tokenizer_of("chatml")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1+1?"}]
    asked = conversation.prompt_for(messages)
    cut = completion(tokenizer("It i", add_special_tokens=False)["input_ids"], rng, cut=True)
    turn = conversation.add(asked, cut, {"role": "assistant", "content": "It i"})
    messages += [{"role": "assistant", "content": "It i"}, {"role": "user", "content": "on"}]
    then = conversation.prompt_for(messages)
    assert turn is not None
    behind = "<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(then.token_ids[turn.stop :]) == behind


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty; send at least one"),
        (["hi"], "message 1 is 'hi'; it must be an object with a role"),
        ([{"role": "user", "text": "hi"}], r"message 1, of the role 'user', has no content, but \['role', 'text'\]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "message 1 has content .*must be a text, or a list"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "message 1 has the call .*must have function.name"),
        ([{"role": "tool", "content": "1"}], "chat template refuses these messages: .*no previous assistant message"),
    ],
)
def test_messages_that_cannot_be_a_prompt_are_refused(messages: list[Any], words: str) -> None:
    with pytest.raises(MessagesRefused, match=words):
        opened("gptoss").prompt_for(messages)


def test_no_turn_is_to_blame_where_a_template_refuses_messages_before_the_first() -> None:
    assert not opened("gptoss").cannot_show_turn([{"role": "tool", "content": "1"}])


def test_tokenizers_that_cannot_splice_are_refused() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(ConfigError, match="' \\\\n user: 1' of '\\\\n user: 1', so that what its template writes"):
        ChatTemplate(tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"has no chat template; give it one$"):
        ChatTemplate(tokenizer)


def test_routes_of_a_row_are_those_of_the_requests_that_computed_its_positions_first() -> None:
    conversation, rng = Conversation(PlainText(byte_tokenizer())), random.Random(6)

    def routed(tokens: bytes, start: int, expert: int) -> Completion:
        experts = np.full((start + len(tokens) - 1, 2, 1), expert, np.uint8)
        return replace(completion([*tokens], rng), routes=encode_routes(experts, num_experts=4))

    messages: list[dict[str, Any]] = [{"role": "user", "content": "ab"}]
    conversation.add(conversation.prompt_for(messages), routed(b"cd", 2, 1), {"role": "assistant", "content": "cd"})
    messages += [{"role": "assistant", "content": "cd"}, {"role": "user", "content": "e"}]
    asked = conversation.prompt_for(messages)
    conversation.add(asked, routed(b"fg", 5, 2), {"role": "assistant", "content": "fg"})
    (chain,) = conversation.chains()
    assert chain.routes is not None
    assert decode_routes(chain.routes)[:, 0, 0].tolist() == [1, 1, 1, 2, 2, 2]  # "d" is an input of the second alone
    conversation.add(asked, routed(b"fg", 4, 2), {"role": "assistant", "content": "fg"})
    with pytest.raises(DataError, match=r"shape \(5, 2, 1\), but its prompt and completion have 7 tokens"):
        conversation.chains()
