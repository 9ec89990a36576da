"""Rows of pairs of conversations that somebody wrote: what follows the messages that both begin with is the better and
the worse answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl_megatron.data.samples import Pair, WrittenRow
from rl_megatron.errors import DataError
from rl_megatron.rollout.conversation.forms import SIDES, behind_common, written_conversation, written_sides
from rl_megatron.rollout.conversation.written import WrittenConversations
from rl_megatron.types import Prompt


def paired_answers(prompts: Sequence[Prompt], conversations: WrittenConversations) -> list[Pair]:
    """The rows of either conversation's turns after their common beginning.

    Raises DataError that names the prompt: as `WrittenConversations.rows_of`; the conversations first differ in what
    the assistant did not say; one has no turn to learn there; a template shows one of these turns otherwise later on,
    so that they are in several rows; or it shows both alike, as it trims white space.
    """
    found = conversations.rows_of([side for prompt in prompts for side in behind_common(prompt)])
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
            raise _alike(prompt)
        pairs.append((better, worse))
    return pairs


def single_answers(prompts: Sequence[Prompt], conversations: WrittenConversations) -> list[tuple[Prompt, WrittenRow]]:
    """The row of each conversation's turns, without conversations that have none to learn.

    Raises DataError that names the prompt: as `WrittenConversations.rows_of`, and where turns are in several rows.
    """
    found = conversations.rows_of([written_conversation(one) for one in prompts])
    for prompt, rows in zip(prompts, found, strict=True):
        if len(rows) > 1:
            raise DataError(
                f"prompt {prompt.id!r}: the turns that its label is of are in {len(rows)} rows, because the chat "
                "template shows one of them otherwise later on; end the conversation with the first"
            )
    return [(prompt, row) for prompt, rows in zip(prompts, found, strict=True) for row in rows]


def paired_texts(prompts: Sequence[Prompt], conversations: WrittenConversations) -> list[tuple[str, str]]:
    """The chat template's texts of both conversations. Raises DataError that names the prompt: as
    `WrittenConversations.whole`, and where the texts are equal."""
    found = []
    for prompt in prompts:
        better, worse = written_sides(prompt)
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
