"""Computes the picture of a run's last steps from its trace: a row for each kind of work, time from left to right.

Pure geometry; lengths across are shares of ``WIDTH``, so that the page can stretch it to any screen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rl_megatron.observability.metrics.table import PHASE_SECONDS
from rl_megatron.observability.timeline.trace import FILES, TraceEvent, read_trace

WIDTH, HEIGHT = 1000.0, 20.0
STEPS_SHOWN = 4
_PAUSE = 1_000_000  # microseconds between two steps; longer ones are of a stop and a resume, which is no work
_BINS = 400  # of what is in flight
_CLOSE = WIDTH / 2000  # bars nearer than this are drawn as one

FromTo = tuple[float, float]
"""Begin and end, in shares of ``WIDTH``."""
_STYLES = (*PHASE_SECONDS, "other")  # as in the page's stacks

_OF_CALLS: Mapping[str, tuple[str, str]] = {  # a rank's calls: their row, and the phase whose color they have
    "score": ("", "logprobs"),
    "backward": ("", "train"),
    "step": ("", "train"),
    "generate": ("", "rollout"),
    "stage": ("pushes", "weights"),
    "commit": ("pushes", "weights"),
    "sums": ("pushes", "weights"),
    "send": ("pushes", "weights"),
    "save": ("saves", "checkpoint"),
}  # the row "" is that of the rank's role
_OF_LANES = {"pushes": ("pushes", "weights"), "saves": ("saves", "checkpoint")}  # the controller's
_WAITS, _LEARNER, _IN_FLIGHT, _REWARDS = "controller waits", "learner", "sampling", "rewards"
_OVERLAP = (_IN_FLIGHT, _REWARDS)  # rows that say how many


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """The bars of one color in a row, as an SVG path. ``style`` is the phase's number in the page's stacks."""

    style: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StripRow:
    """One row; ``busy`` says the share of the time in which it had work."""

    name: str
    busy: str
    bars: Sequence[Bars]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """The picture. ``steps`` are names with the percent across at which they begin and end; ``ticks`` seconds."""

    summary: str
    rows: Sequence[StripRow]
    steps: Sequence[tuple[str, float, float]]
    ticks: Sequence[tuple[str, float]]
    key: Sequence[tuple[str, int]]


def strip_of_run(folder: Path) -> Strip | None:
    """The last steps of a run's trace; None if it has none. Raises DataError for a trace that is not one."""
    if not any((folder / name).is_file() for name in FILES):
        return None
    return strip(read_trace(folder, tail=True))


