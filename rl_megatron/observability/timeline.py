"""The activity of every process of a run, on one clock, as spans: in memory, and as files in the run's folder.

A process keeps its spans until they are taken: the controller writes them into trace.json in Chrome's trace event
format, which ui.perfetto.dev opens; a rank sends them with its answers. It is always on; bench/timeline.py measures the
cost of a span. Kernels and operators that ranks recorded are events of the timeline, too.

Times are nanoseconds of ``now``, this machine's monotonic clock. Any thread may keep a span.

Estimates how far another process's clock is from this one's, from the times of its calls and answers.

As NTP does (RFC 5905, section 8), but without its assumption that both ways take equally long: a delay is positive, so
each message bounds the difference from one side, and the truth is inside all bounds, whatever the network does.
"""

from __future__ import annotations

import gzip
import heapq
import json
import logging
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from rl_megatron.errors import DataError
from rl_megatron.files import add_path_to_errors, parse, write_atomically

logger = logging.getLogger(__name__)

DRIFT = 1e-4  # seconds a second between two machines' clocks: twice 50 ppm, what a computer's quartz keeps


class Clock:
    """The other clock's difference to ours, in nanoseconds: ours = theirs + ``offset``.

    When the latest answer arrived, that was at most ``bound`` wrong.
    """

    def __init__(self) -> None:
        self._low: float | None = None
        self._high, self._at = 0.0, 0

    @property
    def offset(self) -> int:
        """The middle of the bounds; 0 before the first exchange."""
        return 0 if self._low is None else round((self._low + self._high) / 2)

    @property
    def bound(self) -> int | None:
        """Half the distance between the bounds; None before the first exchange."""
        return None if self._low is None else round((self._high - self._low) / 2)

    def exchanged(self, *, sent_at: int, arrived: int, answered: int, received_at: int) -> None:
        """Narrows the bounds by a call that left here at ``sent_at`` and was there at ``arrived``, and its answer,
        which left at ``answered`` and was here at ``received_at``. The first and the last are of our clock, the others
        of theirs.

        Older bounds widen by the drift of two clocks. If new ones contradict them, a clock was set: the new ones count.
        """
        low, high = sent_at - arrived - DRIFT * (received_at - sent_at), float(received_at - answered)
        if self._low is not None:
            drift = DRIFT * max(0, received_at - self._at)
            old_low, old_high = self._low - drift, self._high + drift
            if max(low, old_low) <= min(high, old_high):
                low, high = max(low, old_low), min(high, old_high)
        self._low, self._high, self._at = low, high, received_at


MOST = 200_000  # spans in memory; the oldest go first
now = time.perf_counter_ns
SpanDetails = Mapping[str, str | int | float]


class Lane:
    """A row of the timeline: a thread of a process, by the names that are shown, and its clock if that is another's.

    Without a thread it is for values of the process (`gauge`).
    """

    __slots__ = ("clock", "process", "thread")

    def __init__(self, process: str, thread: str, clock: Clock | None = None) -> None:
        self.process, self.thread, self.clock = process, thread, clock


KeptSpan = tuple[Lane, str, int, int, SpanDetails | None]
"""Lane, name, begin, end and details of a span. Spans of a lane are nested or disjoint.

For values, the lane has no thread, begin and end are equal, and the details are the values by name."""

STEPS, PHASES, PUSHES, SAVES = (Lane("controller", thread) for thread in ("steps", "phases", "pushes", "saves"))
_kept: deque[KeptSpan] = deque(maxlen=MOST)
_lost = 0


def keep(lane: Lane, name: str, begin: int, end: int, details: SpanDetails | None = None) -> None:
    """Keeps a span that has ended."""
    global _lost
    if len(_kept) == MOST:
        _lost += 1
    _kept.append((lane, name, begin, end, details))


def gauge(process: Lane, name: str, **values: int | float) -> None:
    """Keeps current ``values`` of a lane without a thread: each is drawn as a line, with ``name`` before its own."""
    at = now()
    keep(process, name, at, at, values)


def taken() -> tuple[list[KeptSpan], int]:
    """Returns the spans since the last call, by their ends, and how many were lost because memory holds ``MOST``."""
    global _lost
    lost, _lost = _lost, 0
    return [_kept.popleft() for _ in range(len(_kept))], lost


