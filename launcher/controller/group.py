"""The controller's ends of ranks. The end of one rank sends calls and gets answers and heartbeats. A group starts,
calls and ends all ranks of a role together.

Reads and writes ranks' streams from the event loop, which never waits for one. Keeps the first failure of a run, which
ends every wait for a rank.

Ends a run that hangs, and says why: which rank makes no progress, where every rank stands, and which is late. Makes
ranks record their kernels, and finds the learner rank whose passes take longest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median_low
from typing import Any

from launcher import wire
from launcher.processes import limits, stacks
from launcher.processes.guards import StderrTail, last_lines
from launcher.processes.own_thread import DedicatedThread
from launcher.wire import STACKS, Hello, Message, Setup
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import RLMegatronError, SyncError, WorkerFailure
from rl_megatron.files import make_inside
from rl_megatron.interfaces import ignore_progress
from rl_megatron.observability.timeline import RankTimed, RankTimes, Recorded, save
from rl_megatron.placement.names import LEARNER, file_stem, rank_label

logger = logging.getLogger(__name__)

_WAKE_SECONDS = 10.0  # limit of scancel: its server may be away
_TAIL_SECONDS = 0.5  # limit of reading the end of a dead rank's output
_HUNG_UP = "hung up: it was killed, crashed or lost its node"


class RankProcess:
    """One rank's process, which has connected, and the stream to it."""

    def __init__(self, connection: Connection, hello: Hello, output: StderrTail | Path) -> None:
        """``output``: its stderr, if this process's child started it on this machine; else the folder of its file."""
        self.connection, self.hello, self.output = connection, hello, output
        self.role, self.rank, self.node, self.pid = hello.role, hello.rank, hello.node, hello.pid
        self.where = f"pid {self.pid}" if isinstance(output, StderrTail) else f"pid {self.pid} on {self.node}"

    async def ending(self) -> tuple[str, bool]:
        """Returns how it ended, once its stream has, which is the only sign from another node. Also returns whether it
        was killed, so that its peers' errors are consequences.

        Returns soon, whatever its output's disk does: peers blame each other after a second.
        """
        if isinstance(self.output, StderrTail):
            tail = await self.output.tail()
            how, said = self.output.ending or _HUNG_UP, f"its last output:{tail}" if tail else "log.txt has its output"
        else:
            tail, file, how = "", f"{file_stem(self.role, self.rank)}.txt", _HUNG_UP
            with contextlib.suppress(TimeoutError):
                tail = await asyncio.wait_for(_files()(last_lines, self.output / file), _TAIL_SECONDS)
            said = f"{file} ends with:{tail}" if tail else f"{file} has its output"
        return f"{how}; {said}", "exit code" not in how

    async def wake(self) -> None:
        """Continues the process if it was stopped: Slurm sends SIGCONT to all ranks of the step. On other nodes nothing
        else can. It has a limit of its own."""
        if isinstance(self.output, StderrTail):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, signal.SIGCONT)
            return
        if not all(self.hello.step.split(".")):
            return
        command, given = ["scancel", "--signal=CONT", self.hello.step], dict(os.environ)
        try:
            done = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, env=given, timeout=_WAKE_SECONDS
            )
            why = f"scancel: status {done.returncode}: {done.stderr.strip()}" if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            why = str(error)
        if why:
            rank = rank_label(self.role, self.rank)
            logger.warning("%s on %s was not continued, if it was stopped: %s", rank, self.node, why)

    def kill(self) -> None:
        """Closes the stream, upon which the rank ends within seconds."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as stream:
            stream.shutdown(socket.SHUT_RDWR)  # unless it hung up first


@cache
def _files() -> DedicatedThread:
    """Reads the ends of ranks' output: their disk may never answer."""
    return DedicatedThread("output of ranks")


_beside = memoryview(bytearray(64 << 10))  # all streams share it: it is empty between two turns of the loop


