"""Tools, calls and parts of contents that a template leaves out, depending on what is beside them, are refused."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.rollout.conversation.chat import ChatTemplate
from rl_megatron.rollout.conversation.conversation import Conversation
from rl_megatron.rollout.conversation.messages import MessagesRefused
from rl_megatron.rollout.conversation.probe import probe_template
from rl_megatron.rollout.conversation.templates import PlainText, Template
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
        (
            "==",
            [ASKED],
            [SYSTEM, ASKED],
            "without a message of the system, so .* add: begin the conversation with",
        ),
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
