"""Sampled tokens stay as they are through every kind of history, and written conversations are rows to learn."""

from __future__ import annotations

import copy
import json
import random
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import chat_template_utils

from rl_megatron.agents.conversation.conversation import Conversation, TokenRows, TurnPrompt
from rl_megatron.agents.conversation.forms import TrainingConversation, check_turns
from rl_megatron.agents.conversation.messages import UnsupportedMessages, normalize_messages
from rl_megatron.agents.conversation.templates import PlainText
from rl_megatron.agents.conversation.written import _BACK, _FRONT, ChatTemplate, ConversationRows
from rl_megatron.data.samples import SupervisedRow, supervised_samples, to_samples
from rl_megatron.engines.local.engine import LocalEngine
from rl_megatron.errors import ConfigError, DataError, EngineError
from rl_megatron.models.tiny import TinySizes, byte_tokenizer, make_tiny_model
from rl_megatron.types import (
    Completion,
    GenerationRequest,
    Prompt,
    RolloutGroup,
    SamplingParams,
    TokenSequence,
    Trajectory,
    Turn,
)
from rl_megatron.weights.layouts.families import read_shape
from tests.unit.rollout.conversation.families import (
    FAMILIES,
    TOOLS,
    Reply,
    completion,
    completion_of,
    message_of,
    pieces,
    tokenizer_of,
    written,
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
    assert (turn.start, turn.stop, turn.text) == (6, 13, "?37*45")
    messages = [{"role": "user", "content": "37*45="}, {"role": "assistant", "content": "?37*45"}]
    messages.append({"role": "tool", "content": ":1665"})
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
def test_a_row_begins_where_the_context_changes(name: str, replies: list[Reply], branches: list[str | None]) -> None:
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
def test_each_turns_stop_is_once_behind_white_space(source: str, opens: str, goes_on: str, before_stop: str) -> None:
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


def test_the_template_ends_a_turn_that_a_text_ended() -> None:
    rng, tokenizer = random.Random(5), tokenizer_of("chatml")
    ends = tokenizer.convert_tokens_to_ids("<|im_end|>")
    conversation = Conversation(ChatTemplate(tokenizer), (ends,))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "one"}]
    asked = conversation.prompt_for(messages)
    sampled = list(tokenizer("<go>", add_special_tokens=False)["input_ids"])
    conversation.add(asked, completion(sampled, rng), {"role": "assistant", "content": "<go>"})
    messages += [{"role": "assistant", "content": "<go>"}, {"role": "user", "content": "two"}]
    after = conversation.prompt_for(messages)
    row = [*asked.token_ids.tolist(), *sampled, ends]
    assert (after.branch, after.token_ids[: len(row)].tolist()) == (None, row)


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
    found = template.extend(before, messages, (), tokenizer_of(name).convert_tokens_to_ids(FAMILIES[name].stop))
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
        ([{"role": "assistant", "tool_calls": 0.5}], "message 1 has the tool_calls 0.5; it must be a list of calls"),
        ([{"role": "tool", "content": "1"}], "chat template refuses these messages: .*no previous assistant message"),
    ],
)
def test_messages_that_cannot_be_a_prompt_are_refused(messages: list[Any], words: str) -> None:
    with pytest.raises(UnsupportedMessages, match=words):
        opened("gptoss").prompt_for(messages)


def test_no_turn_is_to_blame_where_a_template_refuses_messages_before_the_first() -> None:
    assert not opened("gptoss").cannot_show_turn([{"role": "tool", "content": "1"}])


def test_tokenizers_that_cannot_splice_are_refused() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(ConfigError, match="' \\\\n user: 1' of '\\\\n user: 1', so the text that its template writes"):
        ChatTemplate(tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"has no chat template; give it one$"):
        ChatTemplate(tokenizer)


def numbered(positions: int, request: int) -> np.ndarray:
    """Routes of one layer that say the request and the position."""
    return (10 * request + np.arange(positions, dtype=np.uint8)).reshape(-1, 1, 1)


