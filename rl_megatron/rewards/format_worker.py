"""Matches texts with a regular expression, in a process that ends when one takes too long. rules.py calls it."""

from __future__ import annotations

import re

from rl_megatron.bounded import answer_calls

MEMORY_BYTES = 1 << 30


def _matches(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text) is not None


if __name__ == "__main__":
    answer_calls(_matches, MEMORY_BYTES)
