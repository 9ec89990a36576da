"""Formats in which models write reasoning and calls of tools, by name, and how clients get calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

MAX_DEPTH = 64
_THINK = "<think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """An assistant's message in OpenAI's form: content, ``reasoning_content`` and ``tool_calls`` where it has them.

    Where a call cannot be read there are no calls. The content is all the text after the reasoning, as the model wrote
    it, and ``problem`` says what is wrong with the first such call.
    """

    message: Mapping[str, Any]
    problem: str | None = None


class Parser(Protocol):
    """Reads the tool calls and the reasoning of one format out of what a model wrote."""

    def __call__(self, text: str, tools: Sequence[Mapping[str, Any]] = (), *, opened: bool = False) -> ParsedReply:
        """Returns the message of a turn's ``text``, which has its special tokens, but not the stop token.

        ``tools`` are the request's, for formats that do not write the types of arguments. ``opened``: the prompt ends
        with ``<think>``.
        """
        ...


class BadCall(ValueError):
    """A call that cannot be read; the text says why."""


def parse_json(written: str) -> object:
    """Returns the value of a JSON text of a model. Raises ValueError, also for one that others could not read again."""
    try:
        return parse_readable_json(json.loads(written))
    except RecursionError as error:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from error


def parse_readable_json(value: object) -> object:
    """Returns the value of JSON, if templates and clients can read it. Raises ValueError for a nesting of more than 64,
    for NaN and infinity, and for a half of a surrogate pair, which no tokenizer takes."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        lists = [[*one.values()] if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [inner for one in lists for inner in one]
    if level:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def parsed(content: str, reasoning: str, calls: Sequence[tuple[str, str]], problem: str | None = None) -> ParsedReply:
    """Returns the message with calls of (name, arguments as JSON text), which have no ids yet."""
    message: dict[str, Any] = {"role": "assistant", "content": content or None if calls else content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls
        ]
    return ParsedReply(message=message, problem=problem)


def opens_thought(prompt: str) -> bool:
    """True if the turn after the prompt's text begins in reasoning."""
    return prompt.rstrip().endswith(_THINK)


def split_thought(text: str, call: str, *, opened: bool) -> tuple[str, str]:
    """Returns the reasoning and the rest after it, without the line breaks that templates put around both.

    It ends at the first ``</think>``, or without one at a line that begins with ``call``, the mark of a call. A text
    that has such a mark before ``</think>`` is not reasoning if neither it nor its prompt opened one.
    """
    thought, found, rest = text.partition("</think>")
    if not opened and not text.lstrip().startswith(_THINK) and (not found or call in thought):
        return "", text
    if not found and (called := f"\n{text}".find(f"\n{call}")) >= 0:
        thought, rest = text[:called], text[called:]
    before, again, inside = thought.partition(_THINK)
    return (inside if again and not before.strip() else thought).strip("\n"), rest.lstrip("\n")


def parse_call(written: str) -> tuple[str, str]:
    """Returns name and arguments of a call that is a JSON object with both. Raises BadCall."""
    try:
        value = parse_json(written)
    except ValueError as error:
        raise BadCall(f"a call is no JSON ({error}): {written.strip()[:200]}") from error
    return call_from_object(value)


def call_from_object(value: object) -> tuple[str, str]:
    """Returns name and arguments of a call that was read as an object. Raises BadCall."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise BadCall(f"a call is {json.dumps(value)[:200]}; it must be an object with a name")
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(arguments, dict):
        raise BadCall(f"the arguments of {value['name']!r} are {json.dumps(arguments)[:200]}; they must be an object")
    return value["name"], json.dumps(arguments, ensure_ascii=False)


def parse_arguments(name: str, written: str) -> str:
    """Returns the arguments as the model wrote them. Raises BadCall if they are not a JSON object."""
    try:
        value = parse_json(written)
    except ValueError as error:
        raise BadCall(f"the arguments of {name!r} are no JSON ({error}): {written.strip()[:200]}") from error
    if not isinstance(value, dict):
        raise BadCall(f"the arguments of {name!r} are {written.strip()[:200]}; they must be an object")
    return written.strip()


_BEGIN = "<｜tool▁calls▁begin｜>"
_BLOCK = re.compile(r"([^\n]*)\n```json\n(.*)\n```", re.DOTALL)


def deepseek(text: str, tools: Sequence[Mapping[str, Any]] = (), *, opened: bool = False) -> ParsedReply:
    """Parses calls of DeepSeek. A section of calls without a whole one is a problem."""
    reasoning, rest = split_thought(text, _BEGIN, opened=opened)
    content, found, written = rest.partition(_BEGIN)
    if not found:
        return parsed(rest, reasoning, ())
    try:
        calls = [_deepseek_call(one) for one in written.split("<｜tool▁call▁begin｜>")[1:]]
        if not calls:
            raise BadCall(f"a section of calls has no call: {written[:200]}")
    except BadCall as error:
        return parsed(rest, reasoning, (), str(error))
    return parsed(content, reasoning, calls)


def _deepseek_call(written: str) -> tuple[str, str]:
    call, ended, _ = written.partition("<｜tool▁call▁end｜>")
    first, found, second = call.partition("<｜tool▁sep｜>")
    if not ended or not found:
        raise BadCall(f"a section of calls has one that does not end: {written[:200]}")
    if block := _BLOCK.fullmatch(second.strip()):  # then ``first`` is the type, which is always "function"
        return block[1], parse_arguments(block[1], block[2])
    return first, parse_arguments(first, second)


_GLM_TAG = re.compile("</?(?:tool_call|arg_value)>")
_TYPES = {  # JSON types of values, as a schema names them
    type(None): {"null"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    str: {"string"},
    list: {"array"},
    dict: {"object"},
}
_PAIR = re.compile(r"(?><arg_key>(.*?)</arg_key>)\s*+(?><arg_value>(.*?)</arg_value>)\s*+", re.DOTALL)


def glm(text: str, tools: Sequence[Mapping[str, Any]] = (), *, opened: bool = False) -> ParsedReply:
    """Parses calls of GLM. A value is JSON, or text if it is not JSON or the tool's schema allows texts but not it."""
    reasoning, rest = split_thought(text, "<tool_call>", opened=opened)
    content, found, behind = rest.partition("<tool_call>")
    if not found:
        return parsed(rest, reasoning, ())
    try:
        calls = [_glm_call(one, tools) for one in _calls(found + behind)]
    except BadCall as error:
        return parsed(rest, reasoning, (), str(error))
    return parsed(content.strip(), reasoning, calls)


