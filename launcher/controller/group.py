"""Starts, calls and ends all ranks of a role together.

Ends a run that hangs, and says why: which rank makes no progress, where every rank stands, and which is behind. Has
ranks record their kernels, and finds the learner rank whose passes take longest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median_low
from typing import Any

from launcher import wire
from launcher.controller.handle import STOP_SECONDS, Failure, RankProcess, WorkerHandle, seen
from launcher.processes import stacks
from launcher.wire import Setup
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import WorkerDied
from rl_megatron.files import make_inside
from rl_megatron.interfaces import unheard
from rl_megatron.observability.timeline import Recorded, save
from rl_megatron.placement.names import LEARNER, called, file_stem

logger = logging.getLogger(__name__)

_DUMP_SECONDS = 10.0  # a process's time to write its stacks
_QUIET_SECONDS = 5  # a process that is quiet for longer may have been stopped
_WOKEN = 16  # wakes at most so many processes
_DISK = frozenset({"start_from", "save", "written", "durable", "verify", "load", "export"})  # calls that use a disk


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


class WorkerGroup:
    """All ranks of a role, one torch.distributed world. The first failure of any rank of the run ends every wait, so
    nothing waits for a dead rank."""

    def __init__(self, workers: Sequence[WorkerHandle], failure: Failure) -> None:
        self.workers, self._failure = workers, failure
        self.gpus: Sequence[str] = ()  # CUDA's name for each rank's, once they are ready; none of CPUs

    async def each(self, name: str, *arguments: Any) -> list[Any]:
        """Make the same call on every rank. Returns answers in rank order."""
        return await self.ask(name, {w.rank: arguments for w in self.workers})

    async def ask(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """Call the ranks in ``arguments``, each with its own. Returns answers in that order. Raises as `gather`."""
        return await self.gather(self.begin(name, arguments))

    def begin(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> list[asyncio.Future[Any]]:
        """Send these calls, to be answered in that order. Ranks with the same tuple get one message, packed once."""
        packed = {id(given): given for given in arguments.values()}
        sent = {key: wire.pack((name, given)) for key, given in packed.items()}
        return [self.workers[rank].send(name, sent[id(given)]) for rank, given in arguments.items()]

    async def meet(self, name: str, *arguments: Any) -> list[Any]:
        """Make a collective call on every rank once none makes a call alone: the others would wait for that rank in the
        collectives of this one, with a time limit."""
        while alone := [answer for worker in self.workers for answer in worker.alone]:
            await self.gather([asyncio.shield(answer) for answer in alone])
        return await self.each(name, *arguments)

    async def gather(self, answers: Sequence[asyncio.Future[Any]]) -> list[Any]:
        """Await answers. Raises WorkerDied, or a worker's error, once any worker of the run has failed.

        A step may take any time while its collectives end in time and every worker sends heartbeats.
        """
        everything: asyncio.Future[list[Any]] = asyncio.gather(*answers)
        everything.add_done_callback(seen)
        either: set[asyncio.Future[Any]] = {everything, self._failure.known}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._failure.known.done():
            everything.cancel()
            self._failure.known.result()
        return await everything

    async def prepare(self, setup: Setup, tell: Callable[[str], None]) -> None:
        """Wait until every rank is ready to serve. Raises WorkerDied, or a rank's error."""
        answers = [w.send("prepare", wire.pack(setup)) for w in self.workers]  # with the name of its GPU, if any
        _counted(answers, setup.role, tell)
        limit = setup.config.learner.timeout_seconds
        try:
            async with asyncio.timeout(limit):
                self.gpus = [name for name in await self.gather(answers) if name is not None]
        except TimeoutError as error:
            late = [str(w.rank) for w, answer in zip(self.workers, answers, strict=True) if not answer.done()]
            raise WorkerDied(
                f"{called(setup.role, ', '.join(late))}: not ready after learner.timeout_seconds={limit:g}; "
                "raise it if loading takes longer"
            ) from error

    async def close(self) -> None:
        """Ask all ranks to end. The work is saved, so `WorkerHandle.stop` ends any that does not."""
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self.each("close")
        except TimeoutError:
            logger.warning("not all learner processes left their process groups within %g s; ending them", STOP_SECONDS)
            for handle in self.workers:
                handle.process.kill()


