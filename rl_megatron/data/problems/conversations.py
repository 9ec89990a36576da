"""What rows of files say: the messages of a prompt, and conversations, with their tools as one text in JSON, which
whoever trains on them reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rl_megatron.config.sections.data import TURNS_IN_TEXT, FileKeys
from rl_megatron.data.problems.records import (
    Record,
    bytes_field,
    equal_fields,
    has_bytes,
    missing_field,
    start_of,
    without_null_keys,
)
from rl_megatron.errors import DataError
from rl_megatron.files import parse, value_at
from rl_megatron.types import Prompt

_to_json = json.JSONEncoder(ensure_ascii=False).encode
_MOST_MARGIN = 10_000  # beside it a score of float32 still has three digits after the point
_MESSAGE = {"role", "content"}  # objects with a role alone may be an answer: who does what
_SHAREGPT = {"from", "value"}
_RENAMED = "; from and value, of ShareGPT's form, are called role and content, human is user, and gpt assistant"
_SPEAKERS = ("human", "gpt", "user", "assistant", "system")  # an object of other senders is an answer
_OF_SYSTEM = ("system", "developer")
LABEL = "label"  # field of KTO's rows: whether the answer is desirable
_ROLES = (*_OF_SYSTEM, "user", "assistant", "tool", "function", "ipython", "observation")


def check_pair(record: Record, place: str, data: FileKeys) -> None:
    """Raises DataError for a pair of equals, for one whose answers are no texts, and as `margin_of`, `system_of` and
    `demonstration_in`; also for a lone answer that is a message, or a list of them."""
    margin_of(record, place, data)
    system_of(record, place, data)
    if data.demonstration_field is not None:
        demonstration_in(record.others, place, data.demonstration_field)
    if data.messages_field is not None:
        return
    for name in (data.answer_field, *filter(None, (data.rejected_field,))):
        value = record.others.get(name)
        is_talk = any(map(_is_message, value if isinstance(value, list) else [value]))
        if is_talk or (data.rejected_field is not None and isinstance(value, list | dict)):
            raise DataError(
                f"{place}: field {name!r} is {start_of(value)}; an answer is a text. If it is a conversation, name it "
                "in messages_field, and a worse one in rejected_field"
            )
    if data.rejected_field is None:
        return
    _, answer, rejected = record.texts
    if answer == rejected:
        raise DataError(f"{place}: {equal_fields(data.answer_field, data.rejected_field)}")


def refuse_bad_answers(prompts: Iterable[Prompt]) -> None:
    """Raises DataError for one whose answer, or conversation, is not to be learnt, as `bad_answer` says."""
    for prompt in prompts:
        if bad := bad_answer(prompt.meta, prompt.answer):
            raise DataError(f"prompt {prompt.id!r}: {bad}")


def bad_answer(row: Mapping[str, Any], answer: str) -> str | None:
    """Why the answer of a row, or its conversation, which has none, is not learnt; None if it is. ``row``: its other
    fields."""
    if row.get(LABEL) is not False or answer == "false":  # where it is the answer itself
        return None
    return (
        "field 'label' is false, which says of KTO's rows that the answer is bad, and a model would learn it; train on "
        "such rows with job=dpo dpo.loss=kto, keep the rows with true, or give the field another name if it says "
        "another thing"
    )


def is_desirable(prompt: Prompt) -> bool:
    """The label of a row of one answer. Raises DataError that names the prompt for a row without one, or with another
    value than true and false (or 1 and 0)."""
    label = prompt.meta.get(LABEL)
    if isinstance(label, int) and label in (0, 1):
        return bool(label)
    found = f"field {LABEL!r} is {start_of(label)}" if LABEL in prompt.meta else missing_field(LABEL, prompt.meta)
    raise DataError(f"prompt {prompt.id!r}: {found}; dpo.loss=kto reads there true of a desirable answer, else false")


def margin_of(record: Record, place: str, data: FileKeys) -> float:
    """The number in the field of margins; 0 without a field. Raises DataError for anything else there."""
    if data.margin_field is None:
        return 0.0
    value = _value_at(record.others, place, data.margin_field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_MOST_MARGIN <= value <= _MOST_MARGIN:
        raise DataError(
            f"{place}: field {data.margin_field!r} is {start_of(value)}; it must be a finite number, from "
            f"-{_MOST_MARGIN} to {_MOST_MARGIN}"
        )
    return float(value)


def demonstration_in(row: Mapping[str, Any], place: str, name: str) -> str:
    """The text of a demonstration in a row. Raises DataError for anything else there."""
    value = _value_at(row, place, name)
    if not (isinstance(value, str) and value.strip()):
        raise DataError(f"{place}: field {name!r} is {start_of(value)}; a demonstration is a text; remove the row")
    return value


def system_of(record: Record, place: str, data: FileKeys) -> str:
    """The text of the system's message in a row, empty without one. Raises DataError for anything else there."""
    if data.system_field is None:
        return ""
    value = _value_at(record.others, place, data.system_field)
    if not isinstance(value, str | None):
        raise DataError(f"{place}: field {data.system_field!r} is {start_of(value)}; a system's message is a text")
    return value if value and value.strip() else ""