class during:  # noqa: N801  used as a function
    """Keeps the time inside as a span: ``with spans.during(lane, "push", version=3): …``. An error ends it, too."""

    __slots__ = ("_begin", "_lane", "_name", "_said")

    def __init__(self, lane: Lane, name: str, **details: str | int | float) -> None:
        self._lane, self._name, self._said = lane, name, details

    def say(self, **details: str | int | float) -> None:
        """Adds details that are known only at the end."""
        self._said |= details

    def __enter__(self) -> Self:
        self._begin = now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._said["error"] = kind.__name__
        keep(self._lane, self._name, self._begin, now(), self._said or None)


class FreeLanes:
    """Lanes of a process for spans that overlap, such as generations: each takes the lowest free lane, so there are as
    many as ran concurrently. Only the event loop's thread uses it."""

    def __init__(self, process: str, thread: str) -> None:
        self._process, self._thread = process, thread
        self._free: list[int] = []
        self._lanes: list[Lane] = []

    @contextmanager
    def during(self, name: str, **details: str | int | float) -> Iterator[during]:
        """Records like ``during``, in a lane of its own."""
        number = self.take()
        try:
            with during(self._lanes[number], name, **details) as span:
                yield span
        finally:
            self.give(number)

    def take(self) -> int:
        """The number of a lane that is free from now on to `give`."""
        if self._free:
            return heapq.heappop(self._free)
        self._lanes.append(Lane(self._process, f"{self._thread} {len(self._lanes)}"))
        return len(self._lanes) - 1

    def give(self, number: int) -> Lane:
        """Frees a lane and returns it."""
        heapq.heappush(self._free, number)
        return self._lanes[number]


FOLDER = "profile"
"""The folder of profiled steps. Each has a folder ``step_<number>`` in it, with a file of torch's profiler for each
rank and ``ranks.json``, which names their processes in the timeline and sets their clocks right."""
_RANKS = "ranks.json"
_OF_GPU = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
_OF_CPU = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A rank's file, and its two clocks at one time, in nanoseconds: the clock of spans, and since 1970."""

    file: Path
    monotonic: int
    wall: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankKernels:
    """A rank's file. Its times since 1970 plus ``shift`` nanoseconds are the controller's; ``process`` is the rank's
    name in the timeline."""

    file: Path
    process: str
    shift: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelEvent:
    """A kernel or an operator: microseconds since 1970 by the controller's clock."""

    process: str
    thread: str
    name: str
    begin: int
    end: int


def profile_folder(run: Path, step: int) -> Path:
    """Returns the folder of a step that was profiled."""
    return run / FOLDER / f"step_{step:06d}"


def save(folder: Path, ranks: Sequence[RankKernels]) -> None:
    """Writes the list by which `read_kernels` finds the files of a step, which are in ``folder``."""
    said = [{"file": one.file.name, "process": one.process, "shift": one.shift} for one in ranks]
    write_atomically(folder / _RANKS, json.dumps(said, indent=1).encode(), private=True)


def read_kernels(run: Path) -> Iterator[KernelEvent]:
    """Yields all records of a run's folder. Raises DataError naming a folder with files that are torn or foreign."""
    for known in sorted((run / FOLDER).glob(f"*/{_RANKS}")):
        try:
            ranks = [
                RankKernels(file=known.parent / str(one["file"]), process=str(one["process"]), shift=int(one["shift"]))
                for one in parse(known.read_bytes())
            ]
            for rank in ranks:
                yield from _kernel_events(rank)
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{known.parent}: not what a run recorded ({error!r}); remove the folder, it is no part of a resume"
            ) from error


def _kernel_events(rank: RankKernels) -> Iterator[KernelEvent]:
    with gzip.open(rank.file) as file:
        found: dict[str, Any] = parse(file.read())
    base = int(found["baseTimeNanoseconds"]) + rank.shift
    for event in found["traceEvents"]:
        kind = event.get("cat")
        if event["ph"] != "X" or kind not in _OF_GPU + _OF_CPU:
            continue
        of_gpu = kind in _OF_GPU
        begin = base + round(1000 * float(event["ts"]))
        yield KernelEvent(
            process=rank.process,
            thread=f"GPU {event['pid']}, stream {event['tid']}" if of_gpu else f"operators, thread {event['tid']}",
            name=str(event["name"]),
            begin=begin // 1000,  # whole microseconds, so that nested events stay nested
            end=(begin + round(1000 * float(event["dur"]))) // 1000,
        )