def test_routes_of_a_row_are_those_of_the_requests_that_computed_its_positions_first() -> None:
    conversation, rng = Conversation(PlainText(byte_tokenizer())), random.Random(6)

    def routed(tokens: bytes, start: int, expert: int) -> Completion:
        experts = numbered(start + len(tokens) - 1, expert)
        return replace(completion([*tokens], rng), columns={"routes": experts})

    messages: list[dict[str, Any]] = [{"role": "user", "content": "ab"}]
    conversation.add(conversation.prompt_for(messages), routed(b"cd", 2, 1), {"role": "assistant", "content": "cd"})
    messages += [{"role": "assistant", "content": "cd"}, {"role": "user", "content": "e"}]
    asked = conversation.prompt_for(messages)
    conversation.add(asked, routed(b"fg", 5, 2), {"role": "assistant", "content": "fg"})
    (chain,) = conversation.chains()
    assert chain.columns["routes"].ravel().tolist() == [10, 11, 12, 23, 24, 25]  # "d" is an input of the second alone
    edited = conversation.prompt_for([messages[0], {"role": "assistant", "content": "x"}, messages[2]])
    conversation.add(edited, routed(b"h", 4, 3), {"role": "assistant", "content": "h"})
    branch, again = conversation.chains()[::-1]  # a branch has those of its own request alone
    assert again.columns["routes"].ravel().tolist() == [10, 11, 12, 23, 24, 25]
    assert branch.columns["routes"].ravel().tolist() == [30, 31, 32, 33]
    with pytest.raises(EngineError, match="routes have 5 entries, but its prompt and completion have 7 tokens"):
        conversation.add(asked, routed(b"fg", 4, 2), {"role": "assistant", "content": "fg"})


def test_rows_of_tokens_have_the_routes_of_their_requests() -> None:
    rows, rng = TokenRows(), random.Random(6)
    for prompt, tokens, expert in ((b"ab", b"cd", 1), (b"abcde", b"fg", 2), (b"ax", b"y", 3)):
        experts = numbered(len(prompt) + len(tokens) - 1, expert)
        rows.add(np.array([*prompt], np.int32), replace(completion([*tokens], rng), columns={"routes": experts}), "")
    found = [row.columns["routes"].ravel().tolist() for row in rows.chains()]
    assert found == [[10, 11, 12, 23, 24, 25], [30, 31]]


