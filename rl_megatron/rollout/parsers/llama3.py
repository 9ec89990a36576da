"""A JSON object with name and parameters, alone in the turn: Llama 3.1 and 3.2."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rl_megatron.rollout.parsers.parsed import BadCall, Parsed, call_of_value, parsed, readable

_TAG = "<|python_tag|>"


def llama3(text: str, tools: Sequence[Mapping[str, Any]] = (), *, opened: bool = False) -> Parsed:
    """Several calls stand one after the other, with ``;`` between them. An answer that is other JSON is content.

    A turn with ``<|python_tag|>`` must be calls.
    """
    content, tag, rest = text.partition(_TAG)
    if not tag:
        content, rest = "", text
    if not tag and not text.lstrip().startswith("{"):
        return parsed(text, "", ())
    decoder, calls, place = json.JSONDecoder(), list[tuple[str, str]](), 0
    rest = rest.replace(_TAG, "").strip()
    try:
        while place < len(rest):
            value, place = decoder.raw_decode(rest, place)
            calls.append(call_of_value(readable(value)))
            while place < len(rest) and rest[place] in "; \n\t\r":
                place += 1
    except BadCall as error:
        return parsed(text, "", (), str(error) if tag else None)
    except (ValueError, RecursionError) as error:
        return parsed(text, "", (), f"a call is no JSON ({error}): {rest[:200]}" if tag or calls else None)
    return parsed(content, "", calls)
