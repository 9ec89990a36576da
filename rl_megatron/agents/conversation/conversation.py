"""One conversation: prompts that keep sampled tokens as they are, and the rows to train on.

Where clients write prompts as tokens, rows are joined by exact prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from rl_megatron.agents.conversation.messages import (
    ChatMessage,
    UnsupportedMessages,
    merge_keys,
    messages_losing_content,
    normalize_messages,
    same,
    same_for_client,
)
from rl_megatron.agents.conversation.templates import RenderedPrompt, Rewritten, Template, Tools
from rl_megatron.columns import ColumnData, TokenIds, freeze
from rl_megatron.data.samples import columns_of_request, columns_of_row, make_turn
from rl_megatron.types import Completion, TokenSequence, Turn


@dataclass(slots=True, kw_only=True, eq=False)
class _Row:
    tokens: TokenIds
    turns: tuple[Turn, ...]
    columns: tuple[Mapping[str, ColumnData], ...] = ()  # one mapping of each turn's request


class TokenRows:
    """Rows by exact prefix: a prompt that begins with a whole row extends that row; any other begins a new one."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []

    def add(self, prompt: TokenIds, completion: Completion, text: str) -> Turn | None:
        """Adds the tokens sampled after the ``prompt``, [L] int32. Returns the turn at its place; None without any.
        Raises EngineError for a column that does not fit."""
        if not len(completion.token_ids):
            return None
        turn = make_turn(len(prompt), completion, text)
        begun = [row for row in self._rows if np.array_equal(row.tokens, prompt[: len(row.tokens)])]
        row = max(begun, key=lambda one: len(one.tokens), default=None)
        if row is None:
            row = _Row(tokens=prompt, turns=())
            self._rows.append(row)
        after = len(row.tokens) if row.turns else 0
        row.columns += (columns_of_request(completion, turn.stop, after=after),)
        row.tokens, row.turns = np.concatenate((prompt, completion.token_ids)), (*row.turns, turn)
        return turn

    def rows(self) -> Iterator[TokenIds]:
        """Returns the tokens of all rows so far."""
        return (row.tokens for row in self._rows)

    def chains(self) -> tuple[TokenSequence, ...]:
        """Returns the rows to train on; each turn is in one."""
        return tuple(
            TokenSequence(token_ids=row.tokens, turns=row.turns, columns=columns_of_row(row.columns, len(row.tokens)))
            for row in self._rows
        )