def messages_of(record: Record, place: str, data: FileKeys, *, in_structs: bool) -> tuple[Mapping[str, Any], ...]:
    """Returns the messages that a model answers: a row's list, also as JSON text with ``chat_template``, or its text as
    the user's. A message of the system's field comes first. ``in_structs`` is `conversation_text`'s.

    Raises DataError for a list that is not of messages with texts, and for a last one of the assistant or the system.
    """
    system = system_of(record, place, data)
    first = [{"role": "system", "content": system}] if system else []
    given = messages = record.others.get(data.prompt_field)
    if isinstance(given, list):
        messages = without_null_keys(given) if in_structs else given
    elif data.chat_template:
        given = messages = _messages_in(record.texts[0])
    if not isinstance(messages, list):
        return (*first, {"role": "user", "content": record.texts[0]})
    if not messages:
        why = "a prompt has a user's message at least"
    elif wrong := next(
        (wrong for at, one in enumerate(messages, 1) if (wrong := _no_message(at, one, rendered=data.chat_template))),
        None,
    ):
        why = wrong
    elif (last := messages[-1])["role"] in ("assistant", *_OF_SYSTEM) or not (last["content"] or "").strip():
        why = "its last message is what the model answers: one of the user or of a tool, with a text"
    elif system and messages[0]["role"] in _OF_SYSTEM:
        why = f"and field {data.system_field!r} has a text of the system, too; keep one"
    else:
        return (*first, *messages)
    raise DataError(f"{place}: field {data.prompt_field!r} is {start_of(given)}; {why}")


def conversation_text(record: Record, place: str, data: FileKeys, *, in_structs: bool) -> str:
    """Messages and tools in JSON, and the number of the ``first`` message behind context alone, if there is any;
    ``in_structs``: lists come from Arrow's structs, where each row has the keys of all, null where it lacks them, and
    are left without these.

    Raises DataError that names the ``place`` for a row without messages of which one is the assistant's, for two
    messages of the system, for messages that begin with those of the context, and as `check_pair` does.
    """
    assert data.messages_field is not None
    check_pair(record, place, data)
    of_lists = (data.messages_field, data.rejected_field, data.tools_field, data.context_field)
    found = {name: _list_at(record, name, place, in_structs=in_structs) for name in of_lists if name is not None}
    before = list(found.get(data.context_field or "", ()))
    if system := system_of(record, place, data):
        before.insert(0, {"role": "system", "content": system})
    where = f"{place}: field {data.tools_field!r}"
    whole = dict[str, Any](tools=[_with_parameters(one, where) for one in found.get(data.tools_field or "", ())])
    for side, name in (("messages", data.messages_field), ("rejected", data.rejected_field)):
        if name is None:
            continue
        if not any(one.get("role") == "assistant" for one in found[name]):
            shared = "" if not any(one.keys() >= _SHAREGPT for one in found[name]) else _RENAMED
            raise DataError(f"{place}: field {name!r} has no message of the role 'assistant' to train on{shared}")
        if (context := found.get(data.context_field or "")) and found[name][: len(context)] == context:
            raise DataError(
                f"{place}: field {name!r} begins with the messages of {data.context_field!r}, so they would be there "
                "twice; leave context_field out"
            )
        whole[side] = [*before, *found[name]]
        if system and whole[side][1].get("role") == "system":
            raise DataError(
                f"{place}: field {data.system_field!r} has a text, and the messages begin with the system's; keep one"
            )
    if data.rejected_field is not None and found[data.rejected_field] == found[data.messages_field]:
        raise DataError(f"{place}: {equal_fields(data.messages_field, data.rejected_field)}")
    if before:
        whole["first"] = len(before)
    text = _to_json({"messages": whole.pop("messages"), **whole})  # in the order of which checkpoints have digests
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: its messages hold a lone surrogate, which is not valid text") from error
    return text