CALLS = Lane("", "calls")  # a lane of a rank's process, which the controller names
_MOST = 4096  # spans of an answer; the oldest go first


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimed:
    """The activity of a rank up to an answer, in nanoseconds of its own clock: when the whole call had arrived, when
    its answer was ready, and spans (thread, name, begin, end, details). ``lost`` counts missing spans; ``peak`` is the
    most bytes that the rank has held since its start."""

    arrived: int
    answered: int
    spans: Sequence[tuple[str, str, int, int, Mapping[str, str | int | float] | None]]
    lost: int
    peak: int = 0

    def call_seconds(self, call: str) -> float:
        """Returns the seconds of the call that was answered, without its wait for earlier calls."""
        return sum(end - begin for thread, name, begin, end, _ in self.spans if (thread, name) == ("calls", call)) / 1e9


def timed(arrived: int, peak: int = 0) -> RankTimed:
    """Returns this rank's activity since its last answer, to send now. ``arrived``: when the whole call had arrived."""
    kept, lost = taken()
    sent = [(lane.thread, name, begin, end, said) for lane, name, begin, end, said in kept[-_MOST:]]
    return RankTimed(arrived=arrived, answered=now(), spans=sent, lost=lost + len(kept) - len(sent), peak=peak)


class RankTimes:
    """The controller's side: the lanes of one rank, named ``process``, and its clock. A rank answers in order."""

    def __init__(self, process: str) -> None:
        self.clock = Clock()
        self._process, self._lanes = process, dict[str, Lane]()
        self._controllers = Lane(process, "asked by the controller")
        self._asked: deque[tuple[str, int]] = deque()
        self._heard = 0

    def placed(self, recorded: Recorded) -> RankKernels:
        """Returns a file of the rank's kernels with the difference of its clock to this process's."""
        here = time.time_ns() - now()
        shift = recorded.monotonic + self.clock.offset + here - recorded.wall
        return RankKernels(file=recorded.file, process=self._process, shift=shift)

    def on_call(self, call: str) -> None:
        """Notes a call that is about to be sent."""
        self._asked.append((call, now()))

    def answered(self, timed: RankTimed | None) -> None:
        """Notes the answer to the oldest call; None: the rank reports no times."""
        heard, (call, asked) = now(), self._asked.popleft()
        begin = max(asked, self._heard)  # the call waits for earlier ones
        self._heard = heard
        keep(self._controllers, call, begin, heard, {"queued_us": (begin - asked) // 1000})
        if timed is None:
            return
        self.clock.exchanged(sent_at=asked, arrived=timed.arrived, answered=timed.answered, received_at=heard)
        for thread, name, begin, end, more in timed.spans:
            keep(self._lane(thread), name, begin, end, more)
        if timed.lost:
            keep(self._lane("calls"), f"{timed.lost} spans were lost", timed.arrived, timed.arrived)

    def _lane(self, thread: str) -> Lane:
        if thread not in self._lanes:
            self._lanes[thread] = Lane(self._process, thread, self.clock)
        return self._lanes[thread]


FILES = ("trace_before.json", "trace.json")
MOST_BYTES = 32 << 20  # bytes of each of the two
_JOINED = ("generate", "attempt")  # spans that arrows join, by their requests: from the first to each of the others
_FIRST = ("controller", "sampling", "replica", "rank")  # processes in the order in which they are shown
_THREADS = ("steps", "phases", "pushes", "saves", "calls", "asked by the controller")  # threads in their order
_NUMBERED = {"request": 100, "reward": 1_000_000}  # the first places of threads with numbers, which follow
_OTHERS = 2_000_000
_FLOWS_IN = ',"flow_in":true'


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """A span as it was written: microseconds since 1970 by the controller's clock.

    Without a thread it has values of its process, by their names in ``details``, at ``begin``. Arrows join events of
    one ``flow``."""

    process: str
    thread: str
    name: str
    begin: int
    end: int
    details: SpanDetails
    flow: int | None = None


class _Lines:
    """Makes the lines of a file's events. A process and a thread are named before their first event."""

    def __init__(self) -> None:
        self.processes: dict[str, int] = {}
        self._threads: dict[tuple[str, str], str] = {}  # (process, thread) -> its numbers in a line

    def span(
        self, process: str, thread: str, name: str, begin: int, end: int, details: SpanDetails | None, flow: int | None
    ) -> str:
        """Returns the line of a span, or of values if ``thread`` is empty: Perfetto reads no escapes in their names."""
        head, numbers = "", self._threads.get((process, thread))
        if numbers is None:
            head = self._named(process, thread)
            numbers = self._threads[process, thread]
        more = _args(tuple(details.items())) if details else ""
        if flow is not None:
            more += f',"bind_id":"{flow:#x}","flow_out":true{"" if name == _JOINED[0] else _FLOWS_IN}'
        if not thread:
            return f'{head}{{"ph":"C","name":{_quoted(name)},"ts":{begin},{numbers}{more}}},\n'
        return f'{head}{{"ph":"X","name":{_quoted(name)},"ts":{begin},"dur":{end - begin},{numbers}{more}}},\n'

    def end(self) -> str:
        """Returns the last lines: the last entry in JSON has no comma."""
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
    """Appends spans to ``folder``/trace.json. Controller process only. Raises OSError that names the file.

    It is in Chromium's "Trace Event Format" as a JSON array. A line is one event: a file torn by a kill is read to
    its last whole line, and the format lets the closing bracket be missing. A file that is full, or that an earlier
    start wrote, is renamed to trace_before.json and replaces the file of that name.

    Perfetto shows processes by their sort index (before v53 by their number of spans), and threads by their number. The
    number of their process would be its main thread's. Arrows point from a generation to each of its requests.
    """

    def __init__(self, folder: Path, max_bytes: int = MOST_BYTES) -> None:
        self._before, self._path = (folder / name for name in FILES)
        self._most, self._size = max_bytes, 0
        self._wall = time.time_ns() - now()
        self._file: IO[bytes] | None = None
        self._lines = _Lines()
        self._clocks: dict[str, Clock] = {}  # process -> its clock
        self._ends: dict[Lane, int] = {}  # the last end in the file, for lanes with a clock
        self._flows: dict[object, int] = {}  # request that is not over -> its flow's number in this file
        self._flow = time.time_ns() // 1000  # the number of the latest; another start has other numbers

    def append(self, kept: Iterable[KeptSpan]) -> None:
        """Writes spans, and how far clocks may be off; readers see them when this returns."""
        self._open()
        flows, ends = self._flows_of(kept := list(kept)), dict(self._ends)
        with add_path_to_errors(self._path):
            # the longer of two spans with equal begins is the outer one
            for span, flow in sorted(zip(kept, flows, strict=True), key=lambda one: (one[0][2], -one[0][3])):
                file = self._with_room()
                self._size += file.write(self._line(span, flow, ends).encode("ascii"))
            at = (now() + self._wall) // 1000
            for process, clock in self._clocks.items():
                if clock.bound is not None:
                    said = {"wrong by us, at most": round(clock.bound / 1000, 1)}
                    file = self._with_room()
                    self._size += file.write(self._lines.span(process, "", "clock", at, at, said, None).encode("ascii"))
            self._open().flush()

    def close(self) -> None:
        """Ends the file, if it is open."""
        file, self._file = self._file, None
        if file is not None:
            with add_path_to_errors(self._path), file:
                file.write(self._lines.end().encode("ascii"))

    def _with_room(self) -> IO[bytes]:
        """Returns the file, or the next one, in which no lane has a name yet."""
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
        with add_path_to_errors(self._path):
            self._file = self._path.open("wb")
            self._size = self._file.write(b"[\n")
        return self._file

    def _flows_of(self, kept: Iterable[KeptSpan]) -> list[int | None]:
        """Returns the flow's number of each span: one for a generation and its requests to servers, which end first."""
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
        """Returns a span's line. It begins no earlier than ``ends`` of earlier calls, even if a clock's offset fell."""
        lane, name, begin, end, said = span
        offset = 0 if lane.clock is None else lane.clock.offset
        # whole microseconds, so that nested spans stay nested
        first, last = ((time + self._wall + offset) // 1000 for time in (begin, end))
        if lane.clock is not None:
            self._clocks[lane.process] = lane.clock
            first, last = (max(time, ends.get(lane, 0)) for time in (first, last))
            self._ends[lane] = max(last, self._ends.get(lane, 0))
        return self._lines.span(lane.process, lane.thread, name, first, last, said, flow)


def read_trace(folder: Path) -> list[TraceEvent]:
    """Returns the events of a run's folder, by their begin.

    Raises DataError if there is no file, or for a line that is not an event.
    """
    paths = [folder / name for name in FILES if (folder / name).is_file()]
    if not paths:
        raise DataError(f"{folder}: it has no trace.json; a run writes it with its first step")
    events = [event for path in paths for event in _events(path)]
    return sorted(events, key=lambda event: (event.begin, -event.end))


def write_trace(folder: Path, out: Path) -> Path:
    """Writes all events of a run's folder as one trace, with kernels of profiled steps; atomic. Returns ``out``.

    It is compressed if ``out`` ends in .gz.

    Raises as `read_trace` and `read_kernels`.
    """
    lines = _Lines()
    events = [
        lines.span(event.process, event.thread, event.name, event.begin, event.end, event.details, event.flow)
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
                details=found.get("args", {}),
                flow=None if flow is None else int(flow, 16),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}:{number}: not an event ({error!r}); remove the file, it is no part of a resume"
            ) from error


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields whole lines except brackets, with their numbers."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n") and line.strip() not in (b"[", b"]"):
                yield number, line


def _meta(event: str, process: int, thread: int = 0, /, **value: str | int) -> str:
    return f'{{"ph":"M","name":"{event}","pid":{process},"tid":{thread},"args":{json.dumps(value)}}},\n'


@lru_cache(4096)
def _args(details: tuple[tuple[str, str | int | float], ...]) -> str:
    return f',"args":{json.dumps(dict(details))}'


@lru_cache(4096)
def _quoted(name: str) -> str:
    return json.dumps(name)


def _place(thread: str, known: int) -> int:
    """Returns the place at which a thread is shown in its process; ``known``: how many threads have numbers."""
    if thread in _THREADS:
        return _THREADS.index(thread) + 1
    word, _, number = thread.rpartition(" ")
    return _NUMBERED[word] + int(number) if word in _NUMBERED and number.isdecimal() else _OTHERS + known


def _rank(process: str) -> int:
    """Returns the place of a process in the picture: the controller first, ranks by their numbers, other roles last."""
    word, number = process.split(" ")[0], re.search(r"\d+", process)
    place = _FIRST.index(word) if word in _FIRST else len(_FIRST)
    return place * 1_000_000 + (int(number[0]) if number else 0)


class Timeline:
    """A run's timeline, in ``folder``. Controller process only. If it cannot write, it warns and ends no run."""

    def __init__(self, folder: Path, max_bytes: int = MOST_BYTES) -> None:
        self._file, self._failed = TraceFile(folder, max_bytes), False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="timeline")
        self._writing: Future[None] | None = None

    def step(self, row: Mapping[str, object], times: tuple[int, int] | None) -> None:
        """Keeps the step of a row of metrics as a span, if its ``times`` are known, and begins to write all spans."""
        if times is not None:
            warm = row.get("phase") == "warm_start"
            name = f"warm start step {row.get('warm_start/step')}" if warm else f"step {row.get('step')}"
            keep(STEPS, name, *times)
        if self._writing is None or self._writing.done():  # otherwise the next step writes these, too
            self._writing = self._thread.submit(self._write, *taken())

    def flush(self) -> Future[None]:
        """Writes all current spans; the future is done once readers see them."""
        self._writing = self._thread.submit(self._write, *taken())
        return self._writing

    def close(self) -> None:
        """Writes the remaining spans, and ends the file."""
        if self._writing is not None:
            self._writing.result()
        self._thread.shutdown()
        self._write(*taken())
        try:
            self._file.close()
        except Exception as error:  # noqa: BLE001  `_warn` logs it
            self._warn(error)

    def _write(self, kept: Sequence[KeptSpan], lost: int) -> None:
        if self._failed or not kept:
            return
        if lost:
            logger.warning("the timeline lacks %d spans: memory holds %d between two writes", lost, MOST)
        try:
            self._file.append(kept)
        except Exception as error:  # noqa: BLE001  `_warn` logs it
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        """Stops writing and logs a warning. A fault of our own has its traceback."""
        self._failed, ours = True, not isinstance(error, OSError)
        what = f"{type(error).__name__}: {error}" if ours else str(error)
        logger.warning("the timeline ends here: %s", what, exc_info=ours)
