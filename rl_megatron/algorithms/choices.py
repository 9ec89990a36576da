"""How a name in a row of choices becomes a function: one lookup in a small table, with an error that lists it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Choice = TypeVar("Choice")


def choose(table: Mapping[str, Choice], name: str, *, key: str) -> Choice:
    """The entry of ``table`` called ``name``; ``key`` is what the user set. Raises ValueError that lists the table."""
    if name not in table:
        raise ValueError(f"{key}={name!r} is unknown; one of: {', '.join(sorted(table))}")
    return table[name]