def strip(events: Sequence[TraceEvent]) -> Strip | None:
    """The last ``STEPS_SHOWN`` steps, of those after the last pause; None before the first has ended."""
    steps = [e for e in events if (e.process, e.thread) == ("controller", "steps")][-STEPS_SHOWN:]
    if not steps:
        return None
    pauses = [i for i, (one, other) in enumerate(pairwise(steps), start=1) if other.begin - one.end > _PAUSE]
    steps = steps[max(pauses, default=0) :]
    first, last = steps[0].begin, max(steps[-1].end, steps[0].begin + 1)
    found: dict[str, dict[str, list[FromTo]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event.end <= first or event.begin >= last:
            continue
        where = _where(event)
        if where is not None:
            row, phase = where
            at = [(moment - first) / (last - first) * WIDTH for moment in (event.begin, event.end)]
            found[row][phase].append((max(0.0, at[0]), min(WIDTH, at[1])))
    last_rows = (*_OVERLAP, "pushes", "saves")
    roles = sorted(found.keys() - {_WAITS, _LEARNER, *last_rows})
    order = [_WAITS, _LEARNER, *roles, *last_rows]
    rows = [_row(name, found[name]) for name in order if name in found]
    shown = {bars.style for row in rows for bars in row.bars}
    seconds = (last - first) / 1e6

    def percent(moment: int) -> float:
        return round((moment - first) / (last - first) * 100, 2)

    return Strip(
        summary=f"{steps[0].name} to {steps[-1].name}, {seconds:.3g} s. "
        + "; ".join(f"{row.name}: {row.busy}" for row in rows),
        rows=rows,
        steps=[(e.name, percent(e.begin), percent(e.end)) for e in steps],
        ticks=[(f"{share * seconds:.3g} s", 100 * share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)],
        key=[(phase, style) for style, phase in enumerate(PHASE_SECONDS) if style in shown],
    )


def _where(event: TraceEvent) -> tuple[str, str] | None:
    """The row of an event and the phase that gives its color; None if it is not drawn."""
    if event.process == "controller":
        if event.thread == "phases":
            return (_WAITS, event.name) if event.name in PHASE_SECONDS else None
        return _OF_LANES.get(event.thread)
    if event.process == "sampling":
        return {"generate": (_IN_FLIGHT, "rollout"), "reward": (_REWARDS, "other")}.get(event.name)
    if event.thread != "calls" or event.name not in _OF_CALLS:
        return None
    row, phase = _OF_CALLS[event.name]
    role = event.process.partition(" ")[0]
    return row or (_LEARNER if role == "rank" else role), phase


def _row(name: str, found: Mapping[str, Sequence[FromTo]]) -> StripRow:
    if name in _OVERLAP:
        ((phase, each),) = found.items()
        return _in_flight(name, phase, each)
    bars = [
        Bars(style=_STYLES.index(phase), path=_boxes(merged(each)))
        for phase, each in sorted(found.items(), key=lambda pair: _STYLES.index(pair[0]))
    ]
    return StripRow(name=name, busy=_share(merged(one for each in found.values() for one in each)), bars=bars)


def _in_flight(name: str, phase: str, each: Sequence[FromTo]) -> StripRow:
    """How many there are, in the mean of each part of the width; the fullest part is as high as the row."""
    counts, width = at_once(each), WIDTH / _BINS
    top = max(counts) or 1.0
    heights = [_r(HEIGHT * (1 - count / top)) for count in counts]
    corners = "".join(f"L{_r(i * width)} {y}L{_r((i + 1) * width)} {y}" for i, y in enumerate(heights))
    path = f"M0 {_r(HEIGHT)}{corners}L{_r(WIDTH)} {_r(HEIGHT)}Z"
    bars = [Bars(style=_STYLES.index(phase), path=path)]
    return StripRow(name=name, busy=f"{_share(merged(each))}, up to {most_at_once(each):,}", bars=bars)


def at_once(each: Iterable[FromTo]) -> list[float]:
    """How many intervals cover each of ``_BINS`` equal parts of ``WIDTH``, in the mean of the part."""
    width, edges = WIDTH / _BINS, [0.0] * (_BINS + 1)
    covered = [0.0] * _BINS  # by parts of intervals
    for begin, end in each:
        first, last = min(int(begin / width), _BINS - 1), min(int(end / width), _BINS - 1)
        if first == last:
            covered[first] += (end - begin) / width
            continue
        covered[first] += (first + 1) - begin / width
        covered[last] += end / width - last
        edges[first + 1] += 1
        edges[last] -= 1
    whole = 0.0
    for i in range(_BINS):
        whole += edges[i]
        covered[i] += whole
    return covered


def most_at_once(each: Iterable[FromTo]) -> int:
    """How many intervals overlap, at most."""
    count = most = 0
    for _, change in sorted(change for begin, end in each for change in ((begin, 1), (end, -1))):
        count += change
        most = max(most, count)
    return most


def merged(each: Iterable[FromTo]) -> list[FromTo]:
    """The union of intervals, ascending; those closer than a bar can be drawn are one."""
    out: list[FromTo] = []
    for begin, end in sorted(each):
        if out and begin - out[-1][1] <= _CLOSE:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((begin, end))
    return out


def _boxes(each: Sequence[FromTo]) -> str:
    return "".join(f"M{_r(a)} 0H{_r(max(b, a + _CLOSE))}V{_r(HEIGHT)}H{_r(a)}Z" for a, b in each)


def _share(each: Sequence[FromTo]) -> str:
    return f"{100 * sum(b - a for a, b in each) / WIDTH:.0f} %"


def _r(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
