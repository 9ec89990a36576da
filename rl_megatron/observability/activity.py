"""Records what this process is doing: for the watchdog a text, and a count that grows with progress; for the timeline a
span for each call, and for each of its parts, which lasts to the next."""

from __future__ import annotations

from rl_megatron.observability import timeline
from rl_megatron.observability.timeline import CALLS

_call, _part, _beats = "starting", "", 0
_spans: list[tuple[str, int, timeline.SpanDetails]] = []  # that have begun: the call, then its part


def begin(call: str, number: int) -> None:
    """Record that a call begins, the ``number``-th of its name."""
    global _call, _part, _beats
    rest()
    _call, _part, _beats = f"{call}, call {number}", "", _beats + 1
    _spans.append((call, timeline.now(), {"call": number}))


def part(name: str, of: str = "") -> None:
    """Record that the call has reached a part, ``of`` what; one that it is in makes progress."""
    global _part, _beats
    before, _part, _beats = _part, ", ".join(filter(None, (of, name))), _beats + 1
    if _spans and _part != before:
        at = _end(1)
        _spans.append((name, at, {"of": of} if of else {}))


def rest() -> None:
    """Record that the call has ended, and that none has begun."""
    global _call, _part, _beats
    _end(0)
    _call, _part, _beats = "nothing: it waits for a call", "", _beats + 1


def now() -> tuple[str, int]:
    """The text, and the count."""
    return ", ".join(filter(None, (_call, _part))), _beats


def _end(depth: int) -> int:
    """Keep the spans that have begun from ``depth`` on, as ended now."""
    at = timeline.now()
    while len(_spans) > depth:
        name, began, said = _spans.pop()
        timeline.keep(CALLS, name, began, at, said or None)
    return at
