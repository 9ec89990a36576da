"""What templates render, what they leave out or pass over, and what the probe says of them."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from rl_megatron.agents.conversation.conversation import Conversation
from rl_megatron.agents.conversation.forms import TrainingConversation
from rl_megatron.agents.conversation.messages import ChatMessage, UnsupportedMessages, arguments_json
from rl_megatron.agents.conversation.probe import TemplateReport, probe_template
from rl_megatron.agents.conversation.templates import PlainText, Template, Tools
from rl_megatron.agents.conversation.written import ChatTemplate, ConversationRows, end_of_turns
from rl_megatron.chat_templates import _compiled
from rl_megatron.errors import ConfigError, DataError
from rl_megatron.models.tiny import byte_tokenizer
from tests.unit.rollout.conversation.families import FAMILIES, TOOLS, completion, tokenizer_of

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "items": ["ü"]}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "naïve 1+1?", "items": "a key that is a method of dicts", "weight": 0},
    {"role": "assistant", "content": "", "reasoning_content": "Hm.", "thinking": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "name": "add", "content": "2"},
    {"role": "assistant", "content": "<think>So.</think> 2 "},
    {"role": "user", "content": "Sure?"},
]


def outcome(rendering: Any) -> str:
    """The text, or the kind of what it raises."""
    try:
        return str(rendering())
    except (TemplateError, TypeError, ValueError, AttributeError) as error:
        return type(error).__name__


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_rendered_as_transformers_does(name: str) -> None:
    tokenizer, options, tools = tokenizer_of(name), FAMILIES[name].options, FAMILIES[name].tools
    template = ChatTemplate(tokenizer, options=options)
    for many in range(2, len(MESSAGES) + 1):
        for opened in (False, True):
            shown = MESSAGES[:many]
            if name == "deepseek":  # its template joins arguments to a text
                shown = [arguments_json(message) for message in shown]
            wanted = tokenizer.apply_chat_template(
                shown, tools=tools, tokenize=False, add_generation_prompt=opened, **options
            )
            assert template.render(MESSAGES[:many], tools, opened=opened) == wanted


LOOP = "{{% for one in messages %}}{}{{% endfor %}}"


@pytest.mark.parametrize(
    "source",
    [
        LOOP.format("{{ one.items }}{{ one['items'] }}{{ one.weight }}{{ one.no }}{{ one['no'] }}"),
        LOOP.format("{{ one.content.upper() }}{{ loop.index0 }}{{ loop.cycle('a', 'b') }}"),
        LOOP.format("{% if loop.last %}{% break %}{% endif %}{% generation %}{{ one.role }}{% endgeneration %}"),
        "  {% set seen = namespace(n=0) %}\n" + LOOP.format("  {% set seen.n = seen.n + 1 %}\n  ") + "{{ seen.n }}",
        "{{ messages[2].tool_calls | tojson(indent=1) }}{{ strftime_now('%Y') }}{{ documents is none }}",
        "{% for key, value in messages[2].tool_calls[0].function.arguments.items() %}{{ key }}{{ value }}{% endfor %}",
        "{{ messages[0].get('content') }}{{ messages[0].content.format('') }}{{ '{0[role]}'.format(messages[0]) }}",
        "{{ raise_exception('no') }}",
        "{{ no.one }}",
        "{{ namespace(append=1).append }}{{ messages.append(1) }}",  # one name is safe of one type alone
        *(
            f"{{% for _ in range(2) %}}{{{{ {reached} }}}}{{% endfor %}}"  # what is refused once is refused again
            for reached in (
                *("messages.append(1)", "messages[0].update(role=1)", "messages[0].clear()"),
                *("messages[0].__class__", "messages[0]['__class__']", "messages.__class__.__mro__"),
                *("''['__class__']", "'{0.__class__}'.format(messages)", "loop.__init__.__globals__"),
                *("loop.__doc__", "namespace(one=1).__doc__"),
                *("raise_exception.__globals__", "raise_exception['__code__']"),
            )
        ),
    ],
)
def test_a_template_may_do_what_it_may_in_transformers(source: str) -> None:
    messages = copy.deepcopy(MESSAGES)
    shown = outcome(lambda: _compiled(source).render(messages=messages, documents=None, add_generation_prompt=True))
    wanted = outcome(lambda: render_jinja_template([messages], chat_template=source, add_generation_prompt=True)[0][0])
    assert shown == wanted
    assert messages == MESSAGES


def test_a_template_that_is_no_jinja_is_refused_with_its_line() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    tokenizer.chat_template = "{{ bos_token }}\n{% for one in messages %}{{ one.content }}"
    with pytest.raises(ConfigError, match=r"line 2 of the model's chat template is no Jinja: .*repair it$"):
        ChatTemplate(tokenizer)


# What the probe says of the families' templates, and of one that shows the number of messages.
def probed(name: str) -> TemplateReport:
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    stops = [tokenizer.convert_tokens_to_ids(stop) for stop in {family.stop, family.stop_of_calls}]
    return probe_template(ChatTemplate(tokenizer, options=family.options), stops)


@pytest.mark.parametrize(
    ("name", "habit", "rows"),
    [
        ("qwen3", "drops thinking at user turns", 10 / 8),  # of eight conversations one has three rows
        ("glm", "drops thinking at user turns", 10 / 8),
        ("chatml", "drops thinking at every turn", 12 / 8),  # it has no place for reasoning
        ("deepseek", "drops thinking at every turn", 12 / 8),
        ("gptoss", "rewrites", 13 / 8),  # and ends answers with <|end|>, where <|return|> is sampled
    ],
)
def test_it_names_what_families_do_and_what_it_costs(name: str, habit: str, rows: float) -> None:
    found = probed(name)
    assert (found.habit, found.rows, found.refusals) == (habit, rows, {})
    assert found.shows_tools == (name != "deepseek")
    assert ("it shows no tools" in found.describe()) == (name == "deepseek")


def test_a_template_that_shows_the_number_of_messages_makes_every_turn_a_row() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    tokenizer.chat_template = "{{ messages | length }}" + str(tokenizer.chat_template)
    found = probe_template(ChatTemplate(tokenizer), [tokenizer.convert_tokens_to_ids("<|im_end|>")])
    assert found.habit == "rewrites"
    assert found.rows == 22 / 8  # as many as turns
    assert (
        "the chat template rewrites: 2.75 rows a trajectory in 8 conversations; 2 with a tool's result (context)"
        in (found.describe())
    )


def test_what_it_refuses_is_said() -> None:
    found = probed("llama3")
    assert list(found.refusals) == ["two results"]
    assert "refused: two results: the model's chat template refuses these messages: " in found.describe()
    assert "single tool-calls at once" in found.describe()


def test_the_tiny_models_template_appends_all_but_thinking() -> None:
    tokenizer = byte_tokenizer()
    found = probe_template(ChatTemplate(tokenizer), [tokenizer.eos_token_id])
    assert {name for name, why in found.row_reasons.items() if why} == {
        "thinking before calls",
        "thinking before answers",
    }


# Messages and tools that a family's template passes over are refused, and a developer's are the system's.
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
        with pytest.raises(
            UnsupportedMessages, match=rf"passes over message 3, of the role '{role}', which would be lost"
        ):
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
            with pytest.raises(
                UnsupportedMessages, match=f"shows no tools, so the model would not know of {names}: give"
            ):
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
        with pytest.raises(UnsupportedMessages, match=r"tool 1 is .*; it must be an object with function\.name"):
            template.render([ASKED], tools)


def test_of_several_templates_by_name_it_is_the_one_that_transformers_picks() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    with_tools = str(tokenizer.chat_template)
    tokenizer.chat_template = {"default": "{% for m in messages %}{{ m.content }};{% endfor %}", "tool_use": with_tools}
    for tools in ((), TOOLS):
        oracle = tokenizer.apply_chat_template(SAID, tools=tools or None, tokenize=False, add_generation_prompt=True)
        assert ChatTemplate(tokenizer).render(SAID, tools) == oracle
    del tokenizer.chat_template["default"]
    with pytest.raises(ConfigError, match=r"has the chat templates tool_use, but none is called default; give"):
        ChatTemplate(tokenizer)


def test_plain_texts_show_no_tools_at_any_turn() -> None:
    template = PlainText(byte_tokenizer())
    _, before = template.begin([ASKED], ())
    for shown in (
        lambda: template.begin([ASKED], TOOLS),
        lambda: template.extend(before, [*SAID, ASKED], TOOLS, None),
        lambda: template.renders_equal(SAID, SAID, TOOLS),
    ):
        with pytest.raises(UnsupportedMessages, match=r"environment.template=plain shows no tools.*set environment"):
            shown()


# Tools, calls and parts of contents that a template leaves out, depending on what is beside them, are refused.
SYSTEM, QUESTION = {"role": "system", "content": "Be."}, {"role": "user", "content": "1 + 16?"}
ADDED = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 17}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [ADDED]}
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
        ("==", [QUESTION], [SYSTEM, QUESTION], "without a message of the system, so .* add: begin the conversation"),
        ("!=", [SYSTEM, QUESTION], [QUESTION], "beside a message of the system, so .* add: leave that message out,"),
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
        with pytest.raises(UnsupportedMessages, match=f"chat template shows no tools {said}"):
            template.render(bad, TOOLS)
    report = probe_template(ChatTemplate(tokenizer), [tokenizer.eos_token_id])
    assert (report.shows_tools, report.with_system) == (True, shown == "==")
    assert ("beside a message of the system alone" in report.describe()) == (shown == "==")


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_that_an_environment_shows_as_an_example_are_in_the_prompt(name: str) -> None:
    tokenizer = tokenizer_of(name)
    asked = Conversation(ChatTemplate(tokenizer)).prompt_for([QUESTION, CALLS, RESULT, SAYS, QUESTION])
    assert '"a"' in (text := str(tokenizer.decode(asked.token_ids))) or "<arg_key>a" in text


@pytest.mark.parametrize(
    ("template", "call"),
    [
        (ChatTemplate(with_template("chatml", WITHOUT_CALLS)), CALLS),
        (ChatTemplate(tokenizer_of("gptoss")), {**CALLS, "tool_calls": [ADDED, ADDED]}),  # it writes the first alone
        (PlainText(tokenizer_of("chatml")), CALLS),
        (ChatTemplate(tokenizer_of("qwen3")), {**SAYS, "function_call": ADDED["function"]}),
    ],
)
def test_calls_that_the_template_leaves_out_are_refused_but_for_sampled_ones(
    template: Template, call: dict[str, Any]
) -> None:
    """Of what was sampled the tokens are there, or were; only who asks can change the rest."""
    with pytest.raises(
        UnsupportedMessages, match=r"message 2: the model's chat template does not write its (call|tool|f)"
    ):
        Conversation(template).prompt_for([QUESTION, call, RESULT, SAYS, QUESTION])
    talk = Conversation(template)
    talk.add(talk.prompt_for([QUESTION]), completion([1, 2], random.Random(0)), call)
    assert talk.prompt_for([QUESTION, call, RESULT, SAYS, QUESTION]).branch == "edited"


def written(tokenizer: PreTrainedTokenizerFast, content: object) -> tuple[str, list[str]]:
    """The texts of the row that is learned, and of the whole that is scored."""
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>" if "<|im_end|>" in tokenizer.get_vocab() else "<|user|>")
    talk = TrainingConversation(id="t:1", messages=[{"role": "user", "content": content}, SAYS], tools=())
    maker = ConversationRows(tokenizer, [stop])
    ((row,),) = maker.make_rows([talk])
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
def test_texts_of_a_content_are_one_as_in_the_template(name: str, template: str | None, is_joined: bool) -> None:
    """transformers' own rendering of the parts is what the template does with them."""
    tokenizer = with_template(name, template or str(tokenizer_of(name).chat_template))
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    if is_joined:
        assert written(tokenizer, parts) == written(tokenizer, "one two")
        messages = [{"role": "user", "content": parts}, SAYS]
        assert written(tokenizer, parts)[0] == tokenizer.apply_chat_template(messages, tokenize=False)
    else:
        for make in ("make_rows", "whole"):
            talk = TrainingConversation(id="t:1", messages=[{"role": "user", "content": parts}, SAYS], tools=())
            maker = ConversationRows(tokenizer, [tokenizer.convert_tokens_to_ids("<|im_end|>")])
            with pytest.raises(DataError, match=r"prompt 't:1': message 1 has a content of several texts, which the"):
                getattr(maker, make)([talk] if make == "make_rows" else talk)
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
    talk = TrainingConversation(id="t:1", messages=[QUESTION, message, SAYS], tools=())
    with pytest.raises(UnsupportedMessages, match=f"^message 2.*{said}"):
        talk.tidied()
    of_tool = {"role": "tool", "tool_call_id": "c", "name": "add"}
    returned = [{**of_tool, "content": nothing, "tool_calls": nothing} for nothing in (None, [])]
    for empty in ({"role": "tool", "content": ""}, {**CALLS, "content": None}, *returned):
        assert TrainingConversation(id="t:1", messages=[QUESTION, empty, SAYS], tools=()).tidied()[1]["content"] == ""
    given = [{"arguments": arguments, "description": "Adds."} for arguments in ({}, [], "", "{}")]
    for nothing in ({}, {"arguments": None, "strict": None}, *given):
        calls = {**CALLS, "tool_calls": [{"function": {"name": "add", **nothing}}]}
        known = TrainingConversation(id="t:1", messages=[QUESTION, calls, SAYS], tools=()).tidied()
        assert known[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {}}
    twice = {**SAYS, "thinking": "one", "reasoning_content": "one\n", "reasoning": ""}  # the same but for white space
    known = TrainingConversation(id="t:1", messages=[QUESTION, twice, SAYS], tools=()).tidied()
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
    maker = ConversationRows(tokenizer, [tokenizer.convert_tokens_to_ids("<|im_end|>")])

    def made(weight: int) -> int:
        messages = [QUESTION, {"role": "assistant", "weight": weight, **turn}, QUESTION, SAYS]
        ((row,),) = maker.make_rows([TrainingConversation(id="t:1", messages=messages, tools=())])
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
    talk = json.loads(json.dumps([QUESTION, SAYS]))
    ((row,),) = ConversationRows(tokenizer, stops).make_rows([TrainingConversation(id="t", messages=talk, tools=())])
    assert [tokenizer.decode(row.token_ids[start:stop]) for start, stop in row.turns] == ["17<|im_end|>"]
    assert len(row.token_ids) == row.turns[-1][1]
