"""The timeline as files: runs/<name>/trace.json in Chrome's trace event format, which ui.perfetto.dev opens.

That is "Trace Event Format" of the Chromium project, in its form of a JSON array. A line is one event: a file that a
kill has torn is read up to its last whole line, and the format lets the closing bracket be missing. A file that is
full, or that an earlier start wrote, is renamed to trace_before.json; the one that had this name goes.

Perfetto shows processes by their sort index (before v53 by their number of spans), and threads by their number, where
that of their process would be its main thread's. Arrows go from a generation to each of its requests by servers.

Writes a run's timeline while it runs, from a thread, so that the event loop does not wait for it.
"""

from __future__ import annotations

import gzip
import json
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO

from rl_megatron.errors import DataError
from rl_megatron.files import naming, parse, write_atomically
from rl_megatron.observability.timeline import spans
from rl_megatron.observability.timeline.ranks import read_kernels
from rl_megatron.observability.timeline.spans import Clock, KeptSpan, Lane, SpanDetails

FILES = ("trace_before.json", "trace.json")
MOST_BYTES = 32 << 20  # of each of the two
_JOINED = ("generate", "attempt")  # spans that arrows join, by their requests: from the first to each of the others
_FIRST = ("controller", "sampling", "replica", "rank")  # processes in the order in which they are shown
_THREADS = ("steps", "phases", "pushes", "saves", "calls", "asked by the controller")  # so are those of a process,
_NUMBERED = {"request": 100, "reward": 1_000_000}  # and after them those with numbers, from these on
_OTHERS = 2_000_000
_FLOWS_IN = ',"flow_in":true'


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """A span as it was written: microseconds since 1970 by the controller's clock.

    Without a thread it is values of its process, by their names in ``said``, at ``begin``. Events of one ``flow`` are
    joined by arrows.
    """

    process: str
    thread: str
    name: str
    begin: int
    end: int
    said: SpanDetails
    flow: int | None = None


class _Lines:
    """Makes the lines of a file's events. Those of a process and a thread are named before their first."""

    def __init__(self) -> None:
        self.processes: dict[str, int] = {}
        self._threads: dict[tuple[str, str], str] = {}  # their numbers, as a line has them

    def span(
        self, process: str, thread: str, name: str, begin: int, end: int, said: SpanDetails | None, flow: int | None
    ) -> str:
        """The line of a span, or of values if ``thread`` is empty: Perfetto reads no escapes in their names."""
        head, numbers = "", self._threads.get((process, thread))
        if numbers is None:
            head = self._named(process, thread)
            numbers = self._threads[process, thread]
        more = _args(tuple(said.items())) if said else ""
        if flow is not None:
            more += f',"bind_id":"{flow:#x}","flow_out":true{"" if name == _JOINED[0] else _FLOWS_IN}'
        if not thread:
            return f'{head}{{"ph":"C","name":{_quoted(name)},"ts":{begin},{numbers}{more}}},\n'
        return f'{head}{{"ph":"X","name":{_quoted(name)},"ts":{begin},"dur":{end - begin},{numbers}{more}}},\n'

    def end(self) -> str:
        """The last lines: one of JSON has no comma."""
        first = next(iter(self.processes), "")
        return _meta("process_sort_index", 1, sort_index=_rank(first))[:-2] + "\n]\n"

    def _named(self, process: str, thread: str) -> str:
        head = ""
        if process not in self.processes:
            number = self.processes[process] = len(self.processes) + 1
            head += _meta("process_name", number, name=process)
            head += _meta("process_sort_index", number, sort_index=_rank(process))
        number = self.processes[process]
        if not thread:
            self._threads[process, thread] = f'"pid":{number}'
            return head
        place = _place(thread, len(self._threads))
        place += place >= number  # Perfetto shows the thread with its process's number first
        self._threads[process, thread] = f'"pid":{number},"tid":{place}'
        return head + _meta("thread_name", number, place, name=thread)


