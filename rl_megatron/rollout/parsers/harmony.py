"""gpt-oss's messages within a turn: a channel each, and calls to a recipient (OpenAI's harmony format)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rl_megatron.rollout.parsers.parsed import BadCall, Parsed, arguments_of, parsed

_END = re.compile(r"<\|(?:end|call|return)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def harmony(text: str, tools: Sequence[Mapping[str, Any]] = (), *, opened: bool = False) -> Parsed:
    """``analysis`` is the reasoning; ``final``, and ``commentary`` to nobody, are content."""
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
                calls.append((name, arguments_of(name, body)))
            elif channel is not None and channel[1] == "analysis":
                reasoning.append(body)
            else:
                content.append(body)
    except BadCall as error:
        return parsed(text, "", (), str(error))
    return parsed("\n".join(content), "\n".join(reasoning), calls)
