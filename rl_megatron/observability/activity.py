"""What this process does at the moment, for who watches it: words, and a count that grows while it makes progress."""

from __future__ import annotations

_call, _part, _beats = "starting", "", 0


def begin(call: str) -> None:
    """Something new begins."""
    global _call, _part, _beats
    _call, _part, _beats = call, "", _beats + 1


def part(text: str) -> None:
    """It has come to a part of it."""
    global _part, _beats
    _part, _beats = text, _beats + 1


def now() -> tuple[str, int]:
    """The words, and the count."""
    return ", ".join(filter(None, (_call, _part))), _beats