class TraceFile:
    """Appends spans to ``folder``/trace.json. Controller process only. Raises OSError that names the file."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self._before, self._path = (folder / name for name in FILES)
        self._most, self._size = most_bytes, 0
        self._wall = time.time_ns() - spans.now()
        self._file: IO[bytes] | None = None
        self._lines = _Lines()
        self._clocks: dict[str, Clock] = {}  # of processes
        self._ends: dict[Lane, int] = {}  # of lanes with a clock: the last end in the file
        self._flows: dict[object, int] = {}  # of requests that are not over, in this file
        self._flow = time.time_ns() // 1000  # the number of the latest; those of another start are others

    def append(self, kept: Iterable[KeptSpan]) -> None:
        """Write spans, and how far clocks may be off; readers see them when this returns."""
        self._open()
        flows, ends = self._flows_of(kept := list(kept)), dict(self._ends)
        with naming(self._path):
            for span, flow in sorted(zip(kept, flows, strict=True), key=_outer_first):
                file = self._with_room()
                self._size += file.write(self._line(span, flow, ends).encode("ascii"))
            at = (spans.now() + self._wall) // 1000
            for process, clock in self._clocks.items():
                if clock.bound is not None:
                    said = {"wrong by us, at most": round(clock.bound / 1000, 1)}
                    file = self._with_room()
                    self._size += file.write(self._lines.span(process, "", "clock", at, at, said, None).encode("ascii"))
            self._open().flush()

    def close(self) -> None:
        """End the file, if it is open."""
        file, self._file = self._file, None
        if file is not None:
            with naming(self._path), file:
                file.write(self._lines.end().encode("ascii"))

    def _with_room(self) -> IO[bytes]:
        """The file, or the next one, in which no lane has a name yet."""
        if self._size > self._most:
            self.close()
        return self._open()

    def _open(self) -> IO[bytes]:
        if self._file is not None:
            return self._file
        if self._path.exists():
            self._path.replace(self._before)
        self._lines = _Lines()
        self._flows.clear()
        with naming(self._path):
            self._file = self._path.open("wb")
            self._size = self._file.write(b"[\n")
        return self._file

    def _flows_of(self, kept: Iterable[KeptSpan]) -> list[int | None]:
        """The number of each span's flow: one for a generation and all of its requests by servers, which end first."""
        found = list[int | None]()
        for _, name, _, _, said in kept:
            request = said.get("request") if said and name in _JOINED else None
            if request is None:
                found.append(None)
            elif name == _JOINED[0]:
                found.append(self._flows.pop(request, None))
            else:
                if request not in self._flows:
                    self._flow += 1
                    self._flows[request] = self._flow
                found.append(self._flows[request])
        return found

    def _line(self, span: KeptSpan, flow: int | None, ends: Mapping[Lane, int]) -> str:
        """``ends``: those in the file of earlier calls. Where a clock's offset fell since, spans begin no earlier."""
        lane, name, begin, end, said = span
        offset = 0 if lane.clock is None else lane.clock.offset
        # whole ones, so that what was nested stays so
        first, last = ((time + self._wall + offset) // 1000 for time in (begin, end))
        if lane.clock is not None:
            self._clocks[lane.process] = lane.clock
            first, last = (max(time, ends.get(lane, 0)) for time in (first, last))
            self._ends[lane] = max(last, self._ends.get(lane, 0))
        return self._lines.span(lane.process, lane.thread, name, first, last, said, flow)


def read_trace(folder: Path) -> list[TraceEvent]:
    """The events of a run's folder, by their begin.

    Raises DataError if there is none, or for a line that is no event.
    """
    paths = [folder / name for name in FILES if (folder / name).is_file()]
    if not paths:
        raise DataError(f"{folder}: it has no trace.json; a run writes it with its first step")
    events = [event for path in paths for event in _events(path)]
    return sorted(events, key=lambda event: (event.begin, -event.end))


def write_trace(folder: Path, out: Path) -> Path:
    """All that a run's folder has as one trace, with kernels of profiled steps; atomic. Returns ``out``.

    It is compressed if ``out`` ends in .gz.

    Raises as `read_trace` and `read_kernels`.
    """
    lines = _Lines()
    events = [
        lines.span(event.process, event.thread, event.name, event.begin, event.end, event.said, event.flow)
        for event in read_trace(folder)
    ]
    kernels = sorted(read_kernels(folder), key=lambda event: (event.begin, -event.end))
    events += [lines.span(one.process, one.thread, one.name, one.begin, one.end, None, None) for one in kernels]
    text = "".join(["[\n", *events, lines.end()])
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, gzip.compress(text.encode()) if out.suffix == ".gz" else text.encode())
    return out