class RankStream:
    """The controller's end of a stream. ``on_message`` gets each message, and ``hearing`` is called each time a part of
    an incomplete message was read. A stream that breaks only ends."""

    def __init__(
        self, connection: Connection, on_message: Callable[[Message], None], hearing: Callable[[], None]
    ) -> None:
        self._connection, self._heard, self._hearing = connection, on_message, hearing
        self._loop = asyncio.get_running_loop()
        self.hung_up: asyncio.Future[None] = self._loop.create_future()
        self._coming, self._left = wire.Incoming(), deque[memoryview]()
        self._writing, self._awaiting = True, False  # the other side may still read; the loop waits for room
        self._file = connection.fileno()
        os.set_blocking(self._file, False)
        self._loop.add_reader(self._file, self._read)

    def send(self, message: Message) -> None:
        """Queues a message after the unsent ones. Its arrays must not change before it is sent."""
        if not self._writing:
            return
        if not self._left:
            self._loop.call_soon(self._write)
        self._left.extend(wire.parts(message))

    def close(self) -> None:
        """Closes the stream, even with unsent messages."""
        self._hang_up()
        self._connection.close()

    def _write(self) -> None:
        """Writes what the stream takes, in its own turn of the loop: sending to all ranks must not block the loop."""
        if not self._left:
            return
        try:
            wire.write_some(self._file, self._left)
        except BlockingIOError:
            pass
        except OSError:  # the cause of the other side's end is known soon
            self._writing = False
            self._left.clear()
        self._await_room(bool(self._left))

    def _await_room(self, wanted: bool) -> None:
        """Makes the loop call `_write` as soon as the stream takes more, or no longer."""
        if wanted and not self._awaiting:
            self._loop.add_writer(self._file, self._write)
        elif self._awaiting and not wanted:
            self._loop.remove_writer(self._file)
        self._awaiting = wanted

    def _read(self) -> None:
        """Reads once: an array directly into its memory, and many small messages together."""
        room = self._coming.room
        try:
            count = os.readv(self._file, [room, _beside])
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self._hang_up()
            return
        message = self._coming.filled(min(count, len(room)))
        if message is not None:
            self._heard(message)
        if count > len(room):
            for message in self._coming.fed(_beside[: count - len(room)]):
                self._heard(message)
        if self._coming.inside:
            self._hearing()

    def _hang_up(self) -> None:
        self._writing = False
        self._left.clear()
        if not self.hung_up.done():
            self._loop.remove_reader(self._file)
            self._await_room(False)
            self.hung_up.set_result(None)


_GRACE_SECONDS = 1.0


class Failure:
    """The reason why the run cannot continue: the first error of any rank, but a killed rank before its peers' errors.

    A rank that dies breaks its peers' collectives, and their errors may arrive before the news of its end.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.known: asyncio.Future[None] = self._loop.create_future()
        self.known.add_done_callback(retrieve_exception)
        self.rank: int | None = None  # rank of the process that failed, if one did
        self.role = LEARNER  # the role of this rank
        self._waits = self._claimed = False

    def report_first(self) -> None:
        """Claims the diagnosis of a hang: later reports by others are noise."""
        self._claimed = True

    def report(
        self, error: RLMegatronError, *, at_once: bool, process: RankProcess | None = None, claimed: bool = False
    ) -> None:
        """Records ``error``, immediately or unless a better one arrives within a second."""
        if self._claimed and not claimed:
            logger.info("reported while the run hangs: %s", error)
        elif at_once:
            self._settle(error, process)
        elif not self._waits:
            self._waits = True
            self._loop.call_later(_GRACE_SECONDS, partial(self._settle, error, process, late=True))

    def _settle(self, error: RLMegatronError, process: RankProcess | None, *, late: bool = False) -> None:
        if not self.known.done() and not (late and self._claimed):
            if process is not None:
                self.role, self.rank = process.role, process.rank
            self.known.set_exception(error)


def retrieve_exception(future: asyncio.Future[Any]) -> None:
    """Retrieves a future's exception, so that asyncio does not warn that nothing did."""
    if not future.cancelled():
        future.exception()


STOP_SECONDS = 30.0
_ALONE = ("generate", "export")  # calls that take long and have no collective
_PASSES = ("score", "backward")


