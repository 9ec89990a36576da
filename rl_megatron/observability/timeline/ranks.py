"""The spans of a rank: its own process packs them into its answers, and the controller keeps them on its own clock.

A step that was profiled has a folder, ``profile/step_<number>`` in the run's, with a file of torch's profiler for each
rank and ``ranks.json``, which names their processes in the timeline and sets their clocks right. Its kernels and
operators are events of the run's timeline.
"""

from __future__ import annotations

import gzip
import json
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_megatron.errors import DataError
from rl_megatron.files import parse, write_atomically
from rl_megatron.observability.timeline import spans
from rl_megatron.observability.timeline.spans import Clock, Lane

FOLDER = "profile"
_RANKS = "ranks.json"
_OF_GPU = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
_OF_CPU = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A rank's file, and what its two clocks said at one time, in nanoseconds: that of spans, and since 1970."""

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


def folder_of(run: Path, step: int) -> Path:
    """The folder of a step that was profiled."""
    return run / FOLDER / f"step_{step:06d}"


def save(folder: Path, ranks: Sequence[RankKernels]) -> None:
    """Have `read_kernels` find the files of a step, which are in ``folder``."""
    said = [{"file": one.file.name, "process": one.process, "shift": one.shift} for one in ranks]
    write_atomically(folder / _RANKS, json.dumps(said, indent=1).encode(), private=True)


def read_kernels(run: Path) -> Iterator[KernelEvent]:
    """All that was recorded in a run's folder. Raises DataError naming a folder with files that are torn or others'."""
    for known in sorted((run / FOLDER).glob(f"*/{_RANKS}")):
        try:
            ranks = [
                RankKernels(file=known.parent / str(one["file"]), process=str(one["process"]), shift=int(one["shift"]))
                for one in parse(known.read_bytes())
            ]
            for rank in ranks:
                yield from _events(rank)
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{known.parent}: not what a run recorded ({error!r}); remove the folder, it is no part of a resume"
            ) from error


def _events(rank: RankKernels) -> Iterator[KernelEvent]:
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
            begin=begin // 1000,  # whole ones, so that what was nested stays so
            end=(begin + round(1000 * float(event["dur"]))) // 1000,
        )


CALLS = Lane("", "calls")  # in a rank's process, which the controller names
_MOST = 4096  # spans of an answer; the oldest go first


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimed:
    """What a rank did up to an answer, in nanoseconds of its own clock: when the call was there as a whole, when its
    answer was ready, and spans (thread, name, begin, end, what else is said), of which ``lost`` are missing; and the
    most bytes that it has held since its start."""

    arrived: int
    answered: int
    spans: Sequence[tuple[str, str, int, int, Mapping[str, str | int | float] | None]]
    lost: int
    peak: int = 0

    def seconds_of(self, call: str) -> float:
        """Returns the seconds of the call that was answered, without its wait behind others."""
        return sum(end - begin for thread, name, begin, end, _ in self.spans if (thread, name) == ("calls", call)) / 1e9


def timed(arrived: int, peak: int = 0) -> RankTimed:
    """What this rank did since its last answer; to be sent at once. ``arrived``: when the call was here as a whole."""
    kept, lost = spans.taken()
    sent = [(lane.thread, name, begin, end, said) for lane, name, begin, end, said in kept[-_MOST:]]
    return RankTimed(arrived=arrived, answered=spans.now(), spans=sent, lost=lost + len(kept) - len(sent), peak=peak)


class RankTimes:
    """The controller's end: the lanes of one rank, named ``process``, and its clock. A rank answers in order."""

    def __init__(self, process: str) -> None:
        self.clock = Clock()
        self._process, self._lanes = process, dict[str, Lane]()
        self._controllers = Lane(process, "asked by the controller")
        self._asked: deque[tuple[str, int]] = deque()
        self._heard = 0

    def placed(self, recorded: Recorded) -> RankKernels:
        """A file of the rank's kernels, with the difference of its clock to this process's."""
        here = time.time_ns() - spans.now()
        shift = recorded.monotonic + self.clock.offset + here - recorded.wall
        return RankKernels(file=recorded.file, process=self._process, shift=shift)

    def asked(self, call: str) -> None:
        """A call is about to be sent."""
        self._asked.append((call, spans.now()))

    def answered(self, said: RankTimed | None) -> None:
        """The answer to the oldest call is here; None from a rank that says no times."""
        heard, (call, asked) = spans.now(), self._asked.popleft()
        begin = max(asked, self._heard)  # behind others it waits
        self._heard = heard
        spans.keep(self._controllers, call, begin, heard, {"queued_us": (begin - asked) // 1000})
        if said is None:
            return
        self.clock.exchanged(asked=asked, arrived=said.arrived, answered=said.answered, heard=heard)
        for thread, name, begin, end, more in said.spans:
            spans.keep(self._lane(thread), name, begin, end, more)
        if said.lost:
            spans.keep(self._lane("calls"), f"{said.lost} spans were lost", said.arrived, said.arrived)

    def _lane(self, thread: str) -> Lane:
        if thread not in self._lanes:
            self._lanes[thread] = Lane(self._process, thread, self.clock)
        return self._lanes[thread]
