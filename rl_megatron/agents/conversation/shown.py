"""Conversations that somebody wrote, as a chat template shows them: the texts of rows, each turn behind its own prompt.

It needs a template alone, no tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_megatron.agents.conversation.forms import WrittenConversation
from rl_megatron.agents.conversation.messages import (
    LOSABLE,
    ChatMessage,
    MessagesRefused,
    in_parts,
    losable,
    reasoning_of,
)
from rl_megatron.agents.conversation.rendering import THOUGHT, ChatRenderer, without_thinking
from rl_megatron.agents.conversation.templates import Tools
from rl_megatron.errors import DataError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RowTexts:
    """The texts of a row, one after the other, and whether each is a turn to learn."""

    parts: list[tuple[str, bool]]

    @property
    def whole(self) -> str:
        """All of them as one text."""
        return "".join(text for text, _ in self.parts)


class ShownConversations:
    """Makes the texts of conversations by a chat ``template``; ``endings``: the texts of tokens that end sampling."""

    def __init__(self, template: ChatRenderer, endings: tuple[str, ...] = ()) -> None:
        self._template, self._endings, self._warned = template, endings, False

    def texts(self, conversation: WrittenConversation) -> list[RowTexts]:
        """The rows of a conversation. Raises DataError that names its prompt, as `WrittenConversations.rows_of`."""
        try:
            return self._rows(conversation)
        except MessagesRefused as error:
            raise DataError(f"prompt {conversation.id!r}: {error}") from error

    def whole(self, conversation: WrittenConversation) -> str:
        """The template's text of all messages.

        Raises DataError that names the prompt, as for calls or an answer's content that are not in it.
        """
        try:
            known = conversation.scored()
            self._check_parts(conversation, known)
            text, places = self._template.render(known, conversation.tools, opened=False), losable(known)
            for place, part in self._template.lost(known, conversation.tools, places) if places else ():
                is_context = place < len(known) - 1
                if is_context and part in ("reasoning", "content"):  # gpt-oss's content of a call is thinking
                    self._warn(conversation.id, place, part)
                elif part != "reasoning":
                    raise MessagesRefused(
                        f"message {place + 1}: the model's chat template does not write its {part}, so what is scored "
                        "would lack it; give the model a template that writes it"
                    )
            return text
        except MessagesRefused as error:
            raise DataError(f"prompt {conversation.id!r}: {error}") from error

    def _rows(self, conversation: WrittenConversation) -> list[RowTexts]:
        (known, turns), tools, rows = conversation.learnt(), conversation.tools, list[RowTexts]()
        self._check_parts(conversation, known)
        for place in turns:
            _check_turn(place, known[place])
            prompt, turn = self._prompt_and_turn(known[: place + 1], tools)
            turn += self._ending(prompt + turn, known, place, tools)
            before = rows[-1].whole if rows else None
            if before is not None and prompt.startswith(before):
                rows[-1].parts += [(prompt[len(before) :], False), (turn, True)]
            else:
                rows.append(RowTexts([(prompt, False), (turn, True)]))
        self._look_at_context(conversation.id, known, turns, tools)
        return rows

    def _check_parts(self, conversation: WrittenConversation, known: Sequence[ChatMessage]) -> None:
        """Raises MessagesRefused for contents of several texts, if the template does not join them as they are."""
        parts = in_parts(conversation.messages)
        if parts and not self._template.joins(known, parts, conversation.tools):
            raise MessagesRefused(
                f"message {next(iter(parts)) + 1} has a content of several texts, which the model's chat template does "
                "not put one after the other (vLLM would put a line feed between them, SGLang a blank): make them one "
                "text, with what belongs between them"
            )

    def _prompt_and_turn(self, known: Sequence[ChatMessage], tools: Tools) -> tuple[str, str]:
        """The texts before the last message and of it."""
        place = len(known) - 1
        prompt = self._template.render(known[:place], tools)
        whole = self._template.render(known, tools, opened=False)
        if not whole.startswith(prompt):
            at = next(i for i, (one, other) in enumerate(zip(prompt, whole + "\0", strict=False)) if one != other)
            raise MessagesRefused(
                f"message {place + 1}: the chat template's prompt for it has {prompt[at : at + 40]!r} where with the "
                f"message there is {whole[at : at + 40]!r}, so which tokens the model would sample is not known; "
                "write the message as the model says it (with its thinking), or give it a weight of 0"
            )
        turn = whole[len(prompt) :]
        if lost := self._lost(known, tools, turn):
            raise MessagesRefused(
                f"message {place + 1}: the model's chat template does not write its {lost}, so a model would learn to "
                "leave it out; give the model a template that writes it, or the message a weight of 0"
            )
        return prompt, turn

    def _lost(self, known: Sequence[ChatMessage], tools: Tools, turn: str) -> str:
        """What of the last message is not in its turn's text; empty if nothing."""
        message = known[-1]
        for call in message.get("tool_calls", ()):
            if (name := call["function"]["name"]) not in turn:
                return f"call of {name}"
        texts = message["content"].strip(), reasoning_of(message).strip()
        if message.keys().isdisjoint(LOSABLE) and all(text in turn for text in texts):
            return ""
        return next((part for _, part in self._template.lost(known, tools, [len(known) - 1])), "")

    def _look_at_context(self, name: str, known: Sequence[ChatMessage], turns: Sequence[int], tools: Tools) -> None:
        """Warn of what the template leaves out of messages before the last turn that are context alone."""
        places = [place for place in losable(known[: turns[-1]]) if place not in turns] if turns else []
        if places and not self._warned:
            for place, part in self._template.lost(known[: turns[-1] + 1], tools, places):
                self._warn(name, place, part)

    def _warn(self, name: str, place: int, part: str) -> None:
        """Warn, once, of a part of a message that is context; thinking is left out there by intent."""
        if part == "reasoning" or self._warned:
            return
        self._warned = True
        logger.warning(
            "prompt %r: message %d: the model's chat template does not write its %s, so what follows is learnt without "
            "that, in other rows too; a template that writes it would keep it",
            *(name, place + 1, part),
        )

    def _ending(self, whole: str, known: Sequence[ChatMessage], place: int, tools: Tools) -> str:
        """What ends the sampling of a message and is written with the one after it: GLM's models stop by its role."""
        if not self._endings or whole.rstrip().endswith(self._endings):
            return ""
        bare = [without_thinking(one) for one in known[: place + 1]]
        behind = known[place + 1] if place + 1 < len(known) else {"role": "user", "content": "."}
        whole = self._template.render(bare, tools, opened=False)  # without thinking, which is dropped before users
        more = self._template.render([*bare, behind], tools, opened=False)
        found = more[len(whole) :] if more.startswith(whole) else ""
        return next((ending for ending in self._endings if found.startswith(ending)), "")


def _check_turn(place: int, message: ChatMessage) -> None:
    """Raises MessagesRefused for a tidied message that no model should learn to write."""
    for call in message.get("tool_calls", ()):
        if not isinstance(arguments := call["function"]["arguments"], Mapping):
            raise MessagesRefused(
                f"message {place + 1}: the arguments of its call of {call['function']['name']:.100} are no object in "
                f"JSON, but {arguments!r:.100}, so a model would learn a call that nothing can read; write them as "
                "one, or give the message a weight of 0"
            )
    if reasoning_of(message) and THOUGHT in message["content"]:
        raise MessagesRefused(
            f"message {place + 1} has thinking twice, as reasoning_content and before {THOUGHT} in its content, so a "
            "model would learn to write both; leave one of them out, or give the message a weight of 0"
        )
