"""The chat template of a model's tokenizer, made to go on after turns that were sampled.

To find what the template writes after a turn, it is rendered with marks in that turn, and the text after the last
mark is encoded alone. Marks are characters of Unicode's private use. No model has code of its own here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from typing_extensions import override

from rl_megatron.columns import TokenIds
from rl_megatron.errors import ConfigError
from rl_megatron.rollout.conversation.messages import REASONING, ChatMessage, MessagesRefused
from rl_megatron.rollout.conversation.rendering import THOUGHT, ChatRenderer, without_thinking
from rl_megatron.rollout.conversation.templates import Rendered, Rewritten, Template, Tools, text_of, tokens_of_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Thinking = Literal["template", "keep"]

_FRONT, _BACK = "\uf8a1\uf8a2", "\uf8a3\uf8a4"


class ChatTemplate(ChatRenderer, Template):
    """A tokenizer's chat template, with ``options`` for variables of its own, as a `ChatRenderer` shows messages."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        thinking: Thinking = "template",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """With ``thinking="keep"`` rows go on where the template drops the thinking of turns and does nothing else.

        Raises ConfigError as `ChatRenderer`, and for a tokenizer that alters texts.
        """
        super().__init__(tokenizer, options)
        sample = "\n user: 1"
        if (back := text_of(tokenizer, tokens_of_text(tokenizer, sample), special=True)) != sample:
            raise ConfigError(
                f"the model's tokenizer makes {back!r} of {sample!r}, so that what its template writes behind a turn "
                "cannot be encoded alone; use a tokenizer that gives every text back as it was"
            )
        self._tokenizer, self._thinking = tokenizer, thinking
        self._stops = dict[int, str]()
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

    def _text_of_stop(self, token: int) -> str:
        if token not in self._stops:
            self._stops[token] = text_of(self._tokenizer, np.array([token], np.int32), special=True)
        return self._stops[token]

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
        bare = [without_thinking(message) for message in messages]
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
    elif THOUGHT in content:
        content = content.replace(THOUGHT, _FRONT + THOUGHT, 1)
    else:
        content = _FRONT + content
    return {**marked, "content": content + _BACK}


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