def _calls(text: str) -> list[str]:
    """Returns the text in each call. Tags in a value are its text."""
    calls, begun, in_value = list[str](), -1, False
    for tag in _GLM_TAG.finditer(text):
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


def _glm_call(written: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
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
    """Returns the types of a tool's arguments."""
    functions = [tool.get("function", {}) for tool in tools]
    known: Mapping[str, Any] = next((one for one in functions if one.get("name") == name), {})
    properties = (known.get("parameters") or {}).get("properties") or {}
    return {key: _types(schema) for key, schema in properties.items()}


def _types(schema: object) -> set[str]:
    """Returns the types that a schema names; an empty set where it names none."""
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
        value = parse_json(written)
    except ValueError:
        return written
    as_text = "string" in types and (isinstance(value, str) or not _TYPES[type(value)] & types)
    return written if as_text else value


_END = re.compile(r"<\|(?:end|call|return)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def harmony(text: str, tools: Sequence[Mapping[str, Any]] = (), *, opened: bool = False) -> ParsedReply:
    """Parses harmony. ``analysis`` is the reasoning; ``final``, and ``commentary`` without a recipient, are content."""
    reasoning, content, calls = list[str](), list[str](), list[tuple[str, str]]()
    try:
        for one in text.split("<|start|>"):
            header, found, body = one.partition("<|message|>")
            if not found:
                content += [_END.split(one)[0]] if one.strip() and "<|" not in one.removeprefix("assistant") else []
                continue
            body, channel = _END.split(body)[0], _CHANNEL.search(header)
            if recipient := _RECIPIENT.search(header):
                name = recipient[1].removeprefix("functions.")
                calls.append((name, parse_arguments(name, body)))
            elif channel is not None and channel[1] == "analysis":
                reasoning.append(body)
            else:
                content.append(body)
    except BadCall as error:
        return parsed(text, "", (), str(error))
    return parsed("\n".join(content), "\n".join(reasoning), calls)


_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)  # the last may lack its end, as vLLM allows


def hermes(text: str, tools: Sequence[Mapping[str, Any]] = (), *, opened: bool = False) -> ParsedReply:
    """Parses calls of Hermes. Text before the first call is content; text after it is not shown."""
    reasoning, rest = split_thought(text, "<tool_call>", opened=opened)
    content, found, _ = rest.partition("<tool_call>")
    if not found:
        return parsed(rest, reasoning, ())
    try:
        calls = [parse_call(written) for written in _CALL.findall(rest)]
    except BadCall as error:
        return parsed(rest, reasoning, (), str(error))
    return parsed(content, reasoning, calls)


_PYTHON_TAG = "<|python_tag|>"


def llama3(text: str, tools: Sequence[Mapping[str, Any]] = (), *, opened: bool = False) -> ParsedReply:
    """Parses calls of Llama 3: one after the other, with ``;`` between them. An answer that is other JSON is content.

    A turn with ``<|python_tag|>`` must be calls.
    """
    content, tag, rest = text.partition(_PYTHON_TAG)
    if not tag:
        content, rest = "", text
    if not tag and not text.lstrip().startswith("{"):
        return parsed(text, "", ())
    decoder, calls, place = json.JSONDecoder(), list[tuple[str, str]](), 0
    rest = rest.replace(_PYTHON_TAG, "").strip()
    try:
        while place < len(rest):
            value, place = decoder.raw_decode(rest, place)
            calls.append(call_from_object(parse_readable_json(value)))
            while place < len(rest) and rest[place] in "; \n\t\r":
                place += 1
    except BadCall as error:
        return parsed(text, "", (), str(error) if tag else None)
    except (ValueError, RecursionError) as error:
        return parsed(text, "", (), f"a call is no JSON ({error}): {rest[:200]}" if tag or calls else None)
    return parsed(content, "", calls)


PARSERS: MappingProxyType[str, Parser] = MappingProxyType(
    {"hermes": hermes, "llama3_json": llama3, "deepseek": deepseek, "glm": glm, "harmony": harmony}
)
WRITTEN: MappingProxyType[str, str] = MappingProxyType(
    {"hermes": "<tool_call>", "deepseek": "<｜tool▁calls▁begin｜>", "glm": "<arg_key>", "harmony": "<|channel|>"}
)
"""The text that every call of a format has in it, where it is more than JSON."""
