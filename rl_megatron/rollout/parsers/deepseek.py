"""Calls between special tokens: DeepSeek-V3 and -R1 write the arguments in a block of code, V3.1 after the name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rl_megatron.rollout.parsers.parsed import BadCall, Parsed, arguments_of, parsed, split_thought

_BEGIN = "<｜tool▁calls▁begin｜>"
_BLOCK = re.compile(r"([^\n]*)\n```json\n(.*)\n```", re.DOTALL)


def deepseek(text: str, tools: Sequence[Mapping[str, Any]] = (), *, opened: bool = False) -> Parsed:
    """A section of calls without a whole one is a problem."""
    reasoning, rest = split_thought(text, _BEGIN, opened=opened)
    content, found, written = rest.partition(_BEGIN)
    if not found:
        return parsed(rest, reasoning, ())
    try:
        calls = [_call(one) for one in written.split("<｜tool▁call▁begin｜>")[1:]]
        if not calls:
            raise BadCall(f"a section of calls has no call: {written[:200]}")
    except BadCall as error:
        return parsed(rest, reasoning, (), str(error))
    return parsed(content, reasoning, calls)


def _call(written: str) -> tuple[str, str]:
    call, ended, _ = written.partition("<｜tool▁call▁end｜>")
    first, found, second = call.partition("<｜tool▁sep｜>")
    if not ended or not found:
        raise BadCall(f"a section of calls has one that does not end: {written[:200]}")
    if block := _BLOCK.fullmatch(second.strip()):  # then ``first`` is the type, which is always "function"
        return block[1], arguments_of(block[1], block[2])
    return first, arguments_of(first, second)
