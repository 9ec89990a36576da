"""Messages as clients of OpenAI's chat completions send them, in one form, and when two of them are the same.

A client that sends an assistant message back drops what it does not know and writes null for what is empty. It orders
keys and the arguments of calls as it likes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rl_megatron.errors import RLMegatronError

ChatMessage = Mapping[str, Any]

REASONING = ("reasoning_content", "reasoning", "thinking")  # names of one thing; normalized messages have the first
LOSABLE = ("tool_calls", "function_call", "refusal")
"""Keys of an assistant's message that say something, and that some templates do not read; with the first some leave out
the content."""
_PLAIN = {"role", "content"}
_SAYING = ("user", "system", "developer")  # roles of messages that are nothing but their content
_OF_RESULT = {"role", "content", "name", "tool_call_id", "id"}  # a tool that returned nothing has no others
_TEXT_PARTS = (None, "text", "input_text", "output_text")  # the last two in OpenAI's Responses
_UNCOMPARED = ("role", "content", "tool_calls", "tool_call_id", "id", *REASONING)


class UnsupportedMessages(RLMegatronError, ValueError):
    """Messages that cannot become a prompt: of an unknown form, or refused by the model's chat template."""


def normalize_messages(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Returns messages without null keys. Content is text, reasoning ``reasoning_content``, and arguments are parsed.

    Arguments that are not JSON stay the text that they are. Raises UnsupportedMessages that names the message.
    """
    if not messages:
        raise UnsupportedMessages("messages is empty; send at least one")
    return tuple(_tidied(place, message) for place, message in enumerate(messages, 1))


def same(known: ChatMessage, given: ChatMessage) -> bool:
    """True if two normalized messages are `same_for_client`, with equal other keys."""
    return same_for_client(known, given) and merge_keys(known, given) is known


def same_for_client(known: ChatMessage, given: ChatMessage) -> bool:
    """True if two normalized messages say the same to their client. Ids of calls do not count, nor does reasoning that
    ``given`` lacks, nor keys other than content, reasoning and calls."""
    if known == given:  # the usual case in a long history, in a tenth of the time
        return True
    if known["role"] != given["role"] or known["content"] != given["content"]:
        return False
    if get_reasoning(given) not in ("", get_reasoning(known)):
        return False
    return _functions(known) == _functions(given)


def merge_keys(known: ChatMessage, given: ChatMessage) -> ChatMessage:
    """Returns the known message with the other keys of ``given``; itself where it has these."""
    own, others = _others(known), _others(given)
    if own == others:
        return known
    return {key: value for key, value in known.items() if key not in own} | others


def get_reasoning(message: ChatMessage) -> str:
    """Returns the reasoning of a normalized message, empty if it has none."""
    return str(message.get(REASONING[0], ""))


def content_parts(messages: Sequence[Mapping[str, Any]]) -> dict[int, list[dict[str, str]]]:
    """Returns the contents of several texts, by their place, as chat templates read them."""
    contents = [(place, one.get("content")) for place, one in enumerate(messages)]
    return {
        place: [{"type": "text", "text": part["text"]} for part in content]
        for place, content in contents
        if isinstance(content, list) and len(content) > 1
    }


def messages_losing_content(messages: Sequence[ChatMessage]) -> list[int]:
    """Returns the places of assistant messages that templates may strip of more than thinking."""
    return [
        place for place, one in enumerate(messages) if one["role"] == "assistant" and not one.keys().isdisjoint(LOSABLE)
    ]


def arguments_json(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a normalized message with the arguments of its calls as JSON text."""
    if "tool_calls" not in message:
        return dict(message)
    functions = [(call, call["function"]) for call in message["tool_calls"]]
    calls = [call | {"function": of | {"arguments": _text(of["arguments"])}} for call, of in functions]
    return {**message, "tool_calls": calls}


def _tidied(place: int, given: ChatMessage) -> ChatMessage:
    if not isinstance(given, (dict, Mapping)) or not isinstance(given.get("role"), str):  # an ABC's check takes longer
        raise UnsupportedMessages(f"message {place} is {given!r:.200}; it must be an object with a role")
    if given.keys() == _PLAIN and isinstance(given["content"], str):
        return dict(given)
    message = {key: value for key, value in given.items() if value is not None}
    says_nothing = message.get("content") in (None, []) and given["role"] != "assistant"
    if says_nothing and (given["role"] in _SAYING or any(message[key] for key in message.keys() - _OF_RESULT)):
        raise UnsupportedMessages(
            f"message {place}, of the role {given['role']!r}, has no content, but {sorted(message)!r:.200}; name "
            "its text content, which may be empty"
        )
    message["content"] = _content(place, given.get("content"))
    if reasoning := [message.pop(key) for key in REASONING if key in message]:
        if not all(isinstance(text, str) for text in reasoning):
            raise UnsupportedMessages(f"message {place}: its reasoning is {reasoning!r:.200}; it must be a text")
        if len(texts := {text.strip(): text for text in reversed(reasoning) if text}) > 1:
            raise UnsupportedMessages(
                f"message {place} has thinking under several of {', '.join(REASONING)}, which differ; keep one of them"
            )
        if texts:
            message[REASONING[0]] = texts.popitem()[1]
    calls = message.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list | tuple):
            raise UnsupportedMessages(f"message {place} has the tool_calls {calls!r:.200}; it must be a list of calls")
        message["tool_calls"] = [_call(place, call) for call in calls]
    return message


def _content(place: int, content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[Any] = content if isinstance(content, list) else [None]
    if not all(map(_is_text_part, parts)):
        raise UnsupportedMessages(
            f"message {place} has content {content!r:.200}; it must be a text, or a list of texts"
        )
    return "".join(part["text"] for part in parts)


def _is_text_part(part: object) -> bool:
    """True if a part of a content is text alone: an image may have a text of its own, which may be empty."""
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        return False
    return part.get("type") in _TEXT_PARTS


def _call(place: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UnsupportedMessages(
            f"message {place} has the call {call!r:.200}; it must have function.name and arguments"
        )
    arguments = function.get("arguments")
    others = [] if arguments is not None else [key for key in function if key != "name" and function[key]]
    if others or not isinstance(arguments or "", str | Mapping):
        raise UnsupportedMessages(
            f"message {place} has the call {call!r:.200}; its arguments must be an object, or the JSON text of one"
            + (f", under the name arguments, not {others[0]!r:.40}" if others else "")
        )
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # the model may write no JSON
            arguments = json.loads(arguments)
    kept = {key: value for key, value in call.items() if value is not None}
    return {**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}


def _functions(message: ChatMessage) -> list[object]:
    return [call["function"] for call in message.get("tool_calls", ())]


def _others(message: ChatMessage) -> dict[str, object]:
    return {key: value for key, value in message.items() if key not in _UNCOMPARED and value not in ("", [], {})}


def _text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