class WorkerHandle:
    """The controller's end of one worker. Calls are answered in the order they were made."""

    def __init__(self, process: RankProcess, failure: Failure, on_signal: Callable[[str], None] | None) -> None:
        self.process, self.role, self.rank = process, process.role, process.rank
        self._failure, self._on_signal = failure, on_signal
        self.who = f"{rank_label(self.role, self.rank)} ({process.where})"
        self.ready = False  # it serves calls
        self.quiet = self.still = 0  # seconds since its last message, since its last progress
        self.doing, self.beats = "its start", 0
        self.pass_seconds, self.peak = 0.0, 0  # passes since `SlowestRank` read them; the most bytes that it held
        self.times = RankTimes(f"{rank_label(self.role, self.rank)} ({process.node})")
        self._calls: list[str] = []  # the calls of _waiting
        self._closing = self._raised = False
        self._loop = asyncio.get_running_loop()
        self._waiting: list[asyncio.Future[Any]] = []
        self._stream = RankStream(process.connection, self._on_message, self._on_progress)
        self._saying: asyncio.Task[None] | None = None
        self._stream.hung_up.add_done_callback(self._on_exit)

    def send(self, name: str, message: wire.Message) -> asyncio.Future[Any]:
        """Sends the call ``name``, which is packed: many ranks may get one message. A failed worker never answers, but
        ``Failure`` has its error."""
        self._closing = self._closing or name == "close"
        answer = self._loop.create_future()
        self._waiting.append(answer)
        self._calls.append(name)
        self.times.on_call(name)
        self._stream.send(message)
        return answer

    @property
    def pending_call(self) -> str | None:
        """The call that it has not answered yet, if any."""
        return self._calls[0] if self._calls and self.ready else None

    @property
    def independent_answers(self) -> list[asyncio.Future[Any]]:
        """The answers to come of calls that ranks make without each other."""
        return [answer for name, answer in zip(self._calls, self._waiting, strict=True) if name in _ALONE]

    def tick(self) -> None:
        """Counts one second."""
        self.quiet += 1
        self.still += self.pending_call is not None

    def dump(self) -> None:
        """Makes it write its stacks, whatever it is doing."""
        self._stream.send(STACKS)

    def _on_progress(self) -> None:
        """Counts the rank as alive while a large answer arrives, which delays its heartbeats."""
        self.quiet = self.still = 0

    def _on_message(self, message: wire.Message) -> None:
        try:
            self._answer(*wire.unpack(message))
        except Exception as error:  # noqa: BLE001  in a callback it would only be logged, and the rank waited for
            self._raised = True
            self._failure.report(WorkerFailure(f"{self.who}: its message cannot be read: {error!r}"), at_once=True)

    def _answer(self, status: str, value: Any, timed: RankTimed | None = None) -> None:
        self.quiet = 0
        if status == "alive":
            self.doing, beats = value
            self.still = self.still if beats == self.beats else 0
            self.beats = beats
            return
        if status == "signal" and self._on_signal is not None:
            self._on_signal(value)
        elif status == "ok":
            self.ready, self.still = True, 0
            call = self._calls.pop(0)
            self.times.answered(timed)
            if timed is not None:
                self.peak = timed.peak
                self.pass_seconds += timed.call_seconds(call) if call in _PASSES else 0.0
            answer = self._waiting.pop(0)
            if not answer.done():
                answer.set_result(value)
        elif status == "refused":
            self._raised = True
            self._failure.report(value, at_once=not isinstance(value, SyncError))  # another rank may have died
        elif status == "erred":  # another node would not help, and its peers' errors are noise
            self._raised = True
            self._failure.report(WorkerFailure(limits.explain_limit_error(f"{self.who} raised {value}")), at_once=True)
        else:
            self._raised = True
            self._died(f"raised {value}", at_once=False)

    def _on_exit(self, _: asyncio.Future[Any]) -> None:
        self._saying = self._loop.create_task(self._report_exit())

    async def _report_exit(self) -> None:
        """Reports the end, unless the rank itself said why, or had answered all calls when it was asked to end."""
        how, killed = await self.process.ending()
        if not (self._raised or (self._closing and not self._calls)):
            self._died(how, at_once=killed)

    def _died(self, what: str, *, at_once: bool) -> None:
        self._failure.report(
            WorkerFailure(limits.explain_limit_error(f"{self.who} {what}")), at_once=at_once, process=self.process
        )

    async def stop(self) -> None:
        """Waits for the end of the process, then kills it, each with a time limit."""
        hung_up = self._stream.hung_up
        if not (await asyncio.wait({hung_up}, timeout=STOP_SECONDS))[0]:
            self.process.kill()
            await asyncio.wait({hung_up}, timeout=STOP_SECONDS)
        hung_up.remove_done_callback(self._on_exit)
        if self._saying is not None:
            self._saying.cancel()
        self._stream.close()


