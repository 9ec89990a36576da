"""The chat template of a model's tokenizer, made to go on after turns that were sampled.

To find what the template writes after a turn, it is rendered with marks in that turn, and the text after the last
mark is encoded alone. Marks are characters of Unicode's private use. No model has code of its own here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jinja2 import TemplateError, TemplateSyntaxError
from typing_extensions import override

from rl_megatron.chat_templates import bounded_rendering
from rl_megatron.columns import TokenIds
from rl_megatron.errors import ConfigError
from rl_megatron.rollout.conversation.compiled import compiled
from rl_megatron.rollout.conversation.messages import REASONING, ChatMessage, MessagesRefused, written_arguments
from rl_megatron.rollout.conversation.templates import Rendered, Rewritten, Template, Tools, text_of, tokens_of_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Thinking = Literal["template", "keep"]

_FRONT, _BACK = "\uf8a1\uf8a2", "\uf8a3\uf8a4"
_SHOWN = "Rl0Megatron0Shown0Here"  # in any form of quoting
_THOUGHT = "</think>"  # what templates look for in a content, to drop what is before it
_RAISED = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


class ChatTemplate(Template):
    """A tokenizer's chat template, with ``options`` for variables of its own (``enable_thinking``)."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        thinking: Thinking = "template",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """With ``thinking="keep"`` rows go on where the template drops the thinking of turns and does nothing else.

        Raises ConfigError for a tokenizer without a chat template or with one that is no Jinja, and for one that alters
        texts.
        """
        if not isinstance(tokenizer.chat_template, str):
            raise ConfigError("the model's tokenizer has no chat template; give it one")
        sample = "\n user: 1"
        if (back := text_of(tokenizer, tokens_of_text(tokenizer, sample), special=True)) != sample:
            raise ConfigError(
                f"the model's tokenizer makes {back!r} of {sample!r}, so that what its template writes behind a turn "
                "cannot be encoded alone; use a tokenizer that gives every text back as it was"
            )
        self._tokenizer, self._thinking, source = tokenizer, thinking, tokenizer.chat_template
        try:
            self._compiled = compiled(source)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"line {error.lineno} of the model's chat template is no Jinja: {error.message}; repair it"
            ) from error
        self._variables = {"documents": None, **tokenizer.special_tokens_map, **(options or {})}
        self._reasoning = [name for name in REASONING if name in source]
        self._asks_for_none = "content'] is none" in source or "content is none" in source
        self._stops = dict[int, str]()
        self._roles = {("assistant", first): "assistant" for first in (True, False)}  # as what each is rendered
        self._special = tuple(token.content for token in tokenizer.added_tokens_decoder.values())

    @override
    def begin(self, messages: Sequence[ChatMessage], tools: Tools) -> tuple[TokenIds, Rendered]:
        text = self.render(messages, tools)
        return tokens_of_text(self._tokenizer, text), Rendered(text=text, messages=messages, tools=tools)

    @override
    def proceed(
        self, before: Rendered, messages: Sequence[ChatMessage], tools: Tools, ended: int | None
    ) -> tuple[TokenIds, Rendered] | Rewritten:
        found = self._behind(before, messages, tools)
        if isinstance(found, str):
            return found
        text, has_calls, whole = found
        if ended is not None:
            stop = self._text_of_stop(ended)
            at = text.find(stop)
            if at >= 0 and (has_calls or not text[:at].strip()):  # white space before it was not sampled
                text = text[at + len(stop) :]
            elif has_calls or text.startswith(self._special):
                return "closing"  # else the template writes no token there, and the turn keeps its own
        elif has_calls:
            return "closing"
        shown = self.render(messages, tools) if whole is None else whole
        return tokens_of_text(self._tokenizer, text), Rendered(text=shown, messages=messages, tools=tools)

    @override
    def shows_alike(self, one: Sequence[ChatMessage], other: Sequence[ChatMessage], tools: Tools) -> bool:
        return self.render(one, tools) == self.render(other, tools)

    @override
    def decode(self, token_ids: TokenIds, *, special: bool = False) -> str:
        return text_of(self._tokenizer, token_ids, special=special)

    def render(self, messages: Sequence[ChatMessage], tools: Tools, *, opened: bool = True) -> str:
        """The template's text, with the generation prompt if ``opened``. Raises MessagesRefused with its reason.

        Some templates read the arguments of calls as objects, some as text: the second is tried where the first raises.
        A message whose role the template passes over is refused; a ``developer``'s is then tried as the system's.
        """
        for place, message in enumerate(messages):
            if (message["role"], place == 0) not in self._roles and message["content"]:
                self._know_role(messages, place, tools)
        return self._rendered(messages, tools, opened)

    def _know_role(self, messages: Sequence[ChatMessage], place: int, tools: Tools) -> None:
        """Find as what the message's role is rendered there: in the first message, or in a later one."""
        message = messages[place]
        role, reason = message["role"], None
        for shown_as in (role, "system") if role == "developer" else (role,):
            marked = {**message, "role": shown_as, "content": f"{message['content']}{_SHOWN}"}
            try:
                if _SHOWN in self._rendered([*messages[:place], marked, *messages[place + 1 :]], tools, True):
                    self._roles[role, place == 0] = shown_as
                    return
            except MessagesRefused as error:
                reason = error
        raise reason or MessagesRefused(
            f"the model's chat template passes over message {place + 1}, of the role {role!r}, which would be lost: "
            "give it a role that the template shows there (system, user or tool), or the model a template that shows it"
        )

    def _rendered(self, messages: Sequence[ChatMessage], tools: Tools, opened: bool) -> str:
        for form in self._forms(messages):
            try:
                with bounded_rendering():
                    return self._compiled.render(
                        self._variables, messages=form, tools=list(tools) or None, add_generation_prompt=opened
                    )
            except _RAISED as error:
                reason = f"{type(error).__name__}: {error}"
        raise MessagesRefused(f"the model's chat template refuses these messages: {reason}")

    def _text_of_stop(self, token: int) -> str:
        if token not in self._stops:
            self._stops[token] = text_of(self._tokenizer, np.array([token], np.int32), special=True)
        return self._stops[token]

    def _forms(self, messages: Sequence[ChatMessage]) -> Iterator[list[ChatMessage]]:
        shown = [self._shown(self._of_role(message, not place)) for place, message in enumerate(messages)]
        yield shown
        if any("tool_calls" in message for message in messages):
            yield [written_arguments(message) for message in shown]

    def _of_role(self, message: ChatMessage, first: bool) -> ChatMessage:
        role = message["role"]
        known = self._roles.get((role, first), role)
        return message if known == role else {**message, "role": known}

    def _shown(self, message: ChatMessage) -> ChatMessage:
        asks = self._asks_for_none and "tool_calls" in message and not message["content"]
        if not asks and REASONING[0] not in message:
            return message
        shown = dict(message)
        if reasoning := shown.pop(REASONING[0], None):
            shown |= dict.fromkeys(self._reasoning, reasoning)
        return shown | {"content": None} if asks else shown

    def _behind(
        self, before: Rendered, messages: Sequence[ChatMessage], tools: Tools
    ) -> tuple[str, bool, str | None] | Rewritten:
        """The text after the turn's last mark, whether it has the turn's calls, and the whole text without marks.

        The whole is None where it lacks the calls' arguments, or thinking. Where a template trims a content that has no
        mark at its end, the whole differs from `render`'s, which `_extends` then compares.
        """
        place = len(before.messages)
        turn = messages[place]
        for has_calls in (False, True) if "tool_calls" in turn else (False,):
            marked = _marked(turn, has_calls)
            try:
                now = self.render([*messages[:place], marked, *messages[place + 1 :]], tools)
                break
            except MessagesRefused:
                continue
        else:
            return "refused"
        parts = _parted(now, marked)
        if parts is not None and self._extends(parts, before):
            return parts.behind, has_calls, None if "tool_calls" in turn else parts.whole
        bare = [_bare(message) for message in messages]
        marked = bare[place] = _marked(bare[place], has_calls)
        parts = _parted(self.render(bare, tools), marked)
        if parts is None or not parts.begins_with(self.render(bare[:place], before.tools, opened=False)):
            return "context"
        return (parts.behind, has_calls, None) if self._thinking == "keep" else "thinking"

    def _extends(self, now: _Parts, before: Rendered) -> bool:
        """Whether the text begins with the prompt before, whose opening of a turn need not be what a history shows."""
        text = self.render(before.messages, before.tools) if before.text is None else before.text
        return now.begins_with(text) or now.begins_with(self.render(before.messages, before.tools, opened=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """A text that had a turn's marks in it."""

    whole: str  # without them
    first: int  # the place in it of the first of them
    behind: str  # what follows the last of them

    def begins_with(self, text: str) -> bool:
        """Whether this text is before all marks."""
        return len(text) <= self.first and self.whole.startswith(text)


def _marked(turn: ChatMessage, has_calls: bool) -> ChatMessage:
    """The turn with a mark in its reasoning and one at its content's end, or at both ends of a content alone.

    Its calls are left out, or have no arguments. A turn of reasoning and calls keeps its empty content.
    """
    marked = {key: value for key, value in turn.items() if key != "tool_calls"}
    if has_calls:
        marked["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": {}}} for call in turn["tool_calls"]
        ]
    content = turn["content"]
    if REASONING[0] in turn:
        marked[REASONING[0]] += _FRONT
        if has_calls and not content:
            return marked
    elif _THOUGHT in content:
        content = content.replace(_THOUGHT, _FRONT + _THOUGHT, 1)
    else:
        content = _FRONT + content
    return {**marked, "content": content + _BACK}


def _bare(message: ChatMessage) -> ChatMessage:
    """The message without its thinking."""
    kept = {key: value for key, value in message.items() if key != REASONING[0]}
    if message["role"] == "assistant":
        kept["content"] = message["content"].rpartition(_THOUGHT)[2]
    return kept


def _parted(text: str, marked: ChatMessage) -> _Parts | None:
    """The text's parts; None unless it has each mark of the turn once.

    A mark is looked for from the end, which it is near, and then in what is before it, where a text of ASCII or Latin 1
    has none, whatever its length.
    """
    put, first, last = marked.get(REASONING[0], "") + marked["content"], len(text), len(text)
    for mark in (_FRONT, _BACK):
        if mark not in put:
            continue
        before, found, behind = text.rpartition(mark)
        if not found or mark in before or put.count(mark) != 1:
            return None
        text, first, last = before + behind, min(first, len(before)), min(last, len(behind))
    return _Parts(whole=text, first=first, behind=text[len(text) - last :])
