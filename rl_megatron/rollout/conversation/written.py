"""Conversations that somebody wrote, as rows of tokens: each turn of the assistant after the prompt that it answers.

A turn is trained on after the very prompt for which the model would sample it, as the chat template writes that. Where
a template shows a turn otherwise later on (Qwen3 drops its thinking), the turns after it begin a new row. The
template's texts and the turns' are encoded apart, as they are when a model samples. No model has code of its own here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_megatron.data.problems.records import listed
from rl_megatron.data.samples import WrittenRow
from rl_megatron.errors import ConfigError, DataError
from rl_megatron.rollout.conversation.chat import ChatTemplate
from rl_megatron.rollout.conversation.messages import (
    LOSABLE,
    REASONING,
    ChatMessage,
    MessagesRefused,
    in_parts,
    losable,
    reasoning_of,
    tidied,
)
from rl_megatron.rollout.conversation.rendering import THOUGHT, without_thinking
from rl_megatron.rollout.conversation.templates import Tools
from rl_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

_DETAILS = ("train_detail", "training_detail")
_MARKS = ("weight", "train", "training", "train_on_turn", "loss", "trainable", *_DETAILS)
"""Keys of a message that say whether it is learnt: OpenAI's, those of Axolotl's files, ms-swift's, and agents'."""
_ANSWERS_NOBODY = (
    "message 1 is the assistant's, which answers nobody; put one before it (where a row has the prompt's in another "
    "field, name that in data.context_field), or give it a weight of 0"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenConversation:
    """The conversation of the prompt ``id``, of which what is before message ``first`` is context alone."""

    id: str
    messages: Sequence[Mapping[str, Any]]
    tools: Tools
    first: int = 0

    def tidied(self) -> tuple[ChatMessage, ...]:
        """The messages in one form, without what says which are learnt. Raises MessagesRefused."""
        return tidied([{key: value for key, value in one.items() if key not in _MARKS} for one in self.messages])

    def learnt(self) -> tuple[tuple[ChatMessage, ...], list[int]]:
        """The messages in one form, and which of them are turns to learn. Raises MessagesRefused."""
        known = self.tidied()
        said = [place for place, one in enumerate(known) if one["role"] == "assistant" and place >= self.first]
        turns = [place for place in said if _weight(place, self.messages[place])]
        if turns[:1] == [0]:
            raise MessagesRefused(_ANSWERS_NOBODY)
        return known, turns

    def scored(self) -> tuple[ChatMessage, ...]:
        """The messages in one form, of a conversation that is scored as a whole. Raises MessagesRefused."""
        known = self.tidied()
        if known[0]["role"] == "assistant" and _weight(0, self.messages[0]):
            raise MessagesRefused(_ANSWERS_NOBODY)
        if (last := known[-1]["role"]) != "assistant":
            raise MessagesRefused(
                f"message {len(known)}, the last, is of the role {last!r:.40}, and what is scored is an answer; end "
                "the conversation with the assistant's"
            )
        return known


def _read(prompt: Prompt) -> WrittenConversation:
    said = json.loads(prompt.text)
    return WrittenConversation(id=prompt.id, messages=said["messages"], tools=said["tools"], first=said.get("first", 0))


def check_each(prompts: Iterable[Prompt], check: Callable[[Prompt], object]) -> None:
    """Raises DataError that names each of the prompts that ``check`` refuses."""
    bad = list[str]()
    for prompt in prompts:
        try:
            check(prompt)
        except DataError as error:
            bad.append(str(error))
        except MessagesRefused as error:
            bad.append(f"prompt {prompt.id!r}: {error}")
    if bad:
        raise DataError(listed(bad))


def check_turns(prompts: Iterable[Prompt]) -> None:
    """Raises DataError that names each of the conversations of which no template makes rows."""
    check_each(prompts, lambda prompt: _read(prompt).learnt())


def end_of_turns(tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int]) -> int | None:
    """The token with which turns of conversations are learnt to end; None for a tokenizer without a chat template, and
    for one that ends no turn or does not show it after its own prompt."""
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    made_up = Prompt(id="", text=json.dumps({"messages": messages, "tools": []}), token_ids=(), answer="")
    try:
        (row,) = WrittenConversations(tokenizer, stop_token_ids).rows([made_up])
    except (ConfigError, DataError):
        return None
    return int(row.token_ids[-1])


@dataclass(slots=True)
class _Texts:
    """The texts of a row, one after the other, and whether each is a turn to learn."""

    parts: list[tuple[str, bool]]

    @property
    def whole(self) -> str:
        return "".join(text for text, _ in self.parts)


class WrittenConversations:
    """Makes rows of conversations by the chat template of a model, whose sampling ends with ``stop_token_ids``."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int]) -> None:
        """Raises ConfigError for a tokenizer without a usable chat template. One that writes today's date writes this
        moment's in all rows: midnight must not come between two texts of one."""
        now = {"strftime_now": datetime.now().astimezone().strftime}
        self._tokenizer, self._template = tokenizer, ChatTemplate(tokenizer, options=now)
        self._stops, self._warned = np.array(stop_token_ids, np.int32), False
        self._endings = tuple(
            self._template.decode(self._stops[i : i + 1], special=True) for i in range(len(self._stops))
        )

    def rows(self, prompts: Sequence[Prompt]) -> list[WrittenRow]:
        """The rows of the prompts, of each one or several, in their order. Raises as ``rows_of``."""
        found = self.rows_of([_read(one) for one in prompts])
        return [row for rows in found for row in rows]

    def rows_of(self, conversations: Sequence[WrittenConversation]) -> list[list[WrittenRow]]:
        """The rows of each conversation.

        Raises DataError that names its prompt: the template refuses its messages, does not show a turn after its own
        prompt, or writes no token before it, or none there that ends sampling.
        """
        made = list[list[_Texts]]()
        for one in conversations:
            try:
                made.append(self._texts(one))
            except MessagesRefused as error:
                raise DataError(f"prompt {one.id!r}: {error}") from error
        texts = [text for rows in made for row in rows for text, _ in row.parts]
        encoded = iter(self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
        return [
            [self._row(one.id, row, [next(encoded) for _ in row.parts]) for row in rows]
            for one, rows in zip(conversations, made, strict=True)
        ]

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

    def _texts(self, conversation: WrittenConversation) -> list[_Texts]:
        (known, turns), tools, rows = conversation.learnt(), conversation.tools, list[_Texts]()
        self._check_parts(conversation, known)
        for place in turns:
            if not _says_anything(conversation.messages[place]):
                raise MessagesRefused(
                    f"message {place + 1} has neither content nor tool_calls, so a model would learn to say nothing; "
                    "name its text content, or give it a weight of 0"
                )
            _check_turn(place, known[place])
            prompt, turn = self._prompt_and_turn(known[: place + 1], tools)
            turn += self._ending(prompt + turn, known, place, tools)
            before = rows[-1].whole if rows else None
            if before is not None and prompt.startswith(before):
                rows[-1].parts += [(prompt[len(before) :], False), (turn, True)]
            else:
                rows.append(_Texts([(prompt, False), (turn, True)]))
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
        if whole.rstrip().endswith(self._endings):
            return ""
        bare = [without_thinking(one) for one in known[: place + 1]]
        behind = known[place + 1] if place + 1 < len(known) else {"role": "user", "content": "."}
        whole = self._template.render(bare, tools, opened=False)  # without thinking, which is dropped before users
        more = self._template.render([*bare, behind], tools, opened=False)
        found = more[len(whole) :] if more.startswith(whole) else ""
        return next((ending for ending in self._endings if found.startswith(ending)), "")

    def _row(self, name: str, row: _Texts, encoded: Sequence[Sequence[int]]) -> WrittenRow:
        tokens, turns = list[int](), list[tuple[int, int]]()
        for (text, is_turn), ids in zip(row.parts, encoded, strict=True):
            if is_turn:
                ends = np.flatnonzero(np.isin(np.array(ids, np.int64), self._stops))
                if not len(ends) or self._tokenizer.decode(ids[ends[-1] + 1 :]).strip():
                    raise DataError(
                        f"prompt {name!r}: the chat template ends a turn with {text[-40:]!r}, in which no token ends "
                        f"sampling (ids {self._stops.tolist()}), so a model would learn to go on; add its id to "
                        "eos_token_id in generation_config.json"
                    )
                if behind := self._tokenizer.decode(ids[ends[0] + 1 : ends[-1]], skip_special_tokens=True).strip():
                    raise DataError(
                        f"prompt {name!r}: a turn goes on with {behind[:40]!r} after a token that ends sampling (id "
                        f"{ids[ends[0]]}), where no model would; take that token's text out of the message, or "
                        "give it a weight of 0"
                    )
                if not tokens:
                    raise DataError(
                        f"prompt {name!r}: the chat template writes nothing before its first turn, {text[:40]!r}, and "
                        "tokens are learnt behind others; give the messages before it a text"
                    )
                turns.append((len(tokens), len(tokens) + int(ends[0]) + 1))
            tokens += ids
        return WrittenRow(id=name, token_ids=np.array(tokens[: turns[-1][1]], np.int32), turns=tuple(turns))


def _says_anything(message: Mapping[str, Any]) -> bool:
    """Whether an assistant's message has a text, which may be empty, or what stands for one."""
    return message.get("content") is not None or any(message.get(key) for key in (*LOSABLE, *REASONING))


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


def _weight(place: int, message: Mapping[str, Any]) -> int:
    """Whether to train on a message, as its marks say; 1 without any."""
    marks = {key: value for key in _MARKS if (value := message.get(key)) is not None}
    for key, value in marks.items():
        if key in _DETAILS:
            raise MessagesRefused(
                f"message {place + 1}: {key}={value!r:.100} names parts of it, and a turn is learnt as a whole or not "
                "at all; write train instead, or weight"
            )
        if value not in (0, 1):
            raise MessagesRefused(f"message {place + 1}: {key}={value!r:.100}; it must be 0 or 1, or false or true")
    if len(said := set(map(int, marks.values()))) > 1:
        raise MessagesRefused(
            f"message {place + 1}: {', '.join(f'{key}={value!r}' for key, value in marks.items())} say different "
            "things; keep one of them"
        )
    return said.pop() if said else 1
