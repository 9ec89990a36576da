"""Templates show, and their sandbox refuses, what transformers' own rendering does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from rl_megatron.errors import ConfigError
from rl_megatron.rollout.conversation.chat import ChatTemplate
from rl_megatron.rollout.conversation.compiled import compiled
from rl_megatron.rollout.conversation.messages import written_arguments
from tests.unit.rollout.conversation.families import FAMILIES, tokenizer_of

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
                shown = [written_arguments(message) for message in shown]
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
                "messages.append(1)",
                "messages[0].update(role=1)",
                "messages[0].clear()",
                "messages[0].__class__",
                "messages[0]['__class__']",
                "messages.__class__.__mro__",
                "''['__class__']",
                "'{0.__class__}'.format(messages)",
                "loop.__init__.__globals__",
                "loop.__doc__",
                "namespace(one=1).__doc__",
                "raise_exception.__globals__",
                "raise_exception['__code__']",
            )
        ),
    ],
)
def test_a_template_may_do_what_it_may_in_transformers(source: str) -> None:
    messages = copy.deepcopy(MESSAGES)
    shown = outcome(lambda: compiled(source).render(messages=messages, documents=None, add_generation_prompt=True))
    wanted = outcome(lambda: render_jinja_template([messages], chat_template=source, add_generation_prompt=True)[0][0])
    assert shown == wanted
    assert messages == MESSAGES


def test_a_template_that_is_no_jinja_is_refused_with_its_line() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    tokenizer.chat_template = "{{ bos_token }}\n{% for one in messages %}{{ one.content }}"
    with pytest.raises(ConfigError, match=r"line 2 of the model's chat template is no Jinja: .*repair it$"):
        ChatTemplate(tokenizer)
