"""A turn's text as it is: no reasoning, no calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_megatron.rollout.parsers.parsed import Parsed, parsed


def plain(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
    """The text is the content."""
    return parsed(text, "", ())
