"""Compares the speed of a role's ranks, and names those that are slow in most of the latest steps, with their nodes."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low

from launcher.controller.group import WorkerGroup
from launcher.controller.handle import WorkerHandle
from rl_megatron.config.run import RunConfig
from rl_megatron.durable import write_atomically
from rl_megatron.observability.speed import Spent
from rl_megatron.placement.names import LEARNER, called

logger = logging.getLogger(__name__)

_HEAD = """\
Each rank's seconds in the median of {steps} steps, the slowest rank first; written every {steps} steps.
times: seconds of a probe, a fixed matrix product, over those of the median rank of its role
passes: seconds of forward and backward passes in a step, with its waits for other ranks in them
memory: the most that it has held; of a GPU, as torch's allocator has it

{rank:20} {node:24} {pid:>8} {times:>8} {probe:>10} {passes:>10} {memory:>10}
"""
_LINE = "{rank:20} {node:24} {pid:8} {times:8.2f} {probe:10.3f} {passes:10.3f} {memory:10.2f}\n"
_READ = re.compile(r"^rank (\d+) +(\S+) +(\d+) +([0-9.]+) ", re.MULTILINE)


def unnamed(nodes: Sequence[str]) -> None:
    """Tell nobody which nodes are slow: nothing restarts the run."""


def slowness(steps: Sequence[Sequence[float]]) -> list[float]:
    """How many times as long as the median rank each rank takes: seconds [steps][ranks] -> [ranks].

    Each step is compared within itself, as clocks and loads change over time, and a rank has its median step: what
    happens in half of the steps or fewer does not count. Medians are the lower of two, so that one of two ranks can be
    slow, and half of all.
    """
    compared = [[seconds / median_low(step) for seconds in step] for step in steps]
    return [median_low(each) for each in zip(*compared, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPace:
    """A rank's medians over some steps."""

    role: str
    rank: int
    node: str
    pid: int
    times: float  # its `slowness`
    probe: float  # seconds
    passes: float  # seconds
    peak: int  # bytes; the most of all steps


@dataclass(slots=True)
class _Window:
    """The steps since a role's ranks were compared last: seconds [steps][ranks]."""

    probe: list[list[float]] = field(default_factory=list)
    passes: list[list[float]] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)  # bytes of each rank


@dataclass(frozen=True, slots=True)
class Ranked:
    """A learner rank as ranks.txt has it: its process, and its `slowness`."""

    rank: int
    node: str
    pid: int
    times: float


def read_ranks(file: Path) -> list[Ranked]:
    """The learner's ranks in a run's ranks.txt, the slowest first; none before a run has compared them."""
    found = _READ.findall(file.read_text()) if file.is_file() else []
    return [Ranked(int(rank), node, int(pid), float(times)) for rank, node, pid, times in found]


class Speeds:
    """The speeds of all ranks of a run. ``name_slow`` gets the slow nodes, the slowest first, when they change."""

    def __init__(
        self,
        groups: Mapping[str, WorkerGroup],
        config: RunConfig,
        run_folder: Path,
        name_slow: Callable[[Sequence[str]], None] = unnamed,
    ) -> None:
        self._workers = {role: group.workers for role, group in groups.items()}
        self._factor, self._steps = config.run.slow_factor, config.run.slow_steps
        self._file, self._name_slow = run_folder / "ranks.txt", name_slow
        self._windows = {role: _Window() for role in groups}
        self._paces: dict[str, list[RankPace]] = {}  # of the latest comparison of each role
        self._slow: dict[str, set[str]] = {}  # ranks by node, the slowest node first

    def row(self) -> dict[str, float]:
        """End a step: compare the ranks if it is the last of ``run.slow_steps``. Returns the learner's metrics of the
        step; none if some rank made no probe in it."""
        row: dict[str, float] = {}
        for role, workers in self._workers.items():
            spent = [_spent(worker) for worker in workers]
            if not all(each.probes for each in spent):
                continue
            probe, passes = [each.probing / each.probes for each in spent], [each.passes for each in spent]
            window = self._windows[role]
            window.peak = [each.peak for each in spent]
            if role == LEARNER:
                row = _metrics(probe, passes) | {"memory/peak": max(window.peak)}
            window.probe.append(probe)
            window.passes.append(passes)
            if len(window.probe) == self._steps:
                self._compare(role, window)
                self._windows[role] = _Window()
        return row

    def _compare(self, role: str, window: _Window) -> None:
        times = slowness(window.probe)
        probe, passes = ([median_low(each) for each in zip(*s, strict=True)] for s in (window.probe, window.passes))
        self._paces[role] = [
            RankPace(
                role=role,
                rank=w.rank,
                node=w.process.node,
                pid=w.process.pid,
                times=times[i],
                probe=probe[i],
                passes=passes[i],
                peak=window.peak[i],
            )
            for i, w in enumerate(self._workers[role])
        ]
        paces = sorted((p for each in self._paces.values() for p in each), key=lambda p: -p.times)
        self._write(paces)
        assert self._factor is not None  # else no rank makes a probe
        before, self._slow = self._slow, {}
        for p in paces:
            if p.times >= self._factor:
                self._slow.setdefault(p.node, set()).add(called(p.role, p.rank))
        for node, ranks in self._slow.items():
            if ranks - before.get(node, set()):
                logger.warning("%s", self._said(node, [p for p in paces if called(p.role, p.rank) in ranks]))
        for node in before.keys() - self._slow.keys():
            logger.warning("%s is no longer slow", node)
        if list(before) != list(self._slow):
            self._name_slow(list(self._slow))

    def _said(self, node: str, slow: Sequence[RankPace]) -> str:
        worst = slow[0]
        ranks = {role: sorted(p.rank for p in slow if p.role == role) for role in self._paces}
        who = " and ".join(called(role, ", ".join(map(str, numbers))) for role, numbers in ranks.items() if numbers)
        return (
            f"{who} on {node} is slow: a fixed computation takes {worst.times:.1f} times as long as on the median of "
            f"{len(self._paces[worst.role])} ranks, over the last {self._steps} steps, and other ranks wait for it; "
            f"{self._file} has the seconds of all ranks"
        )

    def _write(self, paces: Sequence[RankPace]) -> None:
        names = {name: name for name in ("rank", "node", "pid", "times")}
        text = _HEAD.format(steps=self._steps, **names, probe="probe ms", passes="passes s", memory="memory GB")
        for p in paces:
            shown = {"rank": called(p.role, p.rank), "node": p.node, "pid": p.pid, "times": p.times}
            text += _LINE.format(**shown, probe=p.probe * 1e3, passes=p.passes, memory=p.peak / 1e9)
        write_atomically(self._file, text.encode())


def _spent(worker: WorkerHandle) -> Spent:
    """The sums since the last call, and the greatest peak."""
    spent, worker.spent = worker.spent, []
    return Spent(
        passes=sum(s.passes for s in spent),
        probing=sum(s.probing for s in spent),
        probes=sum(s.probes for s in spent),
        peak=max((s.peak for s in spent), default=0),
    )


def _metrics(probe: Sequence[float], passes: Sequence[float]) -> dict[str, float]:
    """Metrics of a step, from each rank's mean probe and its passes."""
    slowest = max(probe)
    return {
        "seconds/passes_median": median_low(passes),
        "seconds/passes_max": max(passes),
        "ranks/slowest": probe.index(slowest),
        "ranks/slowness": slowest / median_low(probe),
    }