# The rows of a conversation with a real engine, scored again by transformers' forward.
def rescored(model: Any, chains: tuple[TokenSequence, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The engine's log-probs of all masked-in targets, and the model's."""
    prompt = Prompt(id="p", text="", token_ids=(1,), answer="")
    samples = to_samples([RolloutGroup(prompt=prompt, trajectories=(Trajectory(chains=chains, reward=0.0),))])
    parts = []
    for first, stop in zip(samples.cu_seqlens.tolist(), samples.cu_seqlens.tolist()[1:], strict=False):
        with torch.no_grad():
            logits = model(samples.input_ids[None, first:stop]).logits[0]
        parts.append(logits.log_softmax(-1).gather(1, samples.targets[first:stop, None])[:, 0])
    return samples.rollout_logprobs[samples.mask], torch.cat(parts)[samples.mask]


def differing_routes(model: Any, chains: Sequence[TokenSequence]) -> tuple[float, float]:
    """The largest share of positions with other experts than in the model's one pass, and the smallest share if each
    row's routes are those of the position before."""
    found = []
    for chain in chains:
        with torch.no_grad():
            said = model(torch.tensor(chain.token_ids[None, :-1], dtype=torch.int64), output_router_logits=True)
        ours = torch.tensor(chain.columns["routes"]).sort(-1).values
        theirs = torch.stack([x.topk(ours.shape[-1]).indices.sort(-1).values for x in said.router_logits], 1)
        assert ours.shape == theirs.shape
        found.append([float((one != theirs).flatten(1).any(1).double().mean()) for one in (ours, ours.roll(1, 0))])
    exact, shifted = zip(*found, strict=True)
    return max(exact), min(shifted)


@pytest.mark.parametrize("kind", ["plain", "chat"])
def test_a_forward_of_the_rows_gives_the_engines_logprobs_and_routes(kind: str, tmp_path: Path) -> None:
    folder = make_tiny_model(TinySizes(), tmp_path, seed=3)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    engine = LocalEngine(read_shape(folder), slots=4, dtype=torch.float32, device="cpu", max_length=256)
    checkpoint = load_file(folder / "model.safetensors")
    for name, tensor in engine.tensors.items():
        tensor.copy_(checkpoint[name])
    conversation = Conversation(PlainText(tokenizer) if kind == "plain" else ChatTemplate(tokenizer))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "37*45="}]
    stop_token_ids = (tokenizer.eos_token_id, *b" etaoin")
    params = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=12, stop_token_ids=stop_token_ids, seed=0)
    for number in range(5):
        asked = conversation.prompt_for(messages)
        request = GenerationRequest(
            id=str(number),
            token_ids=tuple(asked.token_ids.tolist()),
            num_completions=1,
            params=replace(params, seed=number),
            columns=("routes",),
        )
        ((completion,),) = engine.generate([request])
        said = {"role": "assistant", "content": tokenizer.decode(completion.token_ids, skip_special_tokens=True)}
        conversation.add(asked, completion, said)
        messages += [said, {"role": "tool", "content": f":{number} 日"}]
        if number == 2:
            messages = [{"role": "user", "content": "again: 37*45="}]
    chains = conversation.chains()
    assert [len(chain.turns) for chain in chains] == [3, 2]
    theirs, ours = rescored(model, chains)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)
    shifted = tuple(replace(c, turns=tuple(replace(t, start=t.start - 1) for t in c.turns)) for c in chains)
    theirs, ours = rescored(model, shifted)
    assert (theirs - ours).abs().max() > 0.1
    exact, misaligned = differing_routes(model, chains)
    assert exact == 0
    assert misaligned > 0.5


# Written conversations as rows to learn, over the templates that seven families publish.
WITH_CALL = Reply(reasoning="I call.", calls=[{"a": 17}])
SAYS_SO = Reply(reasoning="So it is.", content="It is 17.")
MORE = Reply(content="No: 日本 18.")
MORE_TURNS = [{"role": "assistant", "content": "Yes."}]
ADDS = {"type": "function", "function": {"name": "add", "arguments": '{"a": 17}'}}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}@<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLED = "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
SHORT = {"plain": CHATML.replace("@", ""), "names": CHATML.replace("@", CALLED)}
NAMES = ["qwen3", "chatml", "llama3", "glm", "gptoss"]


def asked(name: str) -> list[dict[str, Any]]:
    """A call, its answer, two turns, with the last turn of each user's question."""
    return [
        {"role": "system", "content": "You add."},
        {"role": "user", "content": "1 + 16?"},
        message_of(name, WITH_CALL),
        {"role": "tool", "content": "17", "tool_call_id": "call_0", "name": "add"},
        message_of(name, SAYS_SO),
        {"role": "user", "content": "Sure?"},
        message_of(name, MORE),
    ]


def stops(name: str) -> list[int]:
    family = FAMILIES[name]
    return [tokenizer_of(name).convert_tokens_to_ids(stop) for stop in {family.stop, family.stop_of_calls}]


def rows_of(name: str, messages: list[dict[str, Any]], tools: object = ()) -> list[SupervisedRow]:
    prompt = Prompt(id="chats:1", text=json.dumps({"messages": messages, "tools": tools}), token_ids=(), answer="")
    return ConversationRows(tokenizer_of(name), stops(name)).rows([prompt])


def decoded(name: str, tokens: Any) -> str:
    return str(tokenizer_of(name).decode(tokens, skip_special_tokens=False))


