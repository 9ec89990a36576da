"""A model's chat template: how it shows messages and tools, and which parts of them it passes over.

To find whether it shows something, that is rendered with a mark in it. No model has code of its own here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateSyntaxError

from rl_megatron.agents.conversation.messages import REASONING, ChatMessage, UnsupportedMessages, arguments_json
from rl_megatron.agents.conversation.templates import Tools
from rl_megatron.chat_templates import TemplateFailed, check_syntax, template_text
from rl_megatron.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THOUGHT = "</think>"
"""A text that templates look for in a content, to drop the text before it."""
_SYSTEM = ("system", "developer")
_SHOWN = "Rl0Megatron0Shown0Here"  # unchanged by any form of quoting


class _Jinja:
    """A template, and the parts of messages that it reads. Raises ConfigError for one that is not Jinja."""

    def __init__(self, source: str) -> None:
        try:
            check_syntax(source)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"line {error.lineno} of the model's chat template is no Jinja: {error.message}; repair it"
            ) from error
        except TemplateFailed as error:
            raise ConfigError(f"the model's chat template cannot be read: {error}; repair it") from error
        self.source = source
        self.reasoning = [name for name in REASONING if name in source]
        self.asks_for_none = "content'] is none" in source or "content is none" in source
        self.roles = {("assistant", first): "assistant" for first in (True, False)}  # (role, is first) -> shown role


class ChatRenderer:
    """A tokenizer's chat template, with ``options`` for variables of its own (``enable_thinking``)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> None:
        """Raises ConfigError as `get_chat_template`, and for a template that is not Jinja."""
        alone, beside = (get_chat_template(tokenizer, with_tools=given) for given in (False, True))
        self._without_tools = _Jinja(alone)
        self._with_tools = self._without_tools if beside == alone else _Jinja(beside)
        self._variables = {"documents": None, **tokenizer.special_tokens_map, **(options or {})}
        self._shows_tools = set[str]()  # roles of first messages with which the template shows tools

    def render(self, messages: Sequence[ChatMessage], tools: Tools, *, opened: bool = True) -> str:
        """Returns the template's text, with the generation prompt if ``opened``. Raises UnsupportedMessages.

        Some templates read the arguments of calls as objects, some as text: the second is tried where the first raises.
        A message with a role that the template passes over is refused; a ``developer``'s is then tried as the system's.
        Tools are refused where the template shows none, which may depend on a system's message.
        """
        roles = self._jinja(tools).roles
        for place, message in enumerate(messages):
            if (message["role"], place == 0) not in roles and message["content"]:
                self._know_role(messages, place, tools)
        if tools and messages[0]["role"] not in self._shows_tools:
            self._know_tools(messages, tools)
        return self._rendered(messages, tools, opened)

    def lost(self, messages: Sequence[ChatMessage], tools: Tools, places: Collection[int]) -> list[tuple[int, str]]:
        """Returns place and name of each part of the assistant's messages at ``places`` that the text of all messages
        lacks. Nothing follows these messages. Raises UnsupportedMessages."""
        marks = dict[str, tuple[int, str]]()

        def mark_texts(place: int, message: ChatMessage) -> ChatMessage:
            def mark(part: str) -> str:
                marks[new := f"{_SHOWN}{len(marks)}x"] = place, part
                return new

            return _with_marks(message, mark) if place in places else message

        text = self._rendered([mark_texts(place, one) for place, one in enumerate(messages)], tools, opened=False)
        return [part for mark, part in marks.items() if mark not in text]

    def joins(self, messages: Sequence[ChatMessage], parts: Mapping[int, object], tools: Tools) -> bool:
        """True if the template itself renders the ``parts`` of contents, by their place, like the contents as texts."""
        given = [{**one, "content": parts[place]} if place in parts else one for place, one in enumerate(messages)]
        try:
            return self._rendered(given, tools, opened=False) == self._rendered(messages, tools, opened=False)
        except UnsupportedMessages:
            return False

    def _know_role(self, messages: Sequence[ChatMessage], place: int, tools: Tools) -> None:
        """Finds the role that the message's role is rendered as there: in the first message, or in a later one."""
        message = messages[place]
        role, reason = message["role"], None
        for shown_as in (role, "system") if role == "developer" else (role,):
            marked = {**message, "role": shown_as, "content": f"{message['content']}{_SHOWN}"}
            try:
                if _SHOWN in self._rendered([*messages[:place], marked, *messages[place + 1 :]], tools, True):
                    self._jinja(tools).roles[role, place == 0] = shown_as
                    return
            except UnsupportedMessages as error:
                reason = error
        raise reason or UnsupportedMessages(
            f"the model's chat template passes over message {place + 1}, of the role {role!r}, which would be lost: "
            "give it a role that the template shows there (system, user or tool), or the model a template that shows it"
        )

    def _know_tools(self, messages: Sequence[ChatMessage], tools: Tools) -> None:
        """Finds whether messages that begin so show tools. Raises UnsupportedMessages if not."""
        first = tools[0]
        function = first.get("function", first) if isinstance(first, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str):
            raise UnsupportedMessages(f"tool 1 is {first!r:.200}; it must be an object with function.name")
        marked = {**function, "name": f"{name}{_SHOWN}"}
        marked = {**first, "function": marked} if "function" in first else marked
        if _SHOWN not in self._rendered(messages, [marked, *tools[1:]], opened=True):
            where, advice = self._check_tools(messages, [marked, *tools[1:]])
            more = f" and {len(tools) - 1} more" if tools[1:] else ""
            raise UnsupportedMessages(
                f"the model's chat template shows no tools{where}, so the model would not know of {name:.100}{more}: "
                f"{advice}give the model a template that shows them, or describe them in a message and send none"
            )
        self._shows_tools.add(messages[0]["role"])

    def _check_tools(self, messages: Sequence[ChatMessage], tools: Tools) -> tuple[str, str]:
        """Returns the place where marked tools are not shown, and what to do, if a system's message decides that."""
        is_system = messages[0]["role"] in _SYSTEM
        others = messages[1:] if is_system else [{"role": _SYSTEM[0], "content": "."}, *messages]
        try:
            if not others or _SHOWN not in self._rendered(others, tools, opened=True):
                return "", ""
        except UnsupportedMessages:
            return "", ""
        if is_system:
            return " beside a message of the system", "leave that message out, "
        return " without a message of the system", "begin the conversation with one, "

    def _jinja(self, tools: Tools) -> _Jinja:
        return self._with_tools if tools else self._without_tools

    def _rendered(self, messages: Sequence[ChatMessage], tools: Tools, opened: bool) -> str:
        jinja = self._jinja(tools)
        for form in _forms(messages, jinja):
            try:
                given = {"messages": form, "tools": list(tools) or None, "add_generation_prompt": opened}
                return template_text(jinja.source, {**self._variables, **given})
            except TemplateFailed as error:
                reason = error
        raise UnsupportedMessages(f"the model's chat template refuses these messages: {reason}")


