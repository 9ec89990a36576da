"""Ends a run that hangs, and says why: which rank makes no progress, where every rank stands, and which is behind.

It counts seconds instead of reading a clock, so that a run that is suspended as a whole does not count as hanging.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from launcher.controller.handle import Failure, WorkerHandle
from launcher.processes import stacks
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import WorkerDied
from rl_megatron.files import make_inside
from rl_megatron.placement.names import LEARNER, file_stem

logger = logging.getLogger(__name__)

_DUMP_SECONDS = 10.0  # a process's time to write its stacks
_QUIET_SECONDS = 5  # after which a process may have been stopped
_WOKEN = 16  # wakes at most so many processes
_DISK = frozenset({"start_from", "save", "written", "durable", "verify", "load", "export"})  # of a model's files


class Watchdog:
    """Watches the ranks of a run from the controller. All stacks are written to ``folder``."""

    def __init__(self, workers: Sequence[WorkerHandle], failure: Failure, config: RunConfig, folder: Path) -> None:
        self._workers, self._failure, self._folder = workers, failure, folder
        self._silence = config.learner.timeout_seconds / 2
        self._limit, self._disk_limit = config.watchdog_seconds, config.run.watchdog_disk_seconds

    async def watch(self) -> None:
        """Wait until a rank sends no heartbeat, or makes no progress in a call, for too long; then end the run."""
        while True:
            await asyncio.sleep(1.0)
            for worker in self._workers:
                worker.tick()
            silent = [w for w in self._workers if w.quiet > self._silence]
            stuck = [w for w in self._workers if w.asked is not None and w.still > self._limit_of(w.asked)]
            if silent or stuck:
                await self._end(silent, stuck)
                return

    def _limit_of(self, call: str) -> float:
        return self._disk_limit if call in _DISK else self._limit

    async def _end(self, silent: Sequence[WorkerHandle], stuck: Sequence[WorkerHandle]) -> None:
        self._failure.claim()  # from here on ranks' complaints about each other are noise
        quiet = {w: w.quiet for w in self._workers if w.quiet > _QUIET_SECONDS}
        found = await self._stacks(quiet)
        role = (*silent, *sorted(stuck, key=lambda w: w.beats))[0].role  # its ranks alone share collectives
        said = {r: stacks.explain({w.rank: s for w, s in found.items() if w.role == r}) for r in self._roles}
        texts = [text if r == LEARNER else f"of the {r}, {text}" for r, (_, text) in said.items() if text]
        everybody = "; ".join(texts)
        behind = [w for w in found if w.role == role and w.rank in said[role][0]]
        if silent:
            first, limit = silent[0], self._silence
            what = f"has sent no heartbeat for {limit:g} s, half of learner.timeout_seconds: it hangs or was stopped"
        else:
            culprits = [w for ws in (quiet, behind) for w in ws if w.asked is not None and w.role == role]
            first = (culprits or sorted(stuck, key=lambda w: w.beats))[0]
            limit = self._limit_of(first.asked or "")
            key = "watchdog_disk_seconds" if first.asked in _DISK else "watchdog_seconds"
            silence = f", and has sent no heartbeat for {quiet[first]} s" if first in quiet else ""
            what = f"makes no progress for {limit:g} s (run.{key}){silence}"
        lines = [f"{what}; it was in {first.doing}", everybody or "no rank was ready to report its stack"]
        if found:
            lines.append(f"stacks of all processes: {self._folder}")
        error = WorkerDied(f"{first.who} " + "; ".join(lines))
        self._failure.report(error, at_once=True, whose=first.process, claimed=True)

    @property
    def _roles(self) -> list[str]:
        return list(dict.fromkeys(w.role for w in self._workers))

    async def _stacks(self, quiet: Collection[WorkerHandle]) -> dict[WorkerHandle, stacks.Stack | None]:
        """The stacks of every ready rank, ``quiet`` ones last; for the controller, of its tasks."""
        ready = [w for w in self._workers if w.ready]
        files = {w: self._folder / f"{file_stem(w.role, w.rank)}.txt" for w in ready}
        before = {file: _size(file) for file in files.values()}
        for worker in ready:
            worker.dump()
        if ready:
            self._write_tasks()
        await _written({files[w]: before[files[w]] for w in ready if w not in quiet})
        stopped = [w for w in ready if w in quiet][:_WOKEN]
        await asyncio.gather(*(worker.process.wake() for worker in stopped))  # one continues, and others with it
        await _written(before)
        return {worker: stacks.read(_text(file)) for worker, file in files.items()}

    def _write_tasks(self) -> None:
        make_inside(self._folder, mode=0o700)
        with (self._folder / "controller.txt").open("a") as file:
            file.writelines(f"{text}\n\n" for text in map(stacks.of_task, asyncio.all_tasks()))


async def _written(before: Mapping[Path, int]) -> None:
    """Wait, with a limit, until the files have grown."""
    for _ in range(int(_DUMP_SECONDS * 10)):
        if all(_size(file) > size for file, size in before.items()):
            await asyncio.sleep(0.2)  # until they are complete
            return
        await asyncio.sleep(0.1)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""