@pytest.mark.parametrize(
    ("name", "turn", "said"),
    [
        ("chatml", {"content": "2", "reasoning_content": "One and one."}, "does not write its reasoning, so a model"),
        ("llama3", {"content": "2", "reasoning_content": "One and one."}, "does not write its reasoning, so a model"),
        (
            "qwen3",
            {"content": None, "function_call": {"name": "add"}},
            "does not write its function_call, which tool_calls has replaced,",
        ),
        ("llama3", {"content": "SAID", "tool_calls": [ADDS]}, "does not write its content, so a model"),
        ("gptoss", {"content": None, "tool_calls": [ADDS, ADDS]}, "does not write its call of add, so a model"),
        ("glm", {"content": None, "refusal": "SAID"}, "does not write its refusal, so a model"),
        ("names", {"content": None, "tool_calls": [ADDS]}, "does not write its call of add, so a model"),
        ("qwen3", {"text": "SAID"}, "has neither content nor tool_calls, so a model would learn to say nothing"),
        ("plain", {"content": None, "tool_calls": [{"function": {"name": "add"}}]}, "does not write its call of add"),
    ],
)
def test_a_hidden_turn_is_refused(name: str, turn: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture) -> None:
    """As context it is taken, with one warning for all rows, but for thinking and for what says nothing."""
    family = "chatml" if name in SHORT else name
    tokenizer = copy.deepcopy(tokenizer_of(family))
    if name in SHORT:
        tokenizer.chat_template = SHORT[name]
    rows = ConversationRows(tokenizer, stops(family))
    asks = {"role": "user", "content": "1+1?"}
    for weight in (1, 0, 0):
        written = [asks, {"role": "assistant", "weight": weight} | turn, asks, *MORE_TURNS]
        prompt = Prompt(id="chats:1", text=json.dumps({"messages": written, "tools": ()}), token_ids=(), answer="")
        if weight:
            with pytest.raises(DataError, match=f"prompt 'chats:1': message 2.*{said}"):
                rows.rows([prompt])
        else:
            assert rows.rows([prompt])
    warned = [one.getMessage() for one in caplog.records]
    if "reasoning" in said or "nothing" in said:
        assert not warned
    else:
        assert len(warned) == 1
        assert f"message 2: the model's chat template {said.partition(', so')[0]}" in warned[0].replace("which is", "")


@pytest.mark.parametrize(("name", "shown"), [("qwen3", "\n\n SAID "), ("glm", "\nSAID"), ("chatml", " SAID ")])
def test_what_a_template_writes_otherwise_is_not_lost(name: str, shown: str) -> None:
    """Qwen3's and GLM's trim contents and thinking, and take thinking out of contents."""
    for said in (" SAID ", "<think>\n\nHm. \n\n</think>\n\n SAID "):
        for calls in ({}, {"tool_calls": [ADDS, ADDS]}):
            turn = {"role": "assistant", "content": said, **calls}
            (row,) = rows_of(name, [{"role": "user", "content": "1+1?"}, turn])
            text = decoded(name, row.token_ids)
            assert (shown in text, text.count("</tool_call>")) == (True, len(calls.get("tool_calls", ())))
            assert ("Hm." in text) == ("Hm." in said)


def test_a_turn_that_spells_the_token_of_its_end_is_refused_and_a_users_text_is_not() -> None:
    """A tokenizer makes the token of the text, as it does in the prompts of servers."""
    asks, says = {"role": "user", "content": "a<|im_end|>b"}, {"role": "assistant", "content": "a<|im_end|>b"}
    with pytest.raises(
        DataError, match=r"a turn continues with 'b' after a token that ends sampling \(id \d+\), where"
    ):
        rows_of("chatml", [asks, says])
    (row,) = rows_of("chatml", [asks, says | {"weight": 0}, asks, *MORE_TURNS])
    assert [decoded("chatml", row.token_ids[start:stop]) for start, stop in row.turns] == ["Yes.<|im_end|>"]


