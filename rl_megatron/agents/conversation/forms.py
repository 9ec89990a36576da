"""Conversations of supervised data, and pairs of them: which messages are learned or scored, and checks of their form.

It needs no tokenizer and no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_megatron.agents.conversation.messages import (
    LOSABLE,
    REASONING,
    ChatMessage,
    UnsupportedMessages,
    normalize_messages,
)
from rl_megatron.agents.conversation.templates import Tools
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.jobs import JobName
from rl_megatron.data.problems.rows import listed
from rl_megatron.errors import DataError
from rl_megatron.types import Prompt

_DETAILS = ("train_detail", "training_detail")
_MARKS = ("weight", "train", "training", "train_on_turn", "loss", "trainable", *_DETAILS)
"""Keys of a message that say whether it is learned: OpenAI's, those of Axolotl's files, ms-swift's, and agents'."""
_ANSWERS_NOBODY = (
    "message 1 is the assistant's, which answers nobody; put one before it (where a row has the prompt's in another "
    "field, name that in data.fields.context), or give it a weight of 0"
)
SIDES = ("better", "worse")
Sides = tuple["TrainingConversation", "TrainingConversation"]
"""The better and the worse one of a pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConversation:
    """The conversation of the prompt ``id``. The messages before ``first`` are context alone."""

    id: str
    messages: Sequence[Mapping[str, Any]]
    tools: Tools
    first: int = 0

    def tidied(self) -> tuple[ChatMessage, ...]:
        """Returns the messages in normal form, without the marks of learned ones. Raises UnsupportedMessages."""
        return normalize_messages(
            [{key: value for key, value in one.items() if key not in _MARKS} for one in self.messages]
        )

    def learned(self) -> tuple[tuple[ChatMessage, ...], list[int]]:
        """Returns the messages in normal form, and the places of turns to learn. Raises UnsupportedMessages."""
        known = self.tidied()
        said = [place for place, one in enumerate(known) if one["role"] == "assistant" and place >= self.first]
        turns = [place for place in said if _weight(place, self.messages[place])]
        if turns[:1] == [0]:
            raise UnsupportedMessages(_ANSWERS_NOBODY)
        for place in turns:
            if not any(str(known[place].get(key) or "").strip() for key in ("content", *LOSABLE, *REASONING)):
                raise UnsupportedMessages(
                    f"message {place + 1} has neither content nor tool_calls, so a model would learn to say nothing; "
                    "name its text content, or give it a weight of 0"
                )
        return known, turns

    def scored_messages(self) -> tuple[ChatMessage, ...]:
        """Returns the messages in normal form, of a conversation to score as a whole. Raises UnsupportedMessages."""
        known = self.tidied()
        if known[0]["role"] == "assistant" and _weight(0, self.messages[0]):
            raise UnsupportedMessages(_ANSWERS_NOBODY)
        if (last := known[-1]["role"]) != "assistant":
            raise UnsupportedMessages(
                f"message {len(known)}, the last, is of the role {last!r:.40}, and what is scored is an answer; end "
                "the conversation with the assistant's"
            )
        return known


def written_conversation(prompt: Prompt) -> TrainingConversation:
    """Returns the conversation in the JSON of ``prompt.text``."""
    said = json.loads(prompt.text)
    return TrainingConversation(
        id=prompt.id, messages=said["messages"], tools=said["tools"], first=said.get("first", 0)
    )


def written_sides(prompt: Prompt) -> Sides:
    """Returns both conversations of a pair, as a whole."""
    said = json.loads(prompt.text)
    better, worse = (
        TrainingConversation(id=prompt.id, messages=said[side], tools=said["tools"])
        for side in ("messages", "rejected")
    )
    return better, worse


def check_turns(prompts: Iterable[Prompt]) -> None:
    """Raises DataError that names each conversation that no template makes rows from."""
    check_each(prompts, lambda prompt: written_conversation(prompt).learned())


def check_answers(prompts: Iterable[Prompt]) -> None:
    """Raises DataError that names each pair of conversations that `split_answer_pair` cannot use."""
    check_each(prompts, differing_sides)


def check_texts(prompts: Iterable[Prompt]) -> None:
    """Raises DataError that names each pair with a conversation that `split_text_pair` cannot use."""
    check_each(prompts, lambda prompt: [side.scored_messages() for side in written_sides(prompt)])


_FORMS: Mapping[JobName, Callable[[Iterable[Prompt]], None]] = {
    "sft": check_turns,
    "dpo": check_answers,
    "reward_model": check_texts,
}


def make_form_check(config: RunConfig) -> Callable[[Iterable[Prompt]], None] | None:
    """Returns the check of the form of the job's conversations; None for a job that samples."""
    return check_turns if config.kind.rows == "labels" else _FORMS.get(config.job)


def differing_sides(prompt: Prompt) -> Sides:
    """Returns both from the first message on in which they differ. Raises DataError that names the prompt."""
    try:
        return _answers(*written_sides(prompt))
    except UnsupportedMessages as error:
        raise DataError(f"prompt {prompt.id!r}: {error}") from error


def check_each(prompts: Iterable[Prompt], check: Callable[[Prompt], object]) -> None:
    """Raises DataError that names each of the prompts that ``check`` refuses."""
    bad = list[str]()
    for prompt in prompts:
        try:
            check(prompt)
        except DataError as error:
            bad.append(str(error))
        except UnsupportedMessages as error:
            bad.append(f"prompt {prompt.id!r}: {error}")
    if bad:
        raise DataError(listed(bad))


def _answers(better: TrainingConversation, worse: TrainingConversation) -> Sides:
    """Returns both from the first message on in which they differ. Raises UnsupportedMessages."""
    alike = zip(better.tidied(), worse.tidied(), strict=False)
    first = next((place for place, (one, other) in enumerate(alike) if one != other), None)
    if first is None:
        raise UnsupportedMessages("one conversation of its pair begins with the whole of the other")
    for side in (better, worse):
        if (role := side.messages[first].get("role")) != "assistant":
            raise UnsupportedMessages(
                f"its conversations first differ in message {first + 1}, of the role {role!r:.40}; a pair has two "
                "answers of the assistant to the same messages"
            )
    answers = _from(better, first), _from(worse, first)
    for which, side in zip(SIDES, answers, strict=True):
        if not side.learned()[1]:
            raise UnsupportedMessages(
                f"the assistant's messages of its {which} conversation have a weight of 0 from message {first + 1} on, "
                "where the other differs, so there is nothing to compare; remove the weight or the row"
            )
    return answers


def _from(side: TrainingConversation, first: int) -> TrainingConversation:
    return TrainingConversation(id=side.id, messages=side.messages, tools=side.tools, first=first)


def _weight(place: int, message: Mapping[str, Any]) -> int:
    """Returns 1 if a message has no marks or they say to train on it, else 0. Raises UnsupportedMessages."""
    marks = {key: value for key in _MARKS if (value := message.get(key)) is not None}
    for key, value in marks.items():
        if key in _DETAILS:
            raise UnsupportedMessages(
                f"message {place + 1}: {key}={value!r:.100} names parts of it, and a turn is learned as a whole or not "
                "at all; write train instead, or weight"
            )
        if value not in (0, 1):
            raise UnsupportedMessages(f"message {place + 1}: {key}={value!r:.100}; it must be 0 or 1, or false or true")
    if len(said := set(map(int, marks.values()))) > 1:
        raise UnsupportedMessages(
            f"message {place + 1}: {', '.join(f'{key}={value!r}' for key, value in marks.items())} say different "
            "things; keep one of them"
        )
    return said.pop() if said else 1