Branch = Rewritten | Literal["edited", "again"]
"""The reason why a prompt begins a row after the first: its template's, or one of two others. ``edited``: the last
assistant message was not sampled after these messages. ``again``: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnPrompt:
    """The prompt of one turn, to send to an engine and to give back with its answer."""

    token_ids: TokenIds  # [L] int32
    branch: Branch | None  # None: it extends a turn's row, or is the conversation's first
    rendered: RenderedPrompt = field(repr=False)
    previous_turn: SampledTurn | None = field(repr=False)  # the turn with the row that it extends
    node: Node = field(repr=False)  # the last of its messages that is in the tree
    new_messages: Sequence[ChatMessage] = field(repr=False)  # the messages after that one

    def __post_init__(self) -> None:
        freeze(self.token_ids)


@dataclass(slots=True, kw_only=True, eq=False)
class SampledTurn:
    """A turn with its place. Its row extends the row of the turn ``previous_turn``, whose tokens it does not hold
    again."""

    branch: Branch | None
    rendered: RenderedPrompt  # its prompt; without its text once another row has extended the turn's
    previous_turn: SampledTurn | None
    completion: Completion  # has no columns
    columns: Mapping[str, ColumnData]  # entries of the positions that it computed first
    added_tokens: TokenIds  # [n] int32, tokens of its prompt and completion after the row of ``previous_turn``
    length: int  # tokens of its row
    turn: Turn | None  # None if no token was sampled

    @property
    def row(self) -> TokenIds:
        """[length] int32: the prompt and the completion."""
        parts, one = [self.added_tokens], self.previous_turn
        while one is not None:
            parts.append(one.added_tokens)
            one = one.previous_turn
        return np.concatenate(parts[::-1])


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """A message of the tree. Several children may be equal: turns sampled for the same messages."""

    message: ChatMessage
    parent: Node | None
    sampled: SampledTurn | None = None
    children: list[Node] = field(default_factory=list)


class Conversation:
    """The messages of one agent's run, as a tree. Sampled messages have their tokens there."""

    def __init__(self, template: Template, stop_token_ids: Collection[int] | None = None) -> None:
        self._template, self._stop_token_ids = template, stop_token_ids
        self._root = Node(message={}, parent=None)
        self._sampled: list[SampledTurn] = []

    def prompt_for(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> TurnPrompt:
        """Returns the prompt for the turn that answers ``messages``. It changes nothing, and calls may be concurrent.

        It extends the row of the last assistant message, if that was sampled after the messages before it and the
        template allows. Of equal turns it extends the newest one's row. Raises UnsupportedMessages, also for calls of
        messages that were not sampled, if the template leaves them out."""
        given = normalize_messages(messages)
        last = _last_turn(given)
        path = self._find_nodes(given, last, tools)
        known = (*(node.message for node in path), *given[len(path) :])
        after = path[last].sampled if 0 <= last < len(path) else None
        branch: Branch | None = ("again" if last < 0 else "edited") if self._sampled else None
        if after is not None:
            ended = int(after.completion.token_ids[-1]) if after.completion.finish_reason == "stop" else None
            if self._stop_token_ids is not None and ended not in self._stop_token_ids:
                ended = None  # a text ended it
            found = self._template.extend(after.rendered, known, tools, ended)
            if isinstance(found, str):
                after, branch = None, found
            else:
                (tokens, rendered), branch = found, None
                tokens = np.concatenate((after.row, tokens))
        if after is None:
            tokens, rendered = self._template.begin(known, tools)
            self._check_calls(known, tools, {place for place, node in enumerate(path) if node.sampled is not None})
        return TurnPrompt(
            token_ids=tokens,
            branch=branch,
            rendered=rendered,
            previous_turn=after,
            node=path[-1] if path else self._root,
            new_messages=given[len(path) :],
        )

    def cannot_show_turn(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> bool:
        """True if the template refuses the last assistant message, which was sampled, and not those before it."""
        given = normalize_messages(messages)
        last = _last_turn(given)
        path = self._path(given, last, same_for_client)
        if not 0 <= last < len(path) or path[last].sampled is None:
            return False
        known = [node.message for node in path]
        try:
            self._template.begin(known[:last], tools)
        except UnsupportedMessages:
            return False
        try:
            self._template.begin(known, tools)
        except UnsupportedMessages:
            return True
        return False

    def add(self, prompt: TurnPrompt, completion: Completion, message: ChatMessage) -> Turn | None:
        """Adds what an engine sampled for a prompt, and the assistant ``message`` that the client gets and sends back.

        Returns the turn at its place in its row; None without a sampled token. Raises UnsupportedMessages for another
        role, and EngineError for a column that does not fit."""
        (answer,) = normalize_messages((message,))
        if answer["role"] != "assistant":
            raise UnsupportedMessages(f"a sampled message has the role {answer['role']!r}; it must be 'assistant'")
        turn = Turn(
            start=len(prompt.token_ids),
            logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            spans=completion.spans,
            text=self._template.decode(completion.token_ids),
        )
        begun = 0
        if (before := prompt.previous_turn) is not None:
            begun, before.rendered = before.length, replace(before.rendered, text=None)
        length = len(prompt.token_ids) + len(completion.token_ids)
        sampled = SampledTurn(
            branch=prompt.branch,
            rendered=prompt.rendered,
            previous_turn=prompt.previous_turn,
            completion=replace(completion, columns={}),
            columns=columns_of_request(completion, length, after=begun),
            added_tokens=np.concatenate((prompt.token_ids[begun:], completion.token_ids)),
            length=length,
            turn=turn if len(turn.logprobs) else None,
        )
        node = prompt.node
        for new in prompt.new_messages:
            again = (child for child in node.children if child.sampled is None and same(child.message, new))
            node = next(again, None) or _child(node, new)
        _child(node, answer).sampled = sampled
        self._sampled.append(sampled)
        return sampled.turn

    def branches(self) -> Mapping[Branch, int]:
        """Returns the number of turns that began a row after the first, by reason."""
        return Counter(one.branch for one in self._sampled if one.branch is not None)

    def rows(self) -> Iterator[TokenIds]:
        """Returns the tokens of all rows so far."""
        return (one.row for one in self._ends())

    def chains(self) -> tuple[TokenSequence, ...]:
        """Returns the rows to train on: each turn is in one of them, and is context in others that extend it."""
        used, rows = set[int](), []
        for end in sorted(self._ends(), key=lambda one: one.turn is None):
            row = [end]
            while (before := row[0].previous_turn) is not None:
                row.insert(0, before)
            turns = tuple(one.turn for one in row if one.turn is not None and id(one) not in used)
            used |= {id(one) for one in row}
            if turns:
                tokens = end.row[: turns[-1].stop]
                columns = columns_of_row([one.columns for one in row], len(tokens))
                rows.append(TokenSequence(token_ids=tokens, turns=turns, columns=columns))
        return tuple(rows)

    def _ends(self) -> list[SampledTurn]:
        """Returns the turns that no other turn extends."""
        gone_on = {id(one.previous_turn) for one in self._sampled}
        return [one for one in self._sampled if id(one) not in gone_on]

    def _check_calls(self, messages: Sequence[ChatMessage], tools: Tools, sampled: Collection[int]) -> None:
        """Raises UnsupportedMessages for parts of unsampled messages that the template drops. Thinking is exempt
        (dropped by intent), and so is content next to calls (some models have no place for it)."""
        places = [place for place in messages_losing_content(messages) if place not in sampled]
        for place, part in self._template.lost(messages, tools, places) if places else ():
            if part not in ("reasoning", "content"):
                raise UnsupportedMessages(
                    f"message {place + 1}: the model's chat template does not write its {part}, so the model would not "
                    "read it; give the model a template that writes it, or say it in the message's content"
                )

    def _find_nodes(self, given: Sequence[ChatMessage], last: int, tools: Tools) -> list[Node]:
        """Returns the nodes of the known messages, up to the message ``last``.

        Clients add keys to messages that they send back (``name``, ``provider_specific_fields``). These make another
        message only where they change the template's text.
        """
        path = self._path(given, last, same_for_client)
        own, new = [node.message for node in path], given[len(path) :]
        sent = [merge_keys(one, other) for one, other in zip(own, given, strict=False)]
        if sent == own or self._template.renders_equal((*own, *new), (*sent, *new), tools):
            return path
        return self._path(given, last, same)

    def _path(
        self, given: Sequence[ChatMessage], last: int, equal: Callable[[ChatMessage, ChatMessage], bool]
    ) -> list[Node]:
        found, level = self._root, [self._root]
        for message in given[: last + 1]:
            level = [child for node in level for child in node.children if equal(child.message, message)]
            if not level:
                break
            found = level[-1]
        path: list[Node] = []
        while found.parent is not None:
            path.append(found)
            found = found.parent
        return path[::-1]


def _last_turn(given: Sequence[ChatMessage]) -> int:
    """Returns the place of the last assistant message, -1 if there is none."""
    return next((place for place in range(len(given) - 1, -1, -1) if given[place]["role"] == "assistant"), -1)


def _child(parent: Node, message: ChatMessage) -> Node:
    node = Node(message=message, parent=parent)
    parent.children.append(node)
    return node
