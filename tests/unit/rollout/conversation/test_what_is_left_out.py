"""Tools, calls and parts of contents that a template leaves out, depending on what is beside them, are refused."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rl_megatron.errors import DataError
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.rollout.conversation.chat import ChatTemplate
from rl_megatron.rollout.conversation.conversation import Conversation
from rl_megatron.rollout.conversation.forms import WrittenConversation
from rl_megatron.rollout.conversation.messages import MessagesRefused
from rl_megatron.rollout.conversation.probe import probe_template
from rl_megatron.rollout.conversation.templates import PlainText, Template
from rl_megatron.rollout.conversation.written import WrittenConversations, end_of_turns
from tests.unit.rollout.conversation.families import FAMILIES, TOOLS, completion, tokenizer_of

SYSTEM, ASKED = {"role": "system", "content": "Be."}, {"role": "user", "content": "1 + 16?"}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 17}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c", "name": "add", "content": "17"}
SAYS = {"role": "assistant", "content": "17"}
WITHOUT_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_template(name: str, template: str) -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(tokenizer_of(name))
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("shown", "bad", "good", "said"),
    [
        ("==", [ASKED], [SYSTEM, ASKED], "without a message of the system, so .* add: begin the conversation with"),
        ("!=", [SYSTEM, ASKED], [ASKED], "beside a message of the system, so .* add: leave that message out, give the"),
    ],
)
def test_tools_that_depend_on_a_message_of_the_system_are_refused_where_they_are_not_shown(
    shown: str, bad: list[dict[str, str]], good: list[dict[str, str]], said: str
) -> None:
    """Also after a conversation in which they were shown; the probe finds where they are."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        f"{{% if tools and messages[0].role {shown} 'system' %}}{{{{ tools | tojson }}}}{{% endif %}}"
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{{ 'a:' if add_generation_prompt }}"
    )
    template = ChatTemplate(tokenizer)
    for _ in range(2):
        assert "Adds." in template.render(good, TOOLS)
        with pytest.raises(MessagesRefused, match=f"chat template shows no tools {said}"):
            template.render(bad, TOOLS)
    report = probe_template(ChatTemplate(tokenizer), [tokenizer.eos_token_id])
    assert (report.shows_tools, report.with_system) == (True, shown == "==")
    assert ("beside a message of the system alone" in report.describe()) == (shown == "==")


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_that_an_environment_shows_as_an_example_are_in_the_prompt(name: str) -> None:
    tokenizer = tokenizer_of(name)
    asked = Conversation(ChatTemplate(tokenizer)).prompt_for([ASKED, CALLS, RESULT, SAYS, ASKED])
    assert '"a"' in (text := str(tokenizer.decode(asked.token_ids))) or "<arg_key>a" in text


@pytest.mark.parametrize(
    ("template", "call"),
    [
        (ChatTemplate(with_template("chatml", WITHOUT_CALLS)), CALLS),
        (ChatTemplate(tokenizer_of("gptoss")), {**CALLS, "tool_calls": [CALL, CALL]}),  # it writes the first alone
        (PlainText(tokenizer_of("chatml")), CALLS),
        (ChatTemplate(tokenizer_of("qwen3")), {**SAYS, "function_call": CALL["function"]}),
    ],
)
def test_calls_that_the_template_leaves_out_are_refused_but_for_sampled_ones(
    template: Template, call: dict[str, Any]
) -> None:
    """Of what was sampled the tokens are there, or were; only who asks can change the rest."""
    with pytest.raises(
        MessagesRefused, match=r"message 2: the model's chat template does not write its (call|tool|fu)"
    ):
        Conversation(template).prompt_for([ASKED, call, RESULT, SAYS, ASKED])
    talk = Conversation(template)
    talk.add(talk.prompt_for([ASKED]), completion([1, 2], random.Random(0)), call)
    assert talk.prompt_for([ASKED, call, RESULT, SAYS, ASKED]).branch == "edited"


def written(tokenizer: PreTrainedTokenizerFast, content: object) -> tuple[str, list[str]]:
    """The texts of the row that is learnt, and of the whole that is scored."""
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>" if "<|im_end|>" in tokenizer.get_vocab() else "<|user|>")
    talk = WrittenConversation(id="t:1", messages=[{"role": "user", "content": content}, SAYS], tools=())
    maker = WrittenConversations(tokenizer, [stop])
    ((row,),) = maker.rows_of([talk])
    return maker.whole(talk), [str(tokenizer.decode(row.token_ids))]


