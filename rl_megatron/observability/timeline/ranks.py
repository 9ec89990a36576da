"""The spans of a rank: its own process packs them into its answers, and the controller keeps them on its own clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_megatron.observability.timeline import spans
from rl_megatron.observability.timeline.kernels import RankKernels, Recorded
from rl_megatron.observability.timeline.spans import Clock, Lane

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
