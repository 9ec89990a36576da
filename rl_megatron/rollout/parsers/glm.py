"""``<tool_call>`` with a name and pairs of ``<arg_key>`` and ``<arg_value>``: GLM-4.5 and 4.6."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rl_megatron.rollout.parsers.parsed import BadCall, Parsed, json_of, parsed, split_thought

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def glm(text: str, tools: Sequence[Mapping[str, Any]] = (), *, opened: bool = False) -> Parsed:
    """A value is JSON, or a text where it is none or where the tool's schema says string."""
    reasoning, rest = split_thought(text, "<tool_call>", opened=opened)
    content, found, behind = rest.partition("<tool_call>")
    if not found:
        return parsed(rest, reasoning, ())
    written = _CALL.findall(found + behind)
    try:
        if len(written) != rest.count("<tool_call>"):
            raise BadCall(f"a call does not end: {behind[:200]}")
        calls = [_call(one, tools) for one in written]
    except BadCall as error:
        return parsed(rest, reasoning, (), str(error))
    return parsed(content.strip(), reasoning, calls)


def _call(written: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    name, found, pairs = written.strip().partition("<arg_key>")
    name, pairs = name.strip(), found + pairs
    if not name or "\n" in name or _PAIR.sub("", pairs).strip():
        raise BadCall(f"a call is {written.strip()[:200]!r}; it must be a name and pairs of <arg_key> and <arg_value>")
    texts = _texts_of(name, tools)
    arguments = {key: value if key in texts else _value(value) for key, value in _PAIR.findall(pairs)}
    return name, json.dumps(arguments, ensure_ascii=False)


def _texts_of(name: str, tools: Sequence[Mapping[str, Any]]) -> set[str]:
    """The arguments of a tool that are strings."""
    functions = [tool.get("function", {}) for tool in tools]
    known: Mapping[str, Any] = next((one for one in functions if one.get("name") == name), {})
    properties = (known.get("parameters") or {}).get("properties") or {}
    return {key for key, schema in properties.items() if isinstance(schema, Mapping) and schema.get("type") == "string"}


def _value(written: str) -> object:
    try:
        return json_of(written)
    except ValueError:
        return written