def _list_at(record: Record, name: str, place: str, *, in_structs: bool) -> list[dict[str, Any]]:
    """The list of objects in a field, which may be its JSON text; empty where it is null. Raises DataError."""
    found = value = _value_at(record.others, place, name)
    if isinstance(value, str) and value.startswith("["):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place}: field {name!r} is text that begins a list, and not JSON: {error}") from error
    elif in_structs:
        found = without_null_keys(value)
    if not isinstance(found, list | None) or not all(isinstance(one, dict) for one in found or ()):
        advice = f". {TURNS_IN_TEXT}" if isinstance(value, str) and "\n\nHuman:" in value else ""
        raise DataError(f"{place}: field {name!r} is {start_of(value)}; it must be a list of objects{advice}")
    return found or []


def _value_at(row: Mapping[str, Any], place: str, name: str) -> Any:
    """The value of a field. Raises DataError where the row lacks it, or it has bytes that are not text."""
    try:
        value = value_at(row, name)
    except KeyError:
        raise DataError(f"{place}: {missing_field(name, row)}") from None
    if has_bytes(value):
        raise DataError(f"{place}: {bytes_field(name)}")
    return value


def _is_message(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    return value.keys() >= _MESSAGE or (value.keys() >= _SHAREGPT and value["from"] in _SPEAKERS)


def _messages_in(text: str) -> list[Any] | None:
    """The messages that a text has as JSON; None if it is another text."""
    try:
        found: Any = parse(text) if text.lstrip(" \t\r\n").startswith("[") else None
        text.encode() if found is None else _to_json(found).encode()
    except ValueError:  # not JSON, or half of a surrogate pair, which no text of a prompt can have
        return None
    is_chat = isinstance(found, list) and all(isinstance(one, dict) for one in found)
    return found if is_chat and any("role" in one or one.keys() >= _SHAREGPT for one in found) else None


def _no_message(at: int, one: object, *, rendered: bool) -> str | None:
    """Returns why item ``at`` (from 1) is not a message of text, or None. An environment may change roles."""
    if not isinstance(one, dict) or not isinstance(role := one.get("role"), str):
        shared = _RENAMED if isinstance(one, dict) and one.keys() >= _SHAREGPT else ""
        return f"item {at} must be a message, an object with role and content{shared}"
    if rendered and role not in _ROLES:
        return f"the role of message {at} is {role!r:.40} (allowed: {', '.join(_ROLES)})"
    content = one.get("content")
    calls = role == "assistant" and (one.get("tool_calls") or one.get("function_call"))
    if isinstance(content, str) or (content is None and calls):
        return None
    return f"the content of message {at} is {start_of(content)}; it must be text"


def _with_parameters(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """The tool with its parameters as an object: some files have them as JSON text, because a column of Arrow has one
    schema for all. Raises DataError that begins with ``where``."""
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not isinstance(text := function.get("parameters"), str):
        return tool
    try:
        parameters = parse(text)
    except ValueError:
        parameters = None
    if not isinstance(parameters, dict):
        raise DataError(f"{where} has a tool of parameters {start_of(text)}; they must be an object, or its JSON text")
    function = {**function, "parameters": parameters}
    return {**tool, "function": function} if "function" in tool else function
