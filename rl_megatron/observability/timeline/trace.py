"""The timeline as files: runs/<name>/trace.json in Chrome's trace event format, which ui.perfetto.dev opens.

That is "Trace Event Format" of the Chromium project, in its form of a JSON array. A line is one event: a file that a
kill has torn is read up to its last whole line, and the format lets the closing bracket be missing. A file that is
full, or that an earlier start wrote, is renamed to trace_before.json; the one that had this name goes.
"""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from rl_megatron.durable import naming, write_atomically
from rl_megatron.errors import DataError
from rl_megatron.observability.timeline import spans
from rl_megatron.observability.timeline.clock import Clock
from rl_megatron.observability.timeline.spans import KeptSpan, Lane, SpanDetails

FILES = ("trace_before.json", "trace.json")
MOST_BYTES = 32 << 20  # of each of the two
_TAIL_BYTES = 8 << 20
_FIRST = ("controller", "sampling", "replica", "rank")  # processes in the order in which they are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """A span as it was written: microseconds since 1970 by the controller's clock."""

    process: str
    thread: str
    name: str
    begin: int
    end: int
    said: SpanDetails


class TraceFile:
    """Appends spans to ``folder``/trace.json. Controller process only. Raises OSError that names the file."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self._before, self._path = (folder / name for name in FILES)
        self._most, self._size = most_bytes, 0
        self._wall = time.time_ns() - spans.now()
        self._file: IO[bytes] | None = None
        self._processes: dict[str, tuple[int, Clock | None]] = {}
        self._threads: dict[tuple[str, str], str] = {}  # their numbers, as a line has them

    def append(self, kept: Iterable[KeptSpan]) -> None:
        """Write spans; readers see them when this returns."""
        file = self._open()
        with naming(self._path):
            for span in sorted(kept, key=lambda span: (span[2], -span[3])):  # of equal begins the outer one first
                if self._size > self._most:
                    self.close()
                    file = self._open()
                self._size += file.write(self._line(span).encode("ascii"))
            file.flush()

    def close(self) -> None:
        """End the file, if it is open."""
        file, self._file = self._file, None
        if file is None:
            return
        with naming(self._path), file:
            for number, clock in self._processes.values():
                if clock is not None:
                    file.write(_meta("process_labels", number, labels=_trust(clock)).encode("ascii"))
            first = next(iter(self._processes), "")
            file.write(_meta("process_sort_index", 1, sort_index=_rank(first)).encode("ascii")[:-2] + b"\n]\n")

    def _open(self) -> IO[bytes]:
        if self._file is not None:
            return self._file
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._path.replace(self._before)
        self._processes, self._threads = {}, {}
        with naming(self._path):
            self._file = self._path.open("wb")
            self._size = self._file.write(b"[\n")
        return self._file

    def _line(self, span: KeptSpan) -> str:
        lane, name, begin, end, said = span
        numbers = self._threads.get((lane.process, lane.thread))
        head = "" if numbers is not None else self._named(lane)
        shift = self._wall + (lane.clock.offset if lane.clock is not None else 0)
        first, last = (begin + shift) // 1000, (end + shift) // 1000  # whole ones, so that what was nested stays so
        more = _args(tuple(said.items())) if said else ""
        numbers = self._threads[lane.process, lane.thread]
        return f'{head}{{"ph":"X","name":{_quoted(name)},"ts":{first},"dur":{last - first},{numbers}{more}}},\n'

    def _named(self, lane: Lane) -> str:
        """The lines that name a lane which the file has not yet."""
        head = ""
        if lane.process not in self._processes:
            number = len(self._processes) + 1
            head += _meta("process_name", number, name=lane.process)
            head += _meta("process_sort_index", number, sort_index=_rank(lane.process))
            self._processes[lane.process] = number, None
        number, clock = self._processes[lane.process]
        self._processes[lane.process] = number, lane.clock or clock
        thread = len(self._threads) + 1
        self._threads[lane.process, lane.thread] = f'"pid":{number},"tid":{thread}'
        head += _meta("thread_name", number, thread, name=lane.thread)
        return head + _meta("thread_sort_index", number, thread, sort_index=thread)


def read_trace(folder: Path, *, tail: bool = False) -> list[TraceEvent]:
    """The events of a run's folder, by their begin; with ``tail`` those of the last megabytes alone.

    Raises DataError if there is none, or for a line that is no event.
    """
    paths = [folder / name for name in FILES if (folder / name).is_file()]
    if not paths:
        raise DataError(f"{folder}: it has no trace.json; a run writes it with its first step")
    sizes = {path: path.stat().st_size for path in paths}
    left, events = _TAIL_BYTES if tail else sum(sizes.values()), list[TraceEvent]()
    for path, size in reversed(sizes.items()):
        events += _events(path, skipped=max(0, size - left))
        left = max(0, left - size)
    return sorted(events, key=lambda event: (event.begin, -event.end))


def write_trace(folder: Path, out: Path) -> Path:
    """All that a run's folder has as one trace, compressed if ``out`` ends in .gz; atomic. Returns ``out``.

    Raises as `read_trace`.
    """
    processes, threads, lines = dict[str, int](), dict[tuple[str, str], int](), list[str]()
    for event in read_trace(folder):
        who = event.process, event.thread
        number = processes.setdefault(event.process, len(processes) + 1)
        thread = threads.setdefault(who, len(threads) + 1)
        shown: dict[str, Any] = {"ph": "X", "name": event.name, "ts": event.begin, "dur": event.end - event.begin}
        lines.append(json.dumps({**shown, "pid": number, "tid": thread, "args": event.said}))
    named = [_meta("process_name", number, name=name) for name, number in processes.items()]
    named += [_meta("process_sort_index", number, sort_index=_rank(name)) for name, number in processes.items()]
    named += [_meta("thread_name", processes[name], number, name=thread) for (name, thread), number in threads.items()]
    text = "[\n" + "".join(named) + ",\n".join(lines) + "\n]\n"
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, gzip.compress(text.encode()) if out.suffix == ".gz" else text.encode())
    return out


def _events(path: Path, *, skipped: int) -> Iterator[TraceEvent]:
    processes, threads = dict[int, str](), dict[int, str]()
    for number, line in _lines(path, skipped):
        try:
            found = json.loads(line.rstrip(b",]\n"))
            if found["ph"] == "M":
                named = {"process_name": (processes, "pid"), "thread_name": (threads, "tid")}.get(found["name"])
                if named is not None:
                    named[0][found[named[1]]] = found["args"]["name"]
                continue
            yield TraceEvent(
                process=processes[found["pid"]],
                thread=threads[found["tid"]],
                name=found["name"],
                begin=found["ts"],
                end=found["ts"] + found["dur"],
                said=found.get("args", {}),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}:{number}: not an event ({error!r}); remove the file, it is no part of a resume"
            ) from error


def _lines(path: Path, skipped: int) -> Iterator[tuple[int, bytes]]:
    """Whole lines but brackets, with their numbers; of the first ``skipped`` bytes only the names of lanes."""
    at = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            wanted = at >= skipped or line.startswith(b'{"ph":"M"')
            at += len(line)
            if wanted and line.endswith(b"\n") and line.strip() not in (b"[", b"]"):
                yield number, line


def _meta(event: str, process: int, thread: int = 0, /, **said: str | int) -> str:
    return f'{{"ph":"M","name":"{event}","pid":{process},"tid":{thread},"args":{json.dumps(said)}}},\n'


@lru_cache(4096)
def _args(said: tuple[tuple[str, str | int | float], ...]) -> str:
    return f',"args":{json.dumps(dict(said))}'


@lru_cache(4096)
def _quoted(name: str) -> str:
    return json.dumps(name)


def _rank(process: str) -> int:
    """Where a process is shown: the controller first, ranks by their numbers, those of other roles last."""
    word, number = process.split(" ")[0], re.search(r"\d+", process)
    place = _FIRST.index(word) if word in _FIRST else len(_FIRST)
    return place * 1_000_000 + (int(number[0]) if number else 0)


def _trust(clock: Clock) -> str:
    return "clock not compared" if clock.bound is None else f"clock ± {clock.bound / 1000:,.0f} µs"