_DUMP_SECONDS = 10.0  # a process's time to write its stacks
_QUIET_SECONDS = 5  # a process that is quiet for longer may have been stopped
_WOKEN = 16  # the most processes that it wakes
_DISK = frozenset({"load_weights", "save", "is_written", "finalize", "verify", "load", "export"})
"""Calls that use a disk."""


class Watchdog:
    """Watches the ranks of a run from the controller. All stacks are written to ``folder``."""

    def __init__(self, workers: Sequence[WorkerHandle], failure: Failure, config: RunConfig, folder: Path) -> None:
        self._workers, self._failure, self._folder = workers, failure, folder
        self._silence = config.learner.timeout_seconds / 2
        self._limit, self._disk_limit = config.watchdog_seconds, config.watchdog_disk_seconds

    async def watch(self) -> None:
        """Waits until a rank sends no heartbeat, or makes no progress in a call, for too long; then ends the run."""
        while True:
            await asyncio.sleep(1.0)
            for worker in self._workers:
                worker.tick()
            silent = [w for w in self._workers if w.quiet > self._silence]
            stuck = [
                w for w in self._workers if w.pending_call is not None and w.still > self._limit_of(w.pending_call)
            ]
            if silent or stuck:
                await self._end(silent, stuck)
                return

    def _limit_of(self, call: str) -> float:
        return self._disk_limit if call in _DISK else self._limit

    async def _end(self, silent: Sequence[WorkerHandle], stuck: Sequence[WorkerHandle]) -> None:
        self._failure.report_first()  # ranks' later complaints about each other are noise
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
            culprits = [w for ws in (quiet, behind) for w in ws if w.pending_call is not None and w.role == role]
            first = (culprits or sorted(stuck, key=lambda w: w.beats))[0]
            limit = self._limit_of(first.pending_call or "")
            key = "" if first.pending_call in _DISK else " (run.watchdog_seconds)"
            silence = f", and has sent no heartbeat for {quiet[first]} s" if first in quiet else ""
            what = f"makes no progress for {limit:g} s{key}{silence}"
        lines = [f"{what}; it was in {first.doing}", everybody or "no rank was ready to report its stack"]
        if found:
            lines.append(f"stacks of all processes: {self._folder}")
        error = WorkerFailure(f"{first.who} " + "; ".join(lines))
        self._failure.report(error, at_once=True, process=first.process, claimed=True)

    @property
    def _roles(self) -> list[str]:
        return list(dict.fromkeys(w.role for w in self._workers))

    async def _stacks(self, quiet: Collection[WorkerHandle]) -> dict[WorkerHandle, stacks.Stack | None]:
        """Returns the stacks of every ready rank, ``quiet`` ones last; for the controller, of its tasks."""
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
            file.writelines(f"{text}\n\n" for text in map(stacks.task_frames, asyncio.all_tasks()))


