"""What a parser answers, and how calls are written for clients."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

MOST_DEEP = 64
_THINK = "<think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """An assistant's message in OpenAI's form: content, ``reasoning_content`` and ``tool_calls`` where it has them.

    Where a call cannot be read there are no calls, and the content is all the text after the reasoning, as the model
    wrote it; ``problem`` says what is wrong with the first such call.
    """

    message: Mapping[str, Any]
    problem: str | None = None


class Parser(Protocol):
    """Reads the tool calls and the reasoning of one format out of what a model wrote."""

    def __call__(self, text: str, tools: Sequence[Mapping[str, Any]] = (), *, opened: bool = False) -> Parsed:
        """The message of a turn's ``text``, which has its special tokens, but not the stop token.

        ``tools`` are the request's, for formats that do not write the types of arguments. ``opened``: the prompt ends
        with ``<think>``.
        """
        ...


class BadCall(ValueError):
    """A call that cannot be read; the text says why."""


def json_of(written: str) -> object:
    """The value of a JSON text that a model wrote. Raises ValueError, also for what others could not read again."""
    try:
        return readable(json.loads(written))
    except RecursionError as error:
        raise ValueError(f"it is nested more than {MOST_DEEP} deep") from error


def readable(value: object) -> object:
    """The value of JSON, if templates and clients can read it. Raises ValueError for one that is nested more than 64
    deep, for NaN and infinity, and for a half of a surrogate pair, which no tokenizer takes."""
    level = [value]
    for _ in range(MOST_DEEP + 1):
        lists = [[*one.values()] if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [inner for one in lists for inner in one]
    if level:
        raise ValueError(f"it is nested more than {MOST_DEEP} deep")
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def parsed(content: str, reasoning: str, calls: Sequence[tuple[str, str]], problem: str | None = None) -> Parsed:
    """The message with calls of (name, arguments as JSON text), which have no ids yet."""
    message: dict[str, Any] = {"role": "assistant", "content": content or None if calls else content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls
        ]
    return Parsed(message=message, problem=problem)


def opens_thought(prompt: str) -> bool:
    """Whether the turn after the prompt's text begins in reasoning."""
    return prompt.rstrip().endswith(_THINK)


def split_thought(text: str, call: str, *, opened: bool) -> tuple[str, str]:
    """The reasoning and what is after it, without the line breaks that templates put around both.

    It ends at the first ``</think>``, or without one at a line that begins with ``call``, the mark of a call. A text
    that has such a mark before ``</think>`` is no reasoning, if neither it nor its prompt opened one.
    """
    thought, found, rest = text.partition("</think>")
    if not opened and not text.lstrip().startswith(_THINK) and (not found or call in thought):
        return "", text
    if not found and (called := f"\n{text}".find(f"\n{call}")) >= 0:
        thought, rest = text[:called], text[called:]
    before, again, inside = thought.partition(_THINK)
    return (inside if again and not before.strip() else thought).strip("\n"), rest.lstrip("\n")


def call_of(written: str) -> tuple[str, str]:
    """Name and arguments of a call that is a JSON object with both. Raises BadCall."""
    try:
        value = json_of(written)
    except ValueError as error:
        raise BadCall(f"a call is no JSON ({error}): {written.strip()[:200]}") from error
    return call_of_value(value)


def call_of_value(value: object) -> tuple[str, str]:
    """Name and arguments of a call that was read as an object. Raises BadCall."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise BadCall(f"a call is {json.dumps(value)[:200]}; it must be an object with a name")
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(arguments, dict):
        raise BadCall(f"the arguments of {value['name']!r} are {json.dumps(arguments)[:200]}; they must be an object")
    return value["name"], json.dumps(arguments, ensure_ascii=False)


def arguments_of(name: str, written: str) -> str:
    """The arguments as the model wrote them. Raises BadCall if they are no JSON object."""
    try:
        value = json_of(written)
    except ValueError as error:
        raise BadCall(f"the arguments of {name!r} are no JSON ({error}): {written.strip()[:200]}") from error
    if not isinstance(value, dict):
        raise BadCall(f"the arguments of {name!r} are {written.strip()[:200]}; they must be an object")
    return written.strip()
