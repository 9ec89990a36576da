"""Pairs of conversations that somebody wrote: what follows the messages that both begin with is the better and the
worse answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import numpy as np

from rl_megatron.data.pairs import Pair
from rl_megatron.errors import DataError
from rl_megatron.rollout.conversation.messages import MessagesRefused
from rl_megatron.rollout.conversation.written import WrittenConversation, WrittenConversations, check_each
from rl_megatron.types import Prompt

_SIDES = ("better", "worse")
_Sides = tuple[WrittenConversation, WrittenConversation]


def paired_answers(prompts: Sequence[Prompt], conversations: WrittenConversations) -> list[Pair]:
    """The rows of either conversation's turns after their common beginning.

    Raises DataError that names the prompt: as `WrittenConversations.rows_of`; the conversations first differ in what
    the assistant did not say; one has no turn to learn there; a template shows one of these turns otherwise later on,
    so that they are in several rows; or it shows both alike, as it trims white space.
    """
    found = conversations.rows_of([side for prompt in prompts for side in _behind_common(prompt)])
    pairs = []
    for number, prompt in enumerate(prompts):
        for which, rows in zip(_SIDES, found[2 * number : 2 * number + 2], strict=True):
            if len(rows) != 1:
                raise DataError(
                    f"prompt {prompt.id!r}: the turns of its {which} conversation that the other lacks are in "
                    f"{len(rows)} rows, because the chat template shows one of them otherwise later on; end both "
                    "conversations with the first message that differs"
                )
        better, worse = found[2 * number][0], found[2 * number + 1][0]
        if np.array_equal(better.token_ids, worse.token_ids):
            raise _alike(prompt)
        pairs.append((better, worse))
    return pairs


def check_answers(prompts: Iterable[Prompt]) -> None:
    """Raises DataError that names each of the conversations of whose two sides `paired_answers` makes no pair."""
    check_each(prompts, _behind_common)


def check_texts(prompts: Iterable[Prompt]) -> None:
    """Raises DataError that names each pair with a conversation of which `paired_texts` makes no text."""
    check_each(prompts, lambda prompt: [side.scored() for side in _read(prompt)])


def paired_texts(prompts: Sequence[Prompt], conversations: WrittenConversations) -> list[tuple[str, str]]:
    """The chat template's texts of both conversations. Raises DataError that names the prompt: as
    `WrittenConversations.whole`, and where the texts are equal."""
    found = []
    for prompt in prompts:
        better, worse = _read(prompt)
        texts = conversations.whole(better), conversations.whole(worse)
        if texts[0] == texts[1]:
            raise _alike(prompt)
        found.append(texts)
    return found


def _alike(prompt: Prompt) -> DataError:
    return DataError(
        f"prompt {prompt.id!r}: the chat template's texts of both conversations are equal, as it leaves out where they "
        "differ, so there is nothing to compare; remove the row, or give the model a template that shows it"
    )


def _behind_common(prompt: Prompt) -> _Sides:
    try:
        return _answers(*_read(prompt))
    except MessagesRefused as error:
        raise DataError(f"prompt {prompt.id!r}: {error}") from error


def _answers(better: WrittenConversation, worse: WrittenConversation) -> _Sides:
    """Both from the first message on in which they differ. Raises MessagesRefused."""
    alike = zip(better.tidied(), worse.tidied(), strict=False)
    first = next((place for place, (one, other) in enumerate(alike) if one != other), None)
    if first is None:
        raise MessagesRefused("one conversation of its pair begins with the whole of the other")
    for side in (better, worse):
        if (role := side.messages[first].get("role")) != "assistant":
            raise MessagesRefused(
                f"its conversations first differ in message {first + 1}, of the role {role!r:.40}; a pair has two "
                "answers of the assistant to the same messages"
            )
    answers = _from(better, first), _from(worse, first)
    for which, side in zip(_SIDES, answers, strict=True):
        if not side.learnt()[1]:
            raise MessagesRefused(
                f"the assistant's messages of its {which} conversation have a weight of 0 from message {first + 1} on, "
                "where the other differs, so there is nothing to compare; remove the weight or the row"
            )
    return answers


def _read(prompt: Prompt) -> _Sides:
    said = json.loads(prompt.text)
    better, worse = (
        WrittenConversation(id=prompt.id, messages=said[side], tools=said["tools"]) for side in ("messages", "rejected")
    )
    return better, worse


def _from(side: WrittenConversation, first: int) -> WrittenConversation:
    return WrittenConversation(id=side.id, messages=side.messages, tools=side.tools, first=first)
