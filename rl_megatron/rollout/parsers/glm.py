"""``<tool_call>`` with a name and pairs of ``<arg_key>`` and ``<arg_value>``: GLM-4.5 and 4.6."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rl_megatron.rollout.parsers.parsed import BadCall, Parsed, json_of, parsed, split_thought

_TAG = re.compile("</?(?:tool_call|arg_value)>")
_TYPES = {  # of values, as a schema names them
    type(None): {"null"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    str: {"string"},
    list: {"array"},
    dict: {"object"},
}
_PAIR = re.compile(r"(?><arg_key>(.*?)</arg_key>)\s*+(?><arg_value>(.*?)</arg_value>)\s*+", re.DOTALL)


def glm(text: str, tools: Sequence[Mapping[str, Any]] = (), *, opened: bool = False) -> Parsed:
    """A value is JSON; a text where it is none, and where the tool's schema allows texts but no such JSON."""
    reasoning, rest = split_thought(text, "<tool_call>", opened=opened)
    content, found, behind = rest.partition("<tool_call>")
    if not found:
        return parsed(rest, reasoning, ())
    try:
        calls = [_call(one, tools) for one in _calls(found + behind)]
    except BadCall as error:
        return parsed(rest, reasoning, (), str(error))
    return parsed(content.strip(), reasoning, calls)


def _calls(text: str) -> list[str]:
    """What stands in each call. Tags in a value are its text."""
    calls, begun, in_value = list[str](), -1, False
    for tag in _TAG.finditer(text):
        if "arg_value" in tag[0]:
            in_value = tag[0] == "<arg_value>"
        elif not in_value and tag[0] == "</tool_call>" and begun >= 0:
            calls.append(text[begun : tag.start()])
            begun = -1
        elif not in_value and tag[0] == "<tool_call>" and begun < 0:
            begun = tag.end()
        elif not in_value and tag[0] == "<tool_call>":
            break
    if begun >= 0:
        raise BadCall(f"a call does not end: {text[begun : begun + 200]}")
    return calls


def _call(written: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    written = written.strip()
    name, _, _ = written.partition("<arg_key>")
    place, pairs = len(name), dict[str, str]()
    while pair := _PAIR.match(written, place):
        place, pairs[pair[1]] = pair.end(), pair[2]
    if not (name := name.strip()) or "\n" in name or place < len(written):
        raise BadCall(f"a call is {written[:200]!r}; it must be a name and pairs of <arg_key> and <arg_value>")
    types = _types_of(name, tools)
    arguments = {key: _value(value, types.get(key, set())) for key, value in pairs.items()}
    return name, json.dumps(arguments, ensure_ascii=False)


def _types_of(name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, set[str]]:
    """The types of a tool's arguments."""
    functions = [tool.get("function", {}) for tool in tools]
    known: Mapping[str, Any] = next((one for one in functions if one.get("name") == name), {})
    properties = (known.get("parameters") or {}).get("properties") or {}
    return {key: _types(schema) for key, schema in properties.items()}


def _types(schema: object) -> set[str]:
    """The types that a schema names; none where it names none."""
    if not isinstance(schema, Mapping):
        return set()
    types = {one for one in [schema.get("type"), *_listed(schema, "type")] if isinstance(one, str)}
    of_values = (_TYPES.get(type(one), set()) for one in _listed(schema, "enum"))
    of_choices = (_types(one) for key in ("anyOf", "oneOf", "allOf") for one in _listed(schema, key))
    return types.union(*of_values, *of_choices)


def _listed(schema: Mapping[str, Any], key: str) -> Sequence[object]:
    given = schema.get(key)
    return given if isinstance(given, list | tuple) else ()


def _value(written: str, types: set[str]) -> object:
    try:
        value = json_of(written)
    except ValueError:
        return written
    as_text = "string" in types and (isinstance(value, str) or not _TYPES[type(value)] & types)
    return written if as_text else value