@contextlib.asynccontextmanager
async def serving(
    teams: Sequence[tuple[Setup, Sequence[RankProcess]]],
    failure: Failure,
    on_signal: Callable[[str], None] | None = None,
    tell: Callable[[str], None] = unheard,
) -> AsyncIterator[Mapping[str, WorkerGroup]]:
    """Yield the ready ranks of each role. Leaving the context ends them.

    ``on_signal`` gets the name of a signal that a rank forwarded, ``tell`` how many ranks are ready.
    """
    groups = {
        setup.role: WorkerGroup([WorkerHandle(process, failure, on_signal) for process in processes], failure)
        for setup, processes in teams
    }
    workers = [handle for group in groups.values() for handle in group.workers]
    first, _ = teams[0]
    folder = first.run_folder / "stacks" / time.strftime("%Y%m%d-%H%M%S")
    watching = asyncio.create_task(Watchdog(workers, failure, first.config, folder).watch())
    try:
        await asyncio.gather(*(groups[setup.role].prepare(replace(setup, stacks=folder), tell) for setup, _ in teams))
        yield groups
        await asyncio.gather(*(group.close() for group in groups.values()))
    except BaseException:
        for handle in workers:
            handle.process.kill()
        raise
    finally:
        watching.cancel()
        await asyncio.gather(*(handle.stop() for handle in workers))
        stacks.tidy(folder.parent)


def _counted(answers: Sequence[asyncio.Future[Any]], role: str, tell: Callable[[str], None]) -> None:
    """Call ``tell`` for each rank that is ready, or, of many ranks, for each eighth of them."""
    ready, part = 0, max(1, len(answers) // 8)

    def one_more(answer: asyncio.Future[Any]) -> None:
        nonlocal ready
        if answer.cancelled() or answer.exception() is not None:
            return
        ready += 1
        if ready % part == 0 or ready == len(answers):
            tell(f"{ready} of {len(answers)} {role} ranks are ready")

    for answer in answers:
        answer.add_done_callback(one_more)


@contextlib.asynccontextmanager
async def record_kernels(groups: Collection[WorkerGroup], ranks: Collection[int], folder: Path) -> AsyncIterator[None]:
    """Records the kernels of those of ``ranks`` that each group has, while the context is open, into ``folder``.

    Raises WorkerDied. If an error ends the context, nothing is written.
    """
    workers = [(group, [one for one in group.workers if one.rank in ranks]) for group in groups]
    await asyncio.gather(*(group.ask("begin_kernels", {one.rank: () for one in its}) for group, its in workers))
    yield
    written = []
    for group, its in workers:
        files = {one.rank: (folder / f"{file_stem(one.role, one.rank)}.json.gz",) for one in its}
        answers: list[Recorded | str] = await group.ask("end_kernels", files)
        for worker, answer in zip(its, answers, strict=True):
            if isinstance(answer, str):
                logger.warning("kernels were not written: %s", answer)
            else:
                written.append(worker.times.placed(answer))
    await asyncio.to_thread(save, folder, written)
    logger.info("kernels of the step are in %s; rl-megatron report RUN --trace FILE has them too", folder)


_SLOW = 1.5  # times the median rank's seconds


class SlowestRank:
    """Compares seconds of passes, in which a rank also waits for others: inside a layer all are as late as one."""

    def __init__(self, workers: Sequence[WorkerHandle]) -> None:
        self._workers = workers
        self._named: int | None = None  # the rank that was logged last

    def row(self) -> dict[str, float]:
        """Returns metrics of the passes since the last call. Returns none for one rank, or if a rank made no pass."""
        seconds = [worker.pass_seconds for worker in self._workers]
        for worker in self._workers:
            worker.pass_seconds = 0.0
        if len(seconds) < 2 or not all(seconds):
            return {}
        slowest, median = seconds.index(max(seconds)), median_low(seconds)  # of two ranks one can be slow
        if seconds[slowest] >= _SLOW * median and slowest != self._named:
            self._named = slowest
            who = self._workers[slowest].who
            logger.warning("%s took %.1f s for its passes, the median rank %.1f s", who, seconds[slowest], median)
        return {"ranks/slowest": slowest, "memory/peak": max(worker.peak for worker in self._workers)}
