"""Records what this process is doing: for the watchdog a text, and a count that grows with progress; for the timeline a
span for each call, and for each of its parts, which lasts to the next."""

from __future__ import annotations

from rl_megatron.observability import timeline
from rl_megatron.observability.timeline import CALLS

_call, _part, _beats = "starting", "", 0
_spans: list[tuple[str, int, timeline.SpanDetails]] = []  # running spans: the call, then its part


def begin(call: str, number: int) -> None:
    """Records that a call begins, the ``number``-th of its name."""
    global _call, _part, _beats
    rest()
    _call, _part, _beats = f"{call}, call {number}", "", _beats + 1
    _spans.append((call, timeline.now(), {"call": number}))


def part(name: str, of: str = "") -> None:
    """Records that the call has reached a part of ``of``; a repeated part counts as progress."""
    global _part, _beats
    before, _part, _beats = _part, ", ".join(filter(None, (of, name))), _beats + 1
    if _spans and _part != before:
        at = _end(1)
        _spans.append((name, at, {"of": of} if of else {}))


def rest() -> None:
    """Records that the call has ended, and that none has begun."""
    global _call, _part, _beats
    _end(0)
    _call, _part, _beats = "nothing: it waits for a call", "", _beats + 1


def now() -> tuple[str, int]:
    """Returns the text, and the count."""
    return ", ".join(filter(None, (_call, _part))), _beats


def _end(depth: int) -> int:
    """Ends the running spans from ``depth`` on and keeps them. Returns the time."""
    at = timeline.now()
    while len(_spans) > depth:
        name, began, said = _spans.pop()
        timeline.keep(CALLS, name, began, at, said or None)
    return at
