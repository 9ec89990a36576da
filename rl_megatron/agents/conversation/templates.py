"""Turns messages into tokens: what a conversation asks of a template, and texts appended as they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from typing_extensions import override

from rl_megatron.agents.conversation.messages import LOSABLE, ChatMessage, UnsupportedMessages
from rl_megatron.chat_templates import prompt_tokens
from rl_megatron.columns import TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]]
"""Tools like in OpenAI's requests: each has ``type`` and ``function``."""
Rewritten = Literal["thinking", "context", "closing", "refused"]
"""The reasons why a template's new text cannot follow the last turn's tokens.

``thinking``: it drops the thinking of turns, and nothing else. ``context``: it shows the text before the turn, or the
turn, otherwise than before. ``closing``: it writes another token than was sampled. ``refused``: it refused the turn
without its calls' texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """A prompt as its template shows it. The next one is compared with it."""

    text: str | None  # includes the generation prompt; None: it is rendered again where it is needed
    messages: Sequence[ChatMessage]
    tools: Tools


class Template(Protocol):
    """Makes tokens of normalized messages (`normalize_messages`)."""

    def begin(self, messages: Sequence[ChatMessage], tools: Tools) -> tuple[TokenIds, RenderedPrompt]:
        """Returns the whole prompt. Raises UnsupportedMessages, as for tools that it does not show."""
        ...

    def extend(
        self, before: RenderedPrompt, messages: Sequence[ChatMessage], tools: Tools, ended: int | None
    ) -> tuple[TokenIds, RenderedPrompt] | Rewritten:
        """Returns the tokens after the turn that answered ``before``; ``messages`` has it after those of ``before``.

        ``ended`` is the stop token that the turn ends with, None if it was cut. Raises UnsupportedMessages.
        """
        ...

    def renders_equal(self, one: Sequence[ChatMessage], other: Sequence[ChatMessage], tools: Tools) -> bool:
        """True if the prompts of both have the same text. Raises UnsupportedMessages."""
        ...

    def lost(self, messages: Sequence[ChatMessage], tools: Tools, places: Collection[int]) -> list[tuple[int, str]]:
        """Returns place and name of each part of the assistant's messages at ``places`` that the text of all messages
        lacks. Nothing follows these messages. Raises UnsupportedMessages."""
        ...

    def decode(self, token_ids: TokenIds, *, special: bool = False) -> str:
        """Returns the text of the tokens, with special tokens or without."""
        ...


class PlainText(Template):
    """Contents as they are, one after the other, for a tokenizer without a chat template. Tools are refused."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    @override
    def begin(self, messages: Sequence[ChatMessage], tools: Tools) -> tuple[TokenIds, RenderedPrompt]:
        text = _text_of(messages, tools)
        return encode_text(self._tokenizer, text, begins=True), RenderedPrompt(
            text=text, messages=messages, tools=tools
        )

    @override
    def extend(
        self, before: RenderedPrompt, messages: Sequence[ChatMessage], tools: Tools, ended: int | None
    ) -> tuple[TokenIds, RenderedPrompt]:
        new = _text_of(messages[len(before.messages) + 1 :], tools)
        return encode_text(self._tokenizer, new), RenderedPrompt(text=new, messages=messages, tools=tools)

    @override
    def renders_equal(self, one: Sequence[ChatMessage], other: Sequence[ChatMessage], tools: Tools) -> bool:
        return _text_of(one, tools) == _text_of(other, tools)

    @override
    def lost(self, messages: Sequence[ChatMessage], tools: Tools, places: Collection[int]) -> list[tuple[int, str]]:
        return [(place, key) for place in places for key in LOSABLE if messages[place].get(key)]

    @override
    def decode(self, token_ids: TokenIds, *, special: bool = False) -> str:
        return decode_text(self._tokenizer, token_ids, special=special)


def _text_of(messages: Sequence[ChatMessage], tools: Tools) -> str:
    if tools:
        raise UnsupportedMessages(
            "environment.template=plain shows no tools, so the model would not know of them: set "
            "environment.template=chat, or describe them in a message and send none"
        )
    return "".join(message["content"] for message in messages)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, *, begins: bool = False) -> TokenIds:
    """Returns int32 tokens of the text; with what the tokenizer puts in front of every text if it ``begins`` a row.

    Raises UnsupportedMessages for halves of surrogate pairs, which no tokenizer takes.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedMessages(
            f"character {error.start} of {text[max(0, error.start - 20) :]!r:.60} is half of a surrogate pair; decode "
            "bytes with errors='replace'"
        ) from error
    return np.array(prompt_tokens(tokenizer, [text], begins=begins)[0], np.int32)


def decode_text(tokenizer: PreTrainedTokenizerBase, token_ids: TokenIds, *, special: bool = False) -> str:
    """Returns the text of tokens as it is, with special tokens or without."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False))
