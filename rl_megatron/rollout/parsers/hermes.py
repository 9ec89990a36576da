"""``<tool_call>`` around a JSON object with name and arguments: Hermes 2 Pro, Qwen2.5, Qwen3; ``<think>`` of Qwen3."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rl_megatron.rollout.parsers.parsed import BadCall, Parsed, call_of, parsed, split_thought

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)  # the last may lack its end, as vLLM allows


def hermes(text: str, tools: Sequence[Mapping[str, Any]] = (), *, opened: bool = False) -> Parsed:
    """What stands before the first call is content; what stands after it is not shown."""
    reasoning, rest = split_thought(text, "<tool_call>", opened=opened)
    content, found, _ = rest.partition("<tool_call>")
    if not found:
        return parsed(rest, reasoning, ())
    try:
        calls = [call_of(written) for written in _CALL.findall(rest)]
    except BadCall as error:
        return parsed(rest, reasoning, (), str(error))
    return parsed(content, reasoning, calls)
