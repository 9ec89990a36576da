"""Records what this process is doing, for the watchdog: a text, and a count that grows with progress."""

from __future__ import annotations

_call, _part, _beats = "starting", "", 0


def begin(call: str) -> None:
    """Record that ``call`` begins."""
    global _call, _part, _beats
    _call, _part, _beats = call, "", _beats + 1


def part(text: str) -> None:
    """Record that the call has reached a part."""
    global _part, _beats
    _part, _beats = text, _beats + 1


def now() -> tuple[str, int]:
    """The text, and the count."""
    return ", ".join(filter(None, (_call, _part))), _beats
