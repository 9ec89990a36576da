"""Conversations of supervised data, as rows of tokens: each turn of the assistant after the prompt that it answers.

A turn is trained on after the very prompt for which the model would sample it, as the chat template writes that. Where
a template shows a turn otherwise later on (Qwen3 drops its thinking), the turns after it begin a new row. The
template's texts and the turns' are encoded apart, as they are when a model samples. To find the template's text after a
turn, that turn is rendered with marks. The text after the last mark is encoded alone. Marks are characters of Unicode's
private use. No model has code of its own here.

In a pair of conversations, the rest after the messages that both begin with is the better and the worse answer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from typing_extensions import override

from rl_megatron.agents.conversation.forms import (
    SIDES,
    TrainingConversation,
    differing_sides,
    written_conversation,
    written_sides,
)
from rl_megatron.agents.conversation.messages import (
    LOSABLE,
    REASONING,
    ChatMessage,
    UnsupportedMessages,
    content_parts,
    get_reasoning,
    messages_losing_content,
)
from rl_megatron.agents.conversation.rendering import THOUGHT, ChatRenderer, strip_thinking
from rl_megatron.agents.conversation.templates import (
    RenderedPrompt,
    Rewritten,
    Template,
    Tools,
    decode_text,
    encode_text,
)
from rl_megatron.columns import TokenIds
from rl_megatron.data.samples import Pair, SupervisedRow
from rl_megatron.errors import ConfigError, DataError
from rl_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RowTexts:
    """The texts of a row, one after the other, and whether each is a turn to learn."""

    parts: list[tuple[str, bool]]

    @property
    def whole(self) -> str:
        """All of them as one text."""
        return "".join(text for text, _ in self.parts)


def _check_turn(place: int, message: ChatMessage) -> None:
    """Raises UnsupportedMessages for a normalized message that no model should learn to write."""
    for call in message.get("tool_calls", ()):
        if not isinstance(arguments := call["function"]["arguments"], Mapping):
            raise UnsupportedMessages(
                f"message {place + 1}: the arguments of its call of {call['function']['name']:.100} are no object in "
                f"JSON, but {arguments!r:.100}, so a model would learn a call that nothing can read; write them as "
                "one, or give the message a weight of 0"
            )
    if get_reasoning(message) and THOUGHT in message["content"]:
        raise UnsupportedMessages(
            f"message {place + 1} has thinking twice, as reasoning_content and before {THOUGHT} in its content, so a "
            "model would learn to write both; leave one of them out, or give the message a weight of 0"
        )


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
        """``thinking="keep"``: rows continue where the template drops the thinking of turns and does nothing else.

        Raises ConfigError as `ChatRenderer`, and for a tokenizer that alters texts.
        """
        super().__init__(tokenizer, options)
        sample = "\n user: 1"
        if (back := decode_text(tokenizer, encode_text(tokenizer, sample), special=True)) != sample:
            raise ConfigError(
                f"the model's tokenizer makes {back!r} of {sample!r}, so the text that its template writes after a "
                "turn cannot be encoded alone; use a tokenizer that decodes every text to itself"
            )
        self._tokenizer, self._thinking = tokenizer, thinking
        self._stops = dict[int, str]()
        self._special = tuple(token.content for token in tokenizer.added_tokens_decoder.values())

    @override
    def begin(self, messages: Sequence[ChatMessage], tools: Tools) -> tuple[TokenIds, RenderedPrompt]:
        text = self.render(messages, tools)
        return encode_text(self._tokenizer, text), RenderedPrompt(text=text, messages=messages, tools=tools)

    @override
    def extend(
        self, before: RenderedPrompt, messages: Sequence[ChatMessage], tools: Tools, ended: int | None
    ) -> tuple[TokenIds, RenderedPrompt] | Rewritten:
        found = self._text_after_turn(before, messages, tools)
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
        return encode_text(self._tokenizer, text), RenderedPrompt(text=shown, messages=messages, tools=tools)

    @override
    def renders_equal(self, one: Sequence[ChatMessage], other: Sequence[ChatMessage], tools: Tools) -> bool:
        return self.render(one, tools) == self.render(other, tools)

    @override
    def decode(self, token_ids: TokenIds, *, special: bool = False) -> str:
        return decode_text(self._tokenizer, token_ids, special=special)

    def _text_of_stop(self, token: int) -> str:
        if token not in self._stops:
            self._stops[token] = decode_text(self._tokenizer, np.array([token], np.int32), special=True)
        return self._stops[token]

    def _text_after_turn(
        self, before: RenderedPrompt, messages: Sequence[ChatMessage], tools: Tools
    ) -> tuple[str, bool, str | None] | Rewritten:
        """Returns the text after the turn's last mark, whether it has the turn's calls, and the whole without marks.

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
            except UnsupportedMessages:
                continue
        else:
            return "refused"
        parts = _parted(now, marked)
        if parts is not None and self._extends(parts, before):
            return parts.suffix, has_calls, None if "tool_calls" in turn else parts.whole
        bare = [strip_thinking(message) for message in messages]
        marked = bare[place] = _marked(bare[place], has_calls)
        parts = _parted(self.render(bare, tools), marked)
        if parts is None or not parts.is_prefix(self.render(bare[:place], before.tools, opened=False)):
            return "context"
        return (parts.suffix, has_calls, None) if self._thinking == "keep" else "thinking"

    def _extends(self, now: _Parts, before: RenderedPrompt) -> bool:
        """True if the text begins with the prompt before. A history may not show the prompt's opening of a turn."""
        text = self.render(before.messages, before.tools) if before.text is None else before.text
        return now.is_prefix(text) or now.is_prefix(self.render(before.messages, before.tools, opened=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """A text that had a turn's marks in it."""

    whole: str  # the text without the marks
    first: int  # place of the first mark in ``whole``
    suffix: str  # text after the last mark

    def is_prefix(self, text: str) -> bool:
        """True if the text begins with this one, before all marks."""
        return len(text) <= self.first and self.whole.startswith(text)


def _marked(turn: ChatMessage, has_calls: bool) -> ChatMessage:
    """Returns the turn with a mark in its reasoning and one at its content's end, or at both ends of a content alone.

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
    """Returns the text's parts; None unless it has each mark of the turn once.

    A mark is looked for from the end, which it is near, and then in the text before it. The second search takes no time
    in a text of ASCII or Latin 1, whatever its length.
    """
    put, first, last = marked.get(REASONING[0], "") + marked["content"], len(text), len(text)
    for mark in (_FRONT, _BACK):
        if mark not in put:
            continue
        before, found, behind = text.rpartition(mark)
        if not found or mark in before or put.count(mark) != 1:
            return None
        text, first, last = before + behind, min(first, len(before)), min(last, len(behind))
    return _Parts(whole=text, first=first, suffix=text[len(text) - last :])


def end_of_turns(tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int]) -> int | None:
    """Returns the token with which turns of conversations are learned to end. None for a tokenizer without a chat
    template, and for one that ends no turn or does not show it after its own prompt."""
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    made_up = Prompt(id="", text=json.dumps({"messages": messages, "tools": []}), token_ids=(), answer="")
    try:
        (row,) = ConversationRows(tokenizer, stop_token_ids).rows([made_up])
    except (ConfigError, DataError):
        return None
    return int(row.token_ids[-1])


class ConversationRows:
    """Makes rows of conversations by the chat template of a model, whose sampling ends with ``stop_token_ids``."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int]) -> None:
        """Raises ConfigError for a tokenizer without a usable chat template. One that writes today's date writes this
        moment's in all rows: midnight must not come between two texts of one."""
        now = {"strftime_now": datetime.now().astimezone().strftime}
        self._template, self._warned = ChatTemplate(tokenizer, options=now), False
        self._tokenizer, self._stops = tokenizer, np.array(stop_token_ids, np.int32)
        each = (self._stops[i : i + 1] for i in range(len(self._stops)))
        self._endings = tuple(self._template.decode(one, special=True) for one in each)

    def rows(self, prompts: Sequence[Prompt]) -> list[SupervisedRow]:
        """Returns the rows of the prompts, one or several for each, in their order. Raises as ``make_rows``."""
        found = self.make_rows([written_conversation(one) for one in prompts])
        return [row for rows in found for row in rows]

    def make_rows(self, conversations: Sequence[TrainingConversation]) -> list[list[SupervisedRow]]:
        """Returns the rows of each conversation.

        Raises DataError that names its prompt if the template refuses its messages, or does not show a turn after its
        own prompt. Also if it writes no token before the turn, or none there that ends sampling.
        """
        made = [self.texts(one) for one in conversations]
        texts = [text for rows in made for row in rows for text, _ in row.parts]
        encoded = iter(self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
        return [
            [self._row(one.id, row, [next(encoded) for _ in row.parts]) for row in rows]
            for one, rows in zip(conversations, made, strict=True)
        ]

    def texts(self, conversation: TrainingConversation) -> list[RowTexts]:
        """Returns the rows of a conversation. Raises DataError that names its prompt, as `make_rows`."""
        try:
            return self._rows(conversation)
        except UnsupportedMessages as error:
            raise DataError(f"prompt {conversation.id!r}: {error}") from error

    def whole(self, conversation: TrainingConversation) -> str:
        """Returns the template's text of all messages.

        Raises DataError that names the prompt, as for calls or an answer's content that are not in it.
        """
        try:
            known = conversation.scored_messages()
            self._check_parts(conversation, known)
            text, places = (
                self._template.render(known, conversation.tools, opened=False),
                messages_losing_content(known),
            )
            for place, part in self._template.lost(known, conversation.tools, places) if places else ():
                is_context = place < len(known) - 1
                if is_context and part in ("reasoning", "content"):  # gpt-oss's content of a call is thinking
                    self._warn(conversation.id, place, part)
                elif part != "reasoning":
                    raise UnsupportedMessages(
                        f"message {place + 1}: the model's chat template does not write its {part}, so what is scored "
                        "would lack it; give the model a template that writes it"
                    )
            return text
        except UnsupportedMessages as error:
            raise DataError(f"prompt {conversation.id!r}: {error}") from error

    def _rows(self, conversation: TrainingConversation) -> list[RowTexts]:
        (known, turns), tools, rows = conversation.learned(), conversation.tools, list[RowTexts]()
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

    def _check_parts(self, conversation: TrainingConversation, known: Sequence[ChatMessage]) -> None:
        """Raises UnsupportedMessages for contents of several texts, if the template does not join them as they are."""
        parts = content_parts(conversation.messages)
        if parts and not self._template.joins(known, parts, conversation.tools):
            raise UnsupportedMessages(
                f"message {next(iter(parts)) + 1} has a content of several texts, which the model's chat template does "
                "not put one after the other (vLLM would put a line feed between them, SGLang a blank): make them one "
                "text, with what belongs between them"
            )

    def _prompt_and_turn(self, known: Sequence[ChatMessage], tools: Tools) -> tuple[str, str]:
        """Returns the texts before the last message and of it."""
        place = len(known) - 1
        prompt = self._template.render(known[:place], tools)
        whole = self._template.render(known, tools, opened=False)
        if not whole.startswith(prompt):
            at = next(i for i, (one, other) in enumerate(zip(prompt, whole + "\0", strict=False)) if one != other)
            raise UnsupportedMessages(
                f"message {place + 1}: the chat template's prompt for it has {prompt[at : at + 40]!r} where with the "
                f"message there is {whole[at : at + 40]!r}, so which tokens the model would sample is not known; "
                "write the message as the model says it (with its thinking), or give it a weight of 0"
            )
        turn = whole[len(prompt) :]
        if lost := self._lost(known, tools, turn):
            raise UnsupportedMessages(
                f"message {place + 1}: the model's chat template does not write its {lost}, so a model would learn to "
                "leave it out; give the model a template that writes it, or the message a weight of 0"
            )
        return prompt, turn

    def _lost(self, known: Sequence[ChatMessage], tools: Tools, turn: str) -> str:
        """Returns the name of a part of the last message that is not in its turn's text; empty if there is none."""
        message = known[-1]
        for call in message.get("tool_calls", ()):
            if (name := call["function"]["name"]) not in turn:
                return f"call of {name}"
        texts = message["content"].strip(), get_reasoning(message).strip()
        if message.keys().isdisjoint(LOSABLE) and all(text in turn for text in texts):
            return ""
        return next((part for _, part in self._template.lost(known, tools, [len(known) - 1])), "")

    def _look_at_context(self, name: str, known: Sequence[ChatMessage], turns: Sequence[int], tools: Tools) -> None:
        """Warns of parts that the template leaves out of messages before the last turn that are context alone."""
        places = [place for place in messages_losing_content(known[: turns[-1]]) if place not in turns] if turns else []
        if places and not self._warned:
            for place, part in self._template.lost(known[: turns[-1] + 1], tools, places):
                self._warn(name, place, part)

    def _warn(self, name: str, place: int, part: str) -> None:
        """Warns, once, of a part of a message that is context; thinking is left out there by intent."""
        if part == "reasoning" or self._warned:
            return
        self._warned = True
        logger.warning(
            "prompt %r: message %d: the model's chat template does not write its %s, so what follows is learned "
            "without that, in other rows too; a template that writes it would keep it",
            *(name, place + 1, part),
        )

    def _ending(self, whole: str, known: Sequence[ChatMessage], place: int, tools: Tools) -> str:
        """Returns the text that ends a message's sampling but is in the next message: GLM's models stop by its role."""
        if not self._endings or whole.rstrip().endswith(self._endings):
            return ""
        bare = [strip_thinking(one) for one in known[: place + 1]]
        behind = known[place + 1] if place + 1 < len(known) else {"role": "user", "content": "."}
        whole = self._template.render(bare, tools, opened=False)  # thinking is dropped before users, so it is stripped
        more = self._template.render([*bare, behind], tools, opened=False)
        found = more[len(whole) :] if more.startswith(whole) else ""
        return next((ending for ending in self._endings if found.startswith(ending)), "")

    def _row(self, name: str, row: RowTexts, encoded: Sequence[Sequence[int]]) -> SupervisedRow:
        tokens, turns = list[int](), list[tuple[int, int]]()
        for (text, is_turn), ids in zip(row.parts, encoded, strict=True):
            if is_turn:
                ends = np.flatnonzero(np.isin(np.array(ids, np.int64), self._stops))
                if not len(ends) or self._tokenizer.decode(ids[ends[-1] + 1 :]).strip():
                    raise DataError(
                        f"prompt {name!r}: the chat template ends a turn with {text[-40:]!r}, in which no token ends "
                        f"sampling (ids {self._stops.tolist()}), so a model would learn to continue; add its id to "
                        "eos_token_id in generation_config.json"
                    )
                if behind := self._tokenizer.decode(ids[ends[0] + 1 : ends[-1]], skip_special_tokens=True).strip():
                    raise DataError(
                        f"prompt {name!r}: a turn continues with {behind[:40]!r} after a token that ends sampling (id "
                        f"{ids[ends[0]]}), where no model would; take that token's text out of the message, or "
                        "give it a weight of 0"
                    )
                if not tokens:
                    raise DataError(
                        f"prompt {name!r}: the chat template writes nothing before its first turn, {text[:40]!r}, and "
                        "a model learns tokens only after others; give the messages before it a text"
                    )
                turns.append((len(tokens), len(tokens) + int(ends[0]) + 1))
            tokens += ids
        return SupervisedRow(id=name, token_ids=np.array(tokens[: turns[-1][1]], np.int32), turns=tuple(turns))


def split_answer_pair(prompts: Sequence[Prompt], conversations: ConversationRows) -> list[Pair]:
    """Returns the rows of either conversation's turns after their common beginning.

    Raises DataError that names the prompt, as `ConversationRows.rows_of` does. Also if they first differ in a message
    that is not the assistant's, or one has no turn to learn there. Also if a template shows one of these turns
    otherwise later on, so that they are in several rows. Also if it shows both alike, as it trims white space.
    """
    found = conversations.make_rows([side for prompt in prompts for side in differing_sides(prompt)])
    pairs = []
    for number, prompt in enumerate(prompts):
        for which, rows in zip(SIDES, found[2 * number : 2 * number + 2], strict=True):
            if len(rows) != 1:
                raise DataError(
                    f"prompt {prompt.id!r}: the turns of its {which} conversation that the other lacks are in "
                    f"{len(rows)} rows, because the chat template shows one of them otherwise later on; end both "
                    "conversations with the first message that differs"
                )
        better, worse = found[2 * number][0], found[2 * number + 1][0]
        if np.array_equal(better.token_ids, worse.token_ids):
            raise _equal_prefix(prompt)
        pairs.append((better, worse))
    return pairs


def single_answers(prompts: Sequence[Prompt], conversations: ConversationRows) -> list[tuple[Prompt, SupervisedRow]]:
    """Returns the row of each conversation's turns, without conversations that have none to learn.

    Raises DataError that names the prompt, as `ConversationRows.rows_of` does, and where turns are in several rows.
    """
    found = conversations.make_rows([written_conversation(one) for one in prompts])
    for prompt, rows in zip(prompts, found, strict=True):
        if len(rows) > 1:
            raise DataError(
                f"prompt {prompt.id!r}: the turns that its label is of are in {len(rows)} rows, because the chat "
                "template shows one of them otherwise later on; end the conversation with the first"
            )
    return [(prompt, row) for prompt, rows in zip(prompts, found, strict=True) for row in rows]


def split_text_pair(prompts: Sequence[Prompt], conversations: ConversationRows) -> list[tuple[str, str]]:
    """Returns the chat template's texts of both conversations. Raises DataError that names the prompt, as
    `ConversationRows.whole` does, and where the texts are equal."""
    found = []
    for prompt in prompts:
        better, worse = written_sides(prompt)
        texts = conversations.whole(better), conversations.whole(worse)
        if texts[0] == texts[1]:
            raise _equal_prefix(prompt)
        found.append(texts)
    return found


def _equal_prefix(prompt: Prompt) -> DataError:
    return DataError(
        f"prompt {prompt.id!r}: the chat template's texts of both conversations are equal, as it leaves out where they "
        "differ, so there is nothing to compare; remove the row, or give the model a template that shows it"
    )
