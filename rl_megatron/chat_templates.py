"""Renders models' chat templates, in a process with limits; begins their texts once; sets their variables."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from typing_extensions import override

from rl_megatron.bounded import BoundedProcess, LimitExceeded, ProcessFailed, answer_calls
from rl_megatron.errors import SandboxError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TemplateValue = bool | int | float | str
SECONDS = 5.0
"""Limit of processor time; templates take milliseconds, so that a busy machine or a stopped process ends none."""
MEMORY_BYTES = 2 << 30
_MODULE = "rl_megatron.chat_templates"
_LONG = 1 << 20  # characters of a text
_MOST_TIMES = 32  # the bytes of its values; what a template writes for each message is short
_MOST_SHOWN = 2000  # characters of an error
_OF_DICTS = frozenset(dir(dict))
_OF_JINJA = frozenset({LoopContext, Namespace})
_PLAIN = frozenset({bool, int, str})  # the base needs to see methods of a text, not these


class TemplateFailed(ValueError):
    """A template raised an error, or is not valid Jinja."""


class TemplateUnbounded(TemplateFailed):
    """A template took more time or memory than it may."""


def strip_second_bos(ids: Sequence[int], bos: int | None) -> Sequence[int]:
    """Returns the tokens of a text without the ``bos`` that the tokenizer put before the template's own."""
    return ids[1:] if list(ids[:2]) == [bos, bos] else ids


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, begins: bool) -> list[list[int]]:
    """Returns the tokens of each text. If they begin rows, the tokenizer's prefix is included, but not its suffix
    (``add_eos_token``), which would end a prompt."""
    encoded: list[list[int]] = tokenizer(list(texts), add_special_tokens=begins)["input_ids"] if texts else []
    if not begins:
        return encoded
    known, plain = (tokenizer("a", add_special_tokens=added)["input_ids"] for added in (True, False))
    room = len(known) - len(plain)
    behind = next((room - at for at in range(room + 1) if known[at : at + len(plain)] == plain), 0)
    return [ids[: len(ids) - behind] for ids in encoded]


def setting(variables: Mapping[str, TemplateValue], template: str, *, unless_given: bool = False) -> str:
    """Returns the template with ``variables`` set; with ``unless_given``, only those unset by its caller."""
    values = {
        name: f"{name} if {name} is defined else {_literal(value)}" if unless_given else _literal(value)
        for name, value in variables.items()
    }
    return "".join(f"{{% set {name} = {value} %}}" for name, value in values.items()) + template


def _literal(value: TemplateValue) -> str:
    """Returns the value as a Jinja literal: numbers, true, false as in JSON; a text in quotes, with escapes."""
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"
    return json.dumps(value)


def template_texts(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Sequence[Mapping[str, Any]]], *, opened: bool
) -> list[str | TemplateFailed]:
    """Renders each chat with the tokenizer's template, or returns the error. ``opened`` adds the generation prompt.
    Raises TemplateUnbounded if the chats together exceed a limit, SandboxError if something else ends the process."""
    try:
        source = tokenizer.get_chat_template()
    except ValueError as error:  # it has no template, or none called default
        return [TemplateFailed(f"ValueError: {error}")] * len(chats)
    variables = {**tokenizer.special_tokens_map, "tools": None, "documents": None, "add_generation_prompt": opened}
    return _texts(source, [{**variables, "messages": chat} for chat in chats])


def template_text(source: str, variables: Mapping[str, Any]) -> str:
    """Renders a template with the variables. Raises TemplateFailed."""
    (text,) = _texts(source, [variables])
    if isinstance(text, TemplateFailed):
        raise text
    return text


def check_syntax(source: str) -> None:
    """Raises TemplateSyntaxError with the line for a template that is not Jinja, TemplateFailed for a limit."""
    for error, line in _uses(source, []):
        raise TemplateSyntaxError(error, line) if line else TemplateFailed(error)


def _texts(source: str, many: Sequence[Mapping[str, Any]]) -> list[str | TemplateFailed]:
    return [
        text if line is None else TemplateFailed(f"TemplateSyntaxError: {text}" if line else text)
        for text, line in _uses(source, many)
    ]


def _uses(source: str, many: Sequence[Mapping[str, Any]]) -> list[tuple[str, int | None]]:
    try:
        answers: list[tuple[str, int | None]] = _process.ask(SECONDS, source, many)
    except LimitExceeded as error:
        raise TemplateUnbounded(f"{error}; the model's chat template may loop without end") from error
    except ProcessFailed as error:
        raise SandboxError(
            f"a chat template could not be rendered, and is not to blame: {error}; give the job more memory, or start "
            "it again"
        ) from error
    return answers


def _answers(source: str, many: Sequence[Mapping[str, Any]]) -> list[tuple[str, int | None]]:
    """Runs in the process. Returns each text and None, or an error and its line (0: the error came while rendering)."""
    try:
        template = _compiled(source)
    except TemplateSyntaxError as error:
        return [(str(error.message), error.lineno)] * max(len(many), 1)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  the compiler's, for example for nested brackets or 5,000 digits
        return [(f"{type(error).__name__}: {error}", 0)] * max(len(many), 1)
    return [_answer(template, variables) for variables in many]


def _answer(template: Template, variables: Mapping[str, Any]) -> tuple[str, int | None]:
    try:
        text = template.render(variables)
        if len(text) > _LONG and len(text) > (most := max(_LONG, _MOST_TIMES * len(pickle.dumps(variables)))):
            raise ValueError(f"its text has {len(text)} characters, more than {most}, which its values explain")
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  the template's own
        return f"{type(error).__name__}: {error}"[:_MOST_SHOWN], 0
    return text, None


@lru_cache(maxsize=16)
def _compiled(source: str) -> Template:
    """Compiles the template with the filters, functions and tags that transformers gives it."""
    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    sandbox.filters["tojson"] = _to_json
    sandbox.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
    return sandbox.from_string(source)


def _to_json(
    value: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


class _Generation(Extension):
    """The tag around an assistant's text, which is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012

    @override
    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox with its base's rules, which caches whether the attribute of a type is safe.

    A history is rendered again for each turn, and a template looks up some ten attributes of each of its messages.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._safe: dict[tuple[type, str], bool] = {}

    @override
    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:  # the base tries an attribute of that name, which no dict has
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if kind in _OF_JINJA:
            value = getattr(obj, attribute, None)
            if type(value) in _PLAIN and self.is_safe_attribute(obj, attribute, value):
                return value
        return super().getattr(obj, attribute)

    @override
    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        asked = type(obj), attr  # the result depends on nothing else
        if (safe := self._safe.get(asked)) is None:
            safe = self._safe[asked] = super().is_safe_attribute(obj, attr, value)
        return safe


def _reset_after_fork() -> None:
    """Gives a forked child its own process."""
    global _process
    _process = BoundedProcess(_MODULE)


_process = BoundedProcess(_MODULE)
os.register_at_fork(after_in_child=_reset_after_fork)
if __name__ == "__main__":
    answer_calls(_answers, MEMORY_BYTES)
