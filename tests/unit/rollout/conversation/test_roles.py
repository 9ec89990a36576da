"""Messages and tools that a family's template passes over are refused, and a developer's are the system's."""

from __future__ import annotations

import copy

import pytest

from rl_megatron.errors import ConfigError
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.rollout.conversation.chat import ChatTemplate
from rl_megatron.rollout.conversation.messages import ChatMessage, MessagesRefused
from rl_megatron.rollout.conversation.templates import PlainText, Tools
from tests.unit.rollout.conversation.families import FAMILIES, TOOLS, tokenizer_of

ASKED = {"role": "user", "content": "hi"}
SAID = [ASKED, {"role": "assistant", "content": "ok"}]


def of(role: str, content: str = "RESULT 42") -> ChatMessage:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("family", "roles"),
    [
        ("qwen3", ("function", "observation", "ipython")),
        ("glm", ("function", "ipython")),
        ("deepseek", ("function", "observation", "ipython")),
        ("gptoss", ("function", "observation", "ipython")),
    ],
)
def test_a_message_that_a_template_passes_over_is_refused_by_its_place(family: str, roles: tuple[str, ...]) -> None:
    template = ChatTemplate(tokenizer_of(family))
    for role in roles:
        with pytest.raises(MessagesRefused, match=rf"passes over message 3, of the role '{role}', which would be lost"):
            template.begin([*SAID, of(role)], ())
        template.render([*SAID, of(role, "")], ())  # nothing is lost
    assert "RESULT 42" in template.render([*SAID, of("user")], ())


def test_a_template_that_shows_every_role_refuses_none() -> None:
    for role in ("function", "ipython", "developer"):
        assert "RESULT 42" in ChatTemplate(tokenizer_of("llama3")).render([*SAID, of(role)], ())


@pytest.mark.parametrize("family", ["qwen3", "glm", "deepseek"])
def test_a_developer_is_the_system_where_that_is_shown_alone(family: str) -> None:
    template = ChatTemplate(tokenizer_of(family))
    by = [template.render([of(role), *SAID, ASKED], ()) for role in ("developer", "system", "developer")]
    assert by[0] == by[1] == by[2]
    assert "RESULT 42" in by[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_tools_are_refused_where_the_template_does_not_show_them(family: str) -> None:
    """DeepSeek-V3's writes calls and their results, and no tools. A user's text with a tool's name shows none."""
    template = ChatTemplate(tokenizer_of(family))
    asked = of("user", "add by the tool add")
    if FAMILIES[family].tools:
        for _ in range(2):
            assert "Adds." in template.render([asked], TOOLS)
        assert "Adds." not in template.render([asked], ())
    else:
        for tools, names in ((TOOLS, "add"), ([*TOOLS, *TOOLS, *TOOLS], "add and 2 more")):
            with pytest.raises(MessagesRefused, match=f"shows no tools, so the model would not know of {names}: give"):
                template.begin([asked], tools)
        assert "add by" in template.render([asked], ())


@pytest.mark.parametrize(
    ("tools", "shown"),
    [
        ([{"name": "add", "description": "Adds."}], "Adds."),  # as some data sets have them
        ([{"type": "function", "function": {}}], None),
        ([{"type": "web_search"}], None),
        (["add"], None),
    ],
)
def test_a_tool_without_a_name_is_refused(tools: Tools, shown: str | None) -> None:
    template = ChatTemplate(tokenizer_of("qwen3"))
    if shown:
        assert shown in template.render([ASKED], tools)
    else:
        with pytest.raises(MessagesRefused, match=r"tool 1 is .*; it must be an object with function\.name"):
            template.render([ASKED], tools)


def test_of_several_templates_by_name_it_is_the_one_that_transformers_picks() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    with_tools = str(tokenizer.chat_template)
    tokenizer.chat_template = {"default": "{% for m in messages %}{{ m.content }};{% endfor %}", "tool_use": with_tools}
    for tools in ((), TOOLS):
        oracle = tokenizer.apply_chat_template(SAID, tools=tools or None, tokenize=False, add_generation_prompt=True)
        assert ChatTemplate(tokenizer).render(SAID, tools) == oracle
    del tokenizer.chat_template["default"]
    with pytest.raises(ConfigError, match=r"has the chat templates tool_use, of which none is called default; give"):
        ChatTemplate(tokenizer)


def test_plain_texts_show_no_tools_at_any_turn() -> None:
    template = PlainText(byte_tokenizer())
    _, before = template.begin([ASKED], ())
    for shown in (
        lambda: template.begin([ASKED], TOOLS),
        lambda: template.proceed(before, [*SAID, ASKED], TOOLS, None),
        lambda: template.shows_alike(SAID, SAID, TOOLS),
    ):
        with pytest.raises(MessagesRefused, match=r"environment.template=plain shows no tools.*set environment"):
            shown()
