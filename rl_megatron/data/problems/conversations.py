"""Conversations in rows of files: their messages and tools as one text in JSON, which whoever trains on them reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_megatron.config.sections.data import FileKeys
from rl_megatron.data.problems.records import Record, equal_fields, missing_field, start_of
from rl_megatron.data.problems.rendering import SHAREGPT, Problem, check_pair, margin_of, system_of
from rl_megatron.errors import DataError
from rl_megatron.json_text import parse
from rl_megatron.types import Prompt

_RENAMED = "; from and value, of ShareGPT's form, are called role and content, human is user, and gpt assistant"
_to_json = json.JSONEncoder(ensure_ascii=False).encode


def conversation(record: Record, path: Path, line: int, data: FileKeys) -> Problem:
    """The conversation in a row of a file, or the pair of them. Raises as `conversation_text`, which it has."""
    place = f"{path}:{line}"
    text = conversation_text(record, place, data, in_structs=path.suffix == ".parquet")
    margin = margin_of(record, place, data)
    return Problem(
        id=f"{path.stem}:{line}", place=place, text=text, answer="", raw=text, margin=margin, meta=record.others
    )


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
            shared = "" if not any(one.keys() >= SHAREGPT for one in found[name]) else _RENAMED
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
    try:
        found = value = record.at(name)
    except KeyError:
        raise DataError(f"{place}: {missing_field(name, record.others)}") from None
    if isinstance(value, str) and value.startswith("["):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place}: field {name!r} is text that begins a list, and not JSON: {error}") from error
    elif in_structs:
        found = _without_null_keys(value)
    if not isinstance(found, list | None) or not all(isinstance(one, dict) for one in found or ()):
        raise DataError(f"{place}: field {name!r} is {start_of(value)}; it must be a list of objects")
    return found or []


def unrendered(conversations: Sequence[Problem]) -> list[Prompt]:
    """The conversations as prompts without tokens, which whoever trains on them makes of ``text``."""
    return [
        Prompt(id=one.id, text=one.text, token_ids=(), answer="", question=one.raw, margin=one.margin, meta=one.meta)
        for one in conversations
    ]


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


def _without_null_keys(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_null_keys(inner) for key, inner in value.items() if inner is not None}
    return [_without_null_keys(inner) for inner in value] if isinstance(value, list) else value