@pytest.mark.parametrize(
    ("name", "template", "is_joined"),
    [
        ("glm", None, True),  # it puts them one after the other
        ("chatml", None, False),  # it takes a text
        ("chatml", WITHOUT_CALLS, False),  # it would write Python's list
        ("chatml", WITHOUT_CALLS.replace("m.content", "m.content | map(attribute='text') | map('trim') | join"), False),
    ],
)
def test_texts_of_a_content_are_one_where_the_template_itself_makes_them_one(
    name: str, template: str | None, is_joined: bool
) -> None:
    """transformers' own rendering of the parts is what the template does with them."""
    tokenizer = with_template(name, template or str(tokenizer_of(name).chat_template))
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    if is_joined:
        assert written(tokenizer, parts) == written(tokenizer, "one two")
        messages = [{"role": "user", "content": parts}, SAYS]
        assert written(tokenizer, parts)[0] == tokenizer.apply_chat_template(messages, tokenize=False)
    else:
        for make in ("rows_of", "whole"):
            talk = WrittenConversation(id="t:1", messages=[{"role": "user", "content": parts}, SAYS], tools=())
            maker = WrittenConversations(tokenizer, [tokenizer.convert_tokens_to_ids("<|im_end|>")])
            with pytest.raises(DataError, match=r"prompt 't:1': message 1 has a content of several texts, which the"):
                getattr(maker, make)([talk] if make == "rows_of" else talk)
    if template is None:
        assert written(tokenizer, parts[:1]) == written(tokenizer, "one ")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": None}, r"of the role 'user', has no content, but \['role'\]; name"),
        ({"role": "user", "content": []}, r"of the role 'user', has no content"),
        ({**SAYS, "reasoning": "one", "thinking": "two"}, "has thinking under several of .*, which differ; keep one"),
        ({"role": "tool", "output": "17"}, r"of the role 'tool', has no content, but \['output', 'role'\]; name"),
        ({"role": "user", "content": [{"type": "image", "text": ""}]}, "content .*; it must be a text, or a list of"),
        ({**CALLS, "tool_calls": [{"function": {"name": "add", "parameters": {"a": 1}}}]}, "name arguments, not 'par"),
        ({**CALLS, "tool_calls": [{"function": {"name": "add", "arguments": [["a", 1]]}}]}, "must be an object, or"),
    ],
)
def test_what_would_be_an_empty_text_or_other_arguments_is_refused(message: dict[str, Any], said: str) -> None:
    talk = WrittenConversation(id="t:1", messages=[ASKED, message, SAYS], tools=())
    with pytest.raises(MessagesRefused, match=f"^message 2.*{said}"):
        talk.tidied()
    of_tool = {"role": "tool", "tool_call_id": "c", "name": "add"}
    returned = [{**of_tool, "content": nothing, "tool_calls": nothing} for nothing in (None, [])]
    for empty in ({"role": "tool", "content": ""}, {**CALLS, "content": None}, *returned):
        assert WrittenConversation(id="t:1", messages=[ASKED, empty, SAYS], tools=()).tidied()[1]["content"] == ""
    given = [{"arguments": arguments, "description": "Adds."} for arguments in ({}, [], "", "{}")]
    for nothing in ({}, {"arguments": None, "strict": None}, *given):
        calls = {**CALLS, "tool_calls": [{"function": {"name": "add", **nothing}}]}
        known = WrittenConversation(id="t:1", messages=[ASKED, calls, SAYS], tools=()).tidied()
        assert known[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {}}
    twice = {**SAYS, "thinking": "one", "reasoning_content": "one\n", "reasoning": ""}  # the same but for white space
    known = WrittenConversation(id="t:1", messages=[ASKED, twice, SAYS], tools=()).tidied()
    assert known[1] == {**SAYS, "reasoning_content": "one\n"}


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1'}}]}, "call of add are no object in JSON"),
        ({"tool_calls": [{"function": {"name": "add", "arguments": '"{}"'}}]}, "call of add are no object in JSON"),
        ({"content": "<think>\nSo.\n</think>\n\n17", "reasoning_content": "So."}, "has thinking twice, as reasoning"),
    ],
)
def test_a_turn_that_no_model_should_write_is_refused_and_is_context(turn: dict[str, Any], said: str) -> None:
    """As exports of cut answers, and of servers that left thinking in the content, have them."""
    tokenizer = tokenizer_of("qwen3")
    maker = WrittenConversations(tokenizer, [tokenizer.convert_tokens_to_ids("<|im_end|>")])

    def made(weight: int) -> int:
        messages = [ASKED, {"role": "assistant", "weight": weight, **turn}, ASKED, SAYS]
        ((row,),) = maker.rows_of([WrittenConversation(id="t:1", messages=messages, tools=())])
        return len(row.turns)

    assert made(0) == 1
    with pytest.raises(DataError, match=f"^prompt 't:1': message 2.*{said}"):
        made(1)


def test_the_end_of_turns_is_the_templates_of_several_tokens_that_end_sampling() -> None:
    """Llama 3's <|eot_id|> and GLM's <|user|>, not the token that ends a text; none where a turn's end is not known."""
    for name, end in (("llama3", "<|eot_id|>"), ("glm", "<|user|>"), ("chatml", "<|im_end|>"), ("deepseek", None)):
        tokenizer = tokenizer_of(name)
        first, last = tokenizer.bos_token_id, tokenizer.convert_tokens_to_ids(FAMILIES[name].stop)
        found = end_of_turns(tokenizer, [0, first, last])
        assert (None if found is None else tokenizer.decode([found])) == end
        assert end_of_turns(tokenizer, [0]) is None


def test_a_turn_ends_with_the_first_token_that_ends_sampling() -> None:
    """A template may write the end of a text behind the last turn's end."""
    last = WITHOUT_CALLS.replace("<|im_end|>\n", "<|im_end|>\n{{ '<think>' if loop.last and m.role == 'assistant' }}")
    tokenizer = with_template("chatml", last)
    stops = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<think>"])
    talk = json.loads(json.dumps([ASKED, SAYS]))
    ((row,),) = WrittenConversations(tokenizer, stops).rows_of([WrittenConversation(id="t", messages=talk, tools=())])
    assert [tokenizer.decode(row.token_ids[start:stop]) for start, stop in row.turns] == ["17<|im_end|>"]
    assert len(row.token_ids) == row.turns[-1][1]