def _forms(messages: Sequence[ChatMessage], jinja: _Jinja) -> Iterator[list[ChatMessage]]:
    shown = [_shown(_normalize_role(message, not place, jinja), jinja) for place, message in enumerate(messages)]
    yield shown
    if any("tool_calls" in message for message in messages):
        yield [arguments_json(message) for message in shown]


def _normalize_role(message: ChatMessage, first: bool, jinja: _Jinja) -> ChatMessage:
    role = message["role"]
    known = jinja.roles.get((role, first), role)
    return message if known == role else {**message, "role": known}


def _shown(message: ChatMessage, jinja: _Jinja) -> ChatMessage:
    asks = jinja.asks_for_none and "tool_calls" in message and not message["content"]
    if not asks and REASONING[0] not in message:
        return message
    shown = dict(message)
    if reasoning := shown.pop(REASONING[0], None):
        shown |= dict.fromkeys(jinja.reasoning, reasoning)
    return shown | {"content": None} if asks else shown


def get_chat_template(tokenizer: PreTrainedTokenizerBase, *, with_tools: bool) -> str:
    """Returns the Jinja of the chat template that transformers and engines apply. Of several it is ``tool_use`` with
    tools, if that exists, else ``default``. Raises ConfigError that names those that exist, and for none."""
    given = tokenizer.chat_template
    known = given if isinstance(given, dict) else {} if given is None else {"default": given}
    name = "tool_use" if with_tools and "tool_use" in known else "default"
    if name in known:
        return str(known[name])
    if known:
        raise ConfigError(
            f"the model's tokenizer has the chat templates {', '.join(sorted(known))}, but none is called "
            "default; give one of them this name, or write it as chat_template.jinja"
        )
    raise ConfigError("the model's tokenizer has no chat template; give it one")


def unwritten_header(template: ChatRenderer) -> str:
    """Returns the text that the template writes between a prompt and the assistant's answer, if it ignores
    ``add_generation_prompt``; else empty."""
    asked, answer = {"role": "user", "content": "1"}, {"role": "assistant", "content": _SHOWN}
    try:
        closed, prompt = (template.render([asked], (), opened=opened) for opened in (False, True))
        whole = template.render([asked, answer], (), opened=False)
    except UnsupportedMessages:
        return ""
    ignored = closed == prompt and whole.startswith(prompt)
    return whole[len(prompt) :].partition(_SHOWN)[0].strip() if ignored else ""


def strip_thinking(message: ChatMessage) -> ChatMessage:
    """Returns the message without reasoning, neither as such nor before ``</think>`` in an assistant's content."""
    kept = {key: value for key, value in message.items() if key != REASONING[0]}
    if message["role"] == "assistant":
        kept["content"] = message["content"].rpartition(THOUGHT)[2]
    return kept


def _with_marks(message: ChatMessage, mark: Callable[[str], str]) -> ChatMessage:
    """Returns an assistant's message with a mark after each of its texts and in each call."""
    marked, content = dict(message), message["content"]
    thought, end, said = content.rpartition(THOUGHT)
    if REASONING[0] in message:
        marked[REASONING[0]] += mark("reasoning")
    elif thought.replace("<think>", "").strip():
        thought += mark("reasoning")
    if said.strip():
        said += mark("content")
    marked["content"] = thought + end + said
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [_marked_call(call, mark(f"call of {call['function']['name']:.100}")) for call in calls]
    if old := message.get("function_call"):
        new = mark("function_call, which tool_calls has replaced,")
        marked["function_call"] = {**old, "name": f"{old.get('name')}{new}"} if isinstance(old, Mapping) else new
    if refusal := message.get("refusal"):
        marked["refusal"] = f"{refusal}{mark('refusal')}"
    return marked


def _marked_call(call: Mapping[str, Any], mark: str) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    more = {**arguments, mark: mark} if isinstance(arguments, Mapping) else f"{arguments}{mark}"
    return {**call, "function": {**function, "arguments": more}}