async def _written(before: Mapping[Path, int]) -> None:
    """Waits, with a limit, until the files have grown."""
    for _ in range(int(_DUMP_SECONDS * 10)):
        if all(_size(file) > size for file, size in before.items()):
            await asyncio.sleep(0.2)  # time for them to be complete
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
        self.gpus: Sequence[str] = ()  # CUDA's name of each rank's GPU, once they are ready; empty on CPUs

    async def call_all(self, name: str, *arguments: Any) -> list[Any]:
        """Makes the same call on every rank. Returns answers in rank order."""
        return await self.call(name, {w.rank: arguments for w in self.workers})

    async def call(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """Calls the ranks in ``arguments``, each with its own. Returns answers in that order. Raises like `gather`."""
        return await self.gather(self.send(name, arguments))

    def send(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> list[asyncio.Future[Any]]:
        """Sends these calls, to be answered in that order. Ranks with the same tuple get one message, packed once."""
        packed = {id(given): given for given in arguments.values()}
        sent = {key: wire.pack((name, given)) for key, given in packed.items()}
        return [self.workers[rank].send(name, sent[id(given)]) for rank, given in arguments.items()]

    async def call_collective(self, name: str, *arguments: Any) -> list[Any]:
        """Makes a collective call on every rank once none makes a call alone. Otherwise the others would wait for that
        rank in the collectives of this call, with a time limit."""
        while alone := [answer for worker in self.workers for answer in worker.independent_answers]:
            await self.gather([asyncio.shield(answer) for answer in alone])
        return await self.call_all(name, *arguments)

    async def gather(self, answers: Sequence[asyncio.Future[Any]]) -> list[Any]:
        """Awaits answers. Raises WorkerFailure, or a worker's error, once any worker of the run has failed.

        A step may take any time while its collectives end in time and every worker sends heartbeats.
        """
        everything: asyncio.Future[list[Any]] = asyncio.gather(*answers)
        everything.add_done_callback(retrieve_exception)
        either: set[asyncio.Future[Any]] = {everything, self._failure.known}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._failure.known.done():
            everything.cancel()
            self._failure.known.result()
        return await everything

    async def prepare(self, setup: Setup, tell: Callable[[str], None]) -> None:
        """Waits until every rank is ready to serve. Raises WorkerFailure, or a rank's error."""
        answers = [w.send("prepare", wire.pack(setup)) for w in self.workers]  # answers: GPU names, if any
        _counted(answers, setup.role, tell)
        limit = setup.config.learner.timeout_seconds
        try:
            async with asyncio.timeout(limit):
                self.gpus = [name for name in await self.gather(answers) if name is not None]
        except TimeoutError as error:
            late = [str(w.rank) for w, answer in zip(self.workers, answers, strict=True) if not answer.done()]
            raise WorkerFailure(
                f"{rank_label(setup.role, ', '.join(late))}: not ready after learner.timeout_seconds={limit:g}; "
                "raise it if loading takes longer"
            ) from error

    async def close(self) -> None:
        """Asks all ranks to end. The work is saved, so `WorkerHandle.stop` ends any that does not."""
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self.call_all("close")
        except TimeoutError:
            logger.warning("some ranks did not leave their process groups within %g s; killing them", STOP_SECONDS)
            for handle in self.workers:
                handle.process.kill()


@contextlib.asynccontextmanager
async def serving(
    teams: Sequence[tuple[Setup, Sequence[RankProcess]]],
    failure: Failure,
    on_signal: Callable[[str], None] | None = None,
    tell: Callable[[str], None] = ignore_progress,
) -> AsyncIterator[Mapping[str, WorkerGroup]]:
    """Yields the ready ranks of each role. Leaving the context ends them.

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
        stacks.remove_empty_files(folder.parent)


def _counted(answers: Sequence[asyncio.Future[Any]], role: str, tell: Callable[[str], None]) -> None:
    """Calls ``tell`` for each rank that is ready, or, of many ranks, for each eighth of them."""
    ready, part = 0, max(1, len(answers) // 8)

    def count_ready(answer: asyncio.Future[Any]) -> None:
        nonlocal ready
        if answer.cancelled() or answer.exception() is not None:
            return
        ready += 1
        if ready % part == 0 or ready == len(answers):
            tell(f"{ready} of {len(answers)} {role} ranks are ready")

    for answer in answers:
        answer.add_done_callback(count_ready)


@contextlib.asynccontextmanager
async def record_kernels(groups: Collection[WorkerGroup], folder: Path) -> AsyncIterator[None]:
    """Records the kernels of each group's first rank, while the context is open, into ``folder``.

    Raises WorkerFailure. If an error ends the context, nothing is written.
    """
    workers = [(group, [one for one in group.workers if one.rank == 0]) for group in groups]
    await asyncio.gather(*(group.call("begin_kernels", {one.rank: () for one in its}) for group, its in workers))
    yield
    written = []
    for group, its in workers:
        files = {one.rank: (folder / f"{file_stem(one.role, one.rank)}.json.gz",) for one in its}
        answers: list[Recorded | str] = await group.call("end_kernels", files)
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
        slowest, median = seconds.index(max(seconds)), median_low(seconds)  # one of two ranks can be slow
        if seconds[slowest] >= _SLOW * median and slowest != self._named:
            self._named = slowest
            who = self._workers[slowest].who
            logger.warning("%s took %.1f s for its passes, the median rank %.1f s", who, seconds[slowest], median)
        return {"ranks/slowest": slowest, "memory/peak": max(worker.peak for worker in self._workers)}