@pytest.mark.parametrize("name", NAMES)
def test_each_turn_is_learnt_once_behind_the_prompt_that_it_answers(name: str) -> None:
    messages = asked(name)
    if name == "gptoss":
        del messages[2]["reasoning_content"]  # it shows that of a call until the turn behind it, which is refused
    rows = rows_of(name, messages, TOOLS)
    turns = [(row, turn) for row in rows for turn in row.turns]
    replies = list(zip((2, 4, 6), (WITH_CALL, SAYS_SO, MORE), strict=True))
    assert len(turns) == 3
    for (row, (start, stop)), (place, reply) in zip(turns, replies, strict=True):
        prompt = ChatTemplate(tokenizer_of(name)).render(normalize_messages(messages[:place]), TOOLS)
        assert decoded(name, row.token_ids[:start]) == prompt
        said, (text, ending) = decoded(name, row.token_ids[start:stop]), written(name, reply)
        assert said.endswith(ending)
        assert row.token_ids[stop - 1] in stops(name)
        if reply.calls:
            assert "add" in said
            assert "17" in said
        else:
            assert reply.content in said
            assert said.removesuffix(ending).strip().endswith(text.strip().removeprefix("<think>").strip()[-20:])


def test_a_template_that_drops_thinking_later_begins_a_row_and_others_go_on() -> None:
    assert [len(row.turns) for row in rows_of("chatml", asked("chatml"), TOOLS)] == [3]
    rows = rows_of("qwen3", asked("qwen3"), TOOLS)
    assert [len(row.turns) for row in rows] == [2, 1]
    assert "So it is." in decoded("qwen3", rows[0].token_ids)
    assert "So it is." not in decoded("qwen3", rows[1].token_ids)


def test_the_mask_is_of_the_turns_and_their_ends_alone() -> None:
    (row,) = rows_of("chatml", [*asked("chatml")[:2], {"role": "assistant", "content": "17"}])
    samples = supervised_samples([row])
    trained = samples.targets[samples.mask].tolist()
    assert decoded("chatml", trained) == "17<|im_end|>"
    assert samples.advantages.tolist() == samples.mask.float().tolist()
    assert row.token_ids[-1] == trained[-1]  # nothing behind the last turn