def _events(path: Path) -> Iterator[TraceEvent]:
    processes, threads = dict[int, str](), dict[tuple[int, int], str]()
    for number, line in _whole_lines(path):
        try:
            found = parse(line.rstrip(b",]\n"))
            if found["ph"] == "M":
                if found["name"] == "process_name":
                    processes[found["pid"]] = found["args"]["name"]
                elif found["name"] == "thread_name":
                    threads[found["pid"], found["tid"]] = found["args"]["name"]
                continue
            values, flow = found["ph"] == "C", found.get("bind_id")
            yield TraceEvent(
                process=processes[found["pid"]],
                thread="" if values else threads[found["pid"], found["tid"]],
                name=found["name"],
                begin=found["ts"],
                end=found["ts"] + (0 if values else found["dur"]),
                said=found.get("args", {}),
                flow=None if flow is None else int(flow, 16),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}:{number}: not an event ({error!r}); remove the file, it is no part of a resume"
            ) from error


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Whole lines but brackets, with their numbers."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n") and line.strip() not in (b"[", b"]"):
                yield number, line


def _meta(event: str, process: int, thread: int = 0, /, **said: str | int) -> str:
    return f'{{"ph":"M","name":"{event}","pid":{process},"tid":{thread},"args":{json.dumps(said)}}},\n'


@lru_cache(4096)
def _args(said: tuple[tuple[str, str | int | float], ...]) -> str:
    return f',"args":{json.dumps(dict(said))}'


@lru_cache(4096)
def _quoted(name: str) -> str:
    return json.dumps(name)


def _place(thread: str, known: int) -> int:
    """Where a thread is shown in its process; ``known``: of how many threads there are numbers."""
    if thread in _THREADS:
        return _THREADS.index(thread) + 1
    word, _, number = thread.rpartition(" ")
    return _NUMBERED[word] + int(number) if word in _NUMBERED and number.isdecimal() else _OTHERS + known


def _outer_first(one: tuple[KeptSpan, int | None]) -> tuple[int, int]:
    """The order of spans: of equal begins the longer one is the outer."""
    span, _ = one
    return span[2], -span[3]


def _rank(process: str) -> int:
    """Where a process is shown: the controller first, ranks by their numbers, those of other roles last."""
    word, number = process.split(" ")[0], re.search(r"\d+", process)
    place = _FIRST.index(word) if word in _FIRST else len(_FIRST)
    return place * 1_000_000 + (int(number[0]) if number else 0)


logger = logging.getLogger(__name__)


class Timeline:
    """A run's timeline, in ``folder``. Controller process only. Where it cannot write, it warns and ends no run."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self._file, self._failed = TraceFile(folder, most_bytes), False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="timeline")
        self._writing: Future[None] | None = None

    def step(self, row: Mapping[str, object], times: tuple[int, int] | None) -> None:
        """Keep the step of a row of metrics as a span, if its ``times`` are known, and begin to write what there is."""
        if times is not None:
            warm = row.get("phase") == "warm_start"
            name = f"warm start step {row.get('warm_start/step')}" if warm else f"step {row.get('step')}"
            spans.keep(spans.STEPS, name, *times)
        if self._writing is None or self._writing.done():  # else the next step writes these, too
            self._writing = self._thread.submit(self._write, *spans.taken())

    def flush(self) -> Future[None]:
        """Write all that there is now; the future is done once readers see it."""
        self._writing = self._thread.submit(self._write, *spans.taken())
        return self._writing

    def close(self) -> None:
        """Write what is left, and end the file."""
        if self._writing is not None:
            self._writing.result()
        self._thread.shutdown()
        self._write(*spans.taken())
        try:
            self._file.close()
        except Exception as error:  # noqa: BLE001  `_warn` logs it
            self._warn(error)

    def _write(self, kept: Sequence[KeptSpan], lost: int) -> None:
        if self._failed or not kept:
            return
        if lost:
            logger.warning("the timeline lacks %d spans: memory holds %d between two writes", lost, spans.MOST)
        try:
            self._file.append(kept)
        except Exception as error:  # noqa: BLE001  `_warn` logs it
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        """Nothing is written any more. A fault of our own has its traceback."""
        self._failed, ours = True, not isinstance(error, OSError)
        what = f"{type(error).__name__}: {error}" if ours else str(error)
        logger.warning("the timeline ends here: %s", what, exc_info=ours)
