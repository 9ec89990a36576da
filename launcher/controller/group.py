"""Starts, calls and ends all ranks of a role together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from launcher.controller.handle import STOP_SECONDS, Failure, RankProcess, WorkerHandle, seen
from launcher.controller.watchdog import Watchdog
from launcher.processes import stacks
from launcher.wire import messages
from launcher.wire.greetings import Setup
from rl_megatron.errors import WorkerDied
from rl_megatron.interfaces import unheard
from rl_megatron.placement.names import called

logger = logging.getLogger(__name__)


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
        sent = {key: messages.pack((name, given)) for key, given in packed.items()}
        return [self.workers[rank].send(name, sent[id(given)]) for rank, given in arguments.items()]

    async def meet(self, name: str, *arguments: Any) -> list[Any]:
        """As `each`, once no rank makes a call without the others: in the collectives of this one they would wait for
        it, with a time limit."""
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
        answers = [w.prepare(setup) for w in self.workers]
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