def test_a_date_that_a_template_writes_is_the_same_in_all_rows_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss writes the current date, and a day passes at each look at the clock."""
    days = (datetime(2026, 1, 1) + timedelta(days=day) for day in count())
    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: next(days)))
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    text = json.dumps({"messages": said, "tools": []})
    made = ConversationRows(tokenizer_of("gptoss"), stops("gptoss"))
    first, again = (made.rows([Prompt(id="chats:1", text=text, token_ids=(), answer="")]) for _ in range(2))
    assert [row.token_ids.tolist() for row in first] == [row.token_ids.tolist() for row in again]
    assert f"Current date: {datetime.now():%Y-%m}" in decoded("gptoss", first[0].token_ids)


@pytest.mark.parametrize(
    ("mark", "no", "yes"),
    [
        ("weight", 0, 1),
        *((mark, False, True) for mark in ("train", "training", "train_on_turn", "loss", "trainable")),
        ("train", 0.0, None),
    ],
)
def test_turns_that_are_marked_as_not_learnt_are_context(mark: str, no: object, yes: object) -> None:
    messages = asked("chatml")
    messages[1][mark], messages[2][mark], messages[4][mark] = "the user's", no, yes
    shown = TrainingConversation(id="chats:1", messages=messages, tools=()).tidied()
    assert mark not in set().union(*shown)  # no template sees it
    (row,) = rows_of("chatml", messages, TOOLS)
    learned = [decoded("chatml", row.token_ids[start:stop]) for start, stop in row.turns]
    assert learned == ["It is 17.<|im_end|>", "No: 日本 18.<|im_end|>"]
    assert "tool_call" in decoded("chatml", row.token_ids)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "assistant", "content": "Hi."}], "message 1 is the assistant's, which answers nobody"),
        ([{"role": "user", "content": 3}], "message 1 has content 3"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 2}], "weight=2; it must"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "train": "no"}],
            "message 2: train='no'; it must be 0 or 1, or false or true",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "train": False, "weight": 1}],
            "message 2: weight=1, train=False say different things; keep one of them",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "train_detail": []}],
            r"message 2: train_detail=\[\] names parts of it",
        ),
        ([{"content": "a"}], "message 1 is .*it must be an object with a role"),
        *(
            ([{"role": "user", "content": "a"}, {"role": "assistant", **one}, *MORE_TURNS], "message 2 has neither")
            for one in (
                *({"content": text} for text in ("", " \n", None, [], [{"type": "text", "text": " "}])),
                {"content": "", "tool_calls": [], "reasoning_content": "\n", "refusal": " ", "function_call": {}},
            )
        ),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "message 1 has content .*a list of texts"),
    ],
)
def test_messages_that_cannot_be_rows_are_refused_by_name(messages: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        rows_of("chatml", messages)
    assert str(caught.value).startswith("prompt 'chats:1': ")
    good, bad = (
        Prompt(id=name, text=json.dumps({"messages": one, "tools": []}), token_ids=(), answer="")
        for name, one in (("chats:2", asked("chatml")), ("chats:1", messages))
    )
    check_turns([good])
    with pytest.raises(DataError) as before_the_first_step:
        check_turns([bad, good, bad])
    assert str(before_the_first_step.value).splitlines() == [str(caught.value)] * 2


def test_a_turn_whose_end_no_token_marks_is_refused() -> None:
    with pytest.raises(DataError, match=r"no token ends sampling .ids \[5\].*eos_token_id in generation_config.json"):
        ConversationRows(tokenizer_of("chatml"), [5]).rows(
            [Prompt(id="chats:1", text=json.dumps({"messages": asked("chatml"), "tools": []}), token_ids=(), answer="")]
        )


def test_a_first_turn_with_nothing_before_it_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.split_special_tokens = False
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ '<eos>' if m.role == 'assistant' }}{% endfor %}"
    made = ConversationRows(tokenizer, [tokenizer.eos_token_id])

    def rows(question: str) -> list[SupervisedRow]:
        talk = [{"role": "user", "content": question}, {"role": "assistant", "content": "b"}]
        text = json.dumps({"messages": talk, "tools": []})
        return made.rows([Prompt(id="chats:1", text=text, token_ids=(), answer="")])

    assert rows("a")[0].turns == ((1, 3),)
    with pytest.raises(DataError, match=r"^prompt 'chats:1': the chat template writes nothing before its first turn"):
        rows("")


def test_a_prompt_that_the_template_opens_otherwise_than_it_shows_the_turn_is_refused() -> None:
    tokenizer = tokenizer_of("chatml")
    before, tokenizer.chat_template = (
        tokenizer.chat_template,
        (
            "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}assistant:<think>{% endif %}"
        ),
    )
    try:
        with pytest.raises(DataError, match=r"message 2: the chat template's prompt for it has '<think>' where"):
            rows_of("chatml", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    finally:
        tokenizer.chat_template = before


@pytest.mark.parametrize(("name", "message"), [("deepseek", 3), ("gptoss", 5)])
def test_templates_that_show_no_turn_behind_its_own_prompt_are_refused(name: str, message: int) -> None:
    """DeepSeek-R1's opens a turn with <think> and never shows it; gpt-oss drops a call's thinking at the next turn."""
    with pytest.raises(DataError, match=f"message {message}: the chat template's prompt for it has "):
        rows_of(name, asked(name), FAMILIES[name].tools)


def test_many_conversations_are_encoded_as_each_alone() -> None:
    maker = ConversationRows(tokenizer_of("qwen3"), stops("qwen3"))
    texts = [json.dumps({"messages": asked("qwen3")[: 3 + 2 * k], "tools": TOOLS}) for k in range(3)]
    prompts = [Prompt(id=f"c:{k}", text=text, token_ids=(), answer="") for k, text in enumerate(texts)]
    together, alone = maker.rows(prompts), [row for one in prompts for row in maker.rows([one])]
    assert [(row.id, row.turns) for row in together] == [(row.id, row.turns) for row in alone]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
