"""The controller's end of every rank: sends calls, receives answers and heartbeats, and keeps the first failure."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from launcher.controller.failure import Failure, seen
from launcher.controller.rank_process import Ending, RankProcess
from launcher.controller.watchdog import Watchdog
from launcher.processes import limits, stacks
from launcher.wire import messages
from launcher.wire.messages import STACKS
from launcher.wire.setup import Setup
from rl_megatron.errors import WorkerDied
from rl_megatron.interfaces import unheard
from rl_megatron.placement.names import called

logger = logging.getLogger(__name__)

STOP_SECONDS = 30.0


class WorkerHandle:
    """The controller's end of one worker. Calls are answered in the order they were made."""

    def __init__(self, process: RankProcess, failure: Failure, on_signal: Callable[[str], None] | None) -> None:
        self.process, self.role, self.rank = process, process.role, process.rank
        self._failure, self._on_signal = failure, on_signal
        self.who = f"{called(self.role, self.rank)} ({process.where})"
        self.ready = False  # whether it takes calls
        self.quiet = self.still = 0  # seconds since it said anything, since it made progress
        self.doing, self.beats = "its start", 0
        self._calls: list[str] = []  # the calls of _waiting
        self._closing = self._raised = False
        self._loop = asyncio.get_running_loop()
        self._waiting: list[asyncio.Future[Any]] = []
        self._hung_up = threading.Event()
        name = called(self.role, self.rank)
        self._sender = ThreadPoolExecutor(1, thread_name_prefix=f"send {name}")  # a full pipe must not stop all
        for target in (self._read, self._watch):
            threading.Thread(target=target, name=f"{target.__name__} {name}", daemon=True).start()

    def prepare(self, setup: Setup) -> asyncio.Future[Any]:
        """Send what the worker waits for after its imports; done when it is ready to serve."""
        return self._send("prepare", setup)

    def call(self, name: str, *arguments: Any) -> asyncio.Future[Any]:
        """Ask the worker; of a worker that failed no answer comes, but ``Failure`` knows it."""
        self._closing = name == "close"
        return self._send(name, (name, arguments))

    @property
    def asked(self) -> str | None:
        """What it was asked and has not answered yet."""
        return self._calls[0] if self._calls and self.ready else None

    def tick(self) -> None:
        """A second has passed."""
        self.quiet += 1
        self.still += self.asked is not None

    def dump(self) -> None:
        """Have it write its stacks, whatever it does."""
        self._sender.submit(self._write, STACKS)

    def _send(self, name: str, message: Any) -> asyncio.Future[Any]:
        answer = self._loop.create_future()
        self._waiting.append(answer)
        self._calls.append(name)
        self._sender.submit(self._write, messages.pack(message))
        return answer

    def _write(self, message: messages.Message) -> None:
        with contextlib.suppress(OSError):  # _watch says how the process ended
            messages.send(self.process.connection, message)

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):  # likewise
            while True:
                self._tell(self._answer, *messages.unpack(messages.receive(self.process.connection)))
        self._hung_up.set()

    def _watch(self) -> None:
        ending = self.process.ending(self._hung_up)
        self._tell(self._ended, ending)

    def _tell(self, function: Any, *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(function, *arguments)

    def _answer(self, status: str, value: Any) -> None:
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
            self._calls.pop(0)
            answer = self._waiting.pop(0)
            if not answer.done():
                answer.set_result(value)
        elif status == "refused":
            self._raised = True
            self._failure.report(value, at_once=True)
        elif status == "erred":  # no other node would mend it, and what its peers say is noise
            self._raised = True
            self._failure.report(WorkerDied(limits.explained(f"{self.who} raised {value}")), at_once=True)
        else:
            self._raised = True
            self._died(f"raised {value}", at_once=False)

    def _ended(self, ending: Ending) -> None:
        if self._raised or (ending.expected and self._closing):
            return
        self._died(ending.how, at_once=ending.killed)

    def _died(self, what: str, *, at_once: bool) -> None:
        self._failure.report(WorkerDied(limits.explained(f"{self.who} {what}")), at_once=at_once, whose=self.process)

    def stop(self) -> None:
        """End the process: let it finish, then kill it, each with a limit."""
        if not self.process.join(STOP_SECONDS):
            self.process.kill()
            self.process.join(STOP_SECONDS)
        self._sender.shutdown(wait=False, cancel_futures=True)


class WorkerGroup:
    """All ranks of a role, one torch.distributed world. Waiting ends with the first failure of any rank of the run, so
    nobody waits for a dead one."""

    def __init__(self, workers: Sequence[WorkerHandle], failure: Failure) -> None:
        self.workers, self._failure = workers, failure

    async def each(self, name: str, *arguments: Any) -> list[Any]:
        """Ask every rank the same; answers in rank order."""
        return await self.ask(name, {w.rank: arguments for w in self.workers})

    async def ask(self, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """Ask the ranks in ``arguments``, each with its own; answers in that order. Raises as `gather` does."""
        return await self.gather([self.workers[rank].call(name, *a) for rank, a in arguments.items()])

    async def gather(self, answers: Sequence[asyncio.Future[Any]]) -> list[Any]:
        """Await answers. Raises WorkerDied, or what a worker refused, once any worker failed, asked or not.

        A step may take as long as it needs, while its collectives end in time and every worker says that it is alive.
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
        """Wait until every rank is ready to serve. Raises WorkerDied, or what a rank refused."""
        answers = [w.prepare(setup) for w in self.workers]
        _counted(answers, setup.role, tell)
        limit = setup.config.learner.timeout_seconds
        try:
            async with asyncio.timeout(limit):
                await self.gather(answers)
        except TimeoutError as error:
            late = [str(w.rank) for w, answer in zip(self.workers, answers, strict=True) if not answer.done()]
            raise WorkerDied(
                f"{called(setup.role, ', '.join(late))}: not ready after learner.timeout_seconds={limit:g}; "
                "raise it if loading takes longer"
            ) from error

    async def close(self) -> None:
        """Ask all to end; the work is done and saved, so one that does not is ended by `WorkerHandle.stop`."""
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self.each("close")
        except TimeoutError:
            logger.warning("not all learner processes left their process groups in %g s; they end now", STOP_SECONDS)
            for handle in self.workers:
                handle.process.kill()


@contextlib.asynccontextmanager
async def serving(
    teams: Sequence[tuple[Setup, Sequence[RankProcess]]],
    failure: Failure,
    on_signal: Callable[[str], None] | None = None,
    tell: Callable[[str], None] = unheard,
) -> AsyncIterator[Mapping[str, WorkerGroup]]:
    """The ranks of each role, ready, while the context is open; at its end they are gone.

    ``on_signal`` gets the name of a signal that a rank got and passed on, ``tell`` how many ranks are ready.
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
        for handle in workers:
            handle.stop()
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
