"""Processes on this machine: one worker per learner rank, each with a rollout engine replica beside the shard.

The proxies here make many ranks look like one Learner, one RolloutEngine and one WeightSync.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from launcher import worker
from rl_megatron.config import RunConfig
from rl_megatron.errors import CorruptionError, RLMegatronError, WorkerDied
from rl_megatron.interfaces import Roles
from rl_megatron.types import (
    Batch,
    Completion,
    GenerationRequest,
    Loss,
    ParallelDims,
    Samples,
    Scores,
    StepResult,
    WeightUpdate,
)

logger = logging.getLogger(__name__)

STOP_SECONDS = 30.0
GRACE_SECONDS = 1.0


class Failure:
    """Why the run cannot go on: the first error of any rank, but a killed rank before what others say of it.

    A rank that dies breaks its peers' collectives, and their complaints may arrive before the news of its end.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.known: asyncio.Future[None] = self._loop.create_future()
        self.known.add_done_callback(_seen)
        self._waits = False

    def report(self, error: RLMegatronError, *, at_once: bool) -> None:
        """Make ``error`` known, at once or unless another overtakes it within ``GRACE_SECONDS``."""
        if at_once:
            self._settle(error)
        elif not self._waits:
            self._waits = True
            self._loop.call_later(GRACE_SECONDS, self._settle, error)

    def _settle(self, error: RLMegatronError) -> None:
        if not self.known.done():
            self.known.set_exception(error)


class WorkerHandle:
    """The controller's end of one worker. Calls are answered in the order they were made."""

    def __init__(self, rank: int, rendezvous: str, failure: Failure) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.rank, self._failure, self._closing = rank, failure, False
        self.process: BaseProcess = context.Process(
            target=worker.main, args=(theirs, rank, rendezvous), name=f"rank {rank}", daemon=False
        )
        with _signals_held_back():
            self.process.start()
        theirs.close()
        self._loop = asyncio.get_running_loop()
        self._quiet = 0  # seconds since the worker said anything
        self._waiting: list[asyncio.Future[Any]] = []
        self._sender = ThreadPoolExecutor(1, thread_name_prefix=f"send {rank}")  # a full pipe must not stop the loop
        for target in (self._read, self._watch):
            threading.Thread(target=target, name=f"{target.__name__} {rank}", daemon=True).start()

    def prepare(self, *setup: Any) -> asyncio.Future[Any]:
        """Send what the worker waits for after its imports; done when it is ready to serve."""
        return self._send(setup)

    def call(self, name: str, *arguments: Any) -> asyncio.Future[Any]:
        """Ask the worker; of a worker that failed no answer comes, but ``Failure`` knows it."""
        self._closing = name == "close"
        return self._send((name, arguments))

    def _send(self, message: Any) -> asyncio.Future[Any]:
        answer = self._loop.create_future()
        self._waiting.append(answer)
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._sender.submit(self._write, data)
        return answer

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # _watch says how the process ended
            self._connection.send_bytes(data)

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):  # likewise
            while True:
                self._tell(self._answer, *pickle.loads(self._connection.recv_bytes()))

    def _watch(self) -> None:
        self.process.join()
        self._tell(self._ended)

    def _tell(self, function: Any, *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(function, *arguments)

    def _answer(self, status: str, value: Any) -> None:
        self._quiet = 0
        if status == "alive":
            return
        if status == "ok":
            answer = self._waiting.pop(0)
            if not answer.done():
                answer.set_result(value)
        elif status == "refused":
            self._failure.report(value, at_once=True)
        else:
            error = WorkerDied(f"rank {self.rank} (pid {self.process.pid}) raised:\n{value}")
            self._failure.report(error, at_once=False)

    def _ended(self) -> None:
        code = self.process.exitcode
        if code == 0 and self._closing:
            return
        killed = code is not None and code < 0
        how = f"was killed by signal {-(code or 0)}" if killed else f"ended with exit code {code}"
        error = WorkerDied(f"rank {self.rank} (pid {self.process.pid}) {how}; log.txt has what it said")
        self._failure.report(error, at_once=killed)

    async def listen(self, limit: float) -> None:
        """Report the worker as dead after ``limit`` seconds without a word; a living one says each second that it is.

        Seconds in which this process stood still, as when a whole job is suspended, do not count.
        """
        while self._quiet <= limit:
            await asyncio.sleep(1.0)
            self._quiet += 1
        silent = f"has said nothing for {limit:g} s, half of learner.timeout_seconds: it hangs or was stopped"
        self._failure.report(WorkerDied(f"rank {self.rank} (pid {self.process.pid}) {silent}"), at_once=True)

    def stop(self) -> None:
        """End the process by its id: let it finish, then SIGKILL, each with a limit."""
        self.process.join(STOP_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(STOP_SECONDS)
        self._sender.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """What starts here never sees SIGINT and SIGTERM, which a terminal or Slurm sends to every process of a run."""
    resource_tracker.ensure_running()  # else starting it would lift the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class WorkerGroup:
    """All ranks. Waiting ends with the first failure of any rank, so nobody waits for a dead one."""

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
        everything.add_done_callback(_seen)
        either: set[asyncio.Future[Any]] = {everything, self._failure.known}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._failure.known.done():
            everything.cancel()
            self._failure.known.result()
        return await everything


def _seen(future: asyncio.Future[Any]) -> None:
    """Look at what a future raised, so that asyncio does not complain of nobody having done so."""
    if not future.cancelled():
        future.exception()


class LearnerGroup:
    """A Learner, Critic or Reference over all ranks, by its ``role`` in the workers (see interfaces)."""

    def __init__(self, group: WorkerGroup, dims: ParallelDims, role: str) -> None:
        self._group, self._dims, self._role = group, dims, role

    async def start_from(self, folder: Path) -> None:
        """See interfaces.Critic."""
        await self._group.each("start_from", self._role, folder.resolve())

    async def score(self, batch: Batch) -> Scores:
        """See interfaces.Scorer."""
        shares = {rank: (self._role, m) for rank, m in self._shares(batch).items()}
        answers = await self._group.ask("score", shares)
        rows = {self._dims.dp_rank(rank): answer for rank, answer in enumerate(answers) if answer is not None}
        return [rows[d] for d in range(self._dims.dp)]

    async def train_step(self, batch: Batch, loss: Loss, learning_rate: float) -> StepResult:
        """See interfaces.Learner."""
        common = (loss, learning_rate, batch.num_tokens, batch.num_sequences)
        shares = {rank: (self._role, m, *common) for rank, m in self._shares(batch).items()}
        answers = await self._group.ask("train_step", shares)
        result: StepResult = next(a for a in answers if a is not None)
        return result

    def _shares(self, batch: Batch) -> dict[int, tuple[Samples, ...]]:
        return {w.rank: batch.micro_batches[self._dims.dp_rank(w.rank)] for w in self._group.workers}

    async def save(self, folder: Path) -> None:
        """See interfaces.Learner."""
        await self._group.each("save", self._role, folder)

    async def load(self, folder: Path) -> None:
        """See interfaces.Learner."""
        await self._group.each("load", self._role, folder)


class EngineGroup:
    """A RolloutEngine over the replicas: requests made in one go are served as one batch per replica."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._pending: list[tuple[GenerationRequest, asyncio.Future[Sequence[Completion]]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        """See interfaces.RolloutEngine."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Sequence[Completion]] = loop.create_future()
        if not self._pending:
            loop.call_soon(self._dispatch)  # after every caller that is ready now has asked
        self._pending.append((request, answer))
        return await answer

    def _dispatch(self) -> None:
        pending, self._pending = self._pending, []
        count = len(self._group.workers)
        for replica, handle in enumerate(self._group.workers):
            if share := pending[replica::count]:
                task = asyncio.ensure_future(self._serve(handle, share))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _serve(
        self, handle: WorkerHandle, share: list[tuple[GenerationRequest, asyncio.Future[Sequence[Completion]]]]
    ) -> None:
        try:
            (results,) = await self._group.ask("generate", {handle.rank: ([request for request, _ in share],)})
        except Exception as error:  # noqa: BLE001  whatever it is, those who asked hear it
            for _, answer in share:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), completions in zip(share, results, strict=True):
            if not answer.done():
                answer.set_result(completions)


class WeightGroup:
    """A WeightSync in which every learner rank moves its shards to every replica (see interfaces.WeightSync)."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    async def push(self, version: int) -> WeightUpdate:
        """See interfaces.WeightSync. Served once all replicas have staged and verified it; tried twice.

        Raises CorruptionError where boxes arrived corrupted twice.
        """
        updates, failures = await self._stage(version)
        if failures:
            logger.warning("weights were corrupted on their way and are moved again: %s", failures[0])
            again, failures = await self._stage(version)
            updates += again
        if failures:
            raise failures[0]
        await self._group.each("commit", version)
        return WeightUpdate(
            version=version,
            num_bytes=sum(u.num_bytes for u in updates),
            seconds=max(u.seconds for u in updates),
            verify_seconds=max(u.verify_seconds for u in updates),
        )

    async def _stage(self, version: int) -> tuple[list[WeightUpdate], list[CorruptionError]]:
        answers: list[WeightUpdate | CorruptionError] = await self._group.each("stage", version)
        return (
            [answer for answer in answers if isinstance(answer, WeightUpdate)],
            [answer for answer in answers if isinstance(answer, CorruptionError)],
        )

    async def export(self, folder: Path) -> None:
        """See interfaces.WeightSync. Writes what was pushed last."""
        await self._group.ask("export", {0: (folder,)})


class LocalLauncher:
    """Starts the workers of a run on this machine. See interfaces.Launcher."""

    def __init__(self, model_folder: Path, run_folder: Path) -> None:
        self._model_folder, self._run_folder = model_folder, run_folder

    @contextlib.asynccontextmanager
    async def start(self, config: RunConfig) -> AsyncIterator[Roles]:
        """See interfaces.Launcher."""
        dims = config.learner.dims
        failure = Failure()
        with tempfile.TemporaryDirectory(prefix="rl_megatron-") as folder:
            os.environ["OMP_NUM_THREADS"] = str(threads_per_worker(config))
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nothing here leaves this machine
            rendezvous = f"file://{folder}/rendezvous"
            workers: list[WorkerHandle] = []
            listening: list[asyncio.Task[None]] = []
            try:
                workers += (WorkerHandle(rank, rendezvous, failure) for rank in range(dims.world_size))
                listening += (asyncio.create_task(w.listen(config.learner.timeout_seconds / 2)) for w in workers)
                group = WorkerGroup(workers, failure)
                await self._prepare(group, config)
                yield Roles(
                    learner=LearnerGroup(group, dims, "policy"),
                    critic=LearnerGroup(group, dims, "critic") if config.algorithm.needs_critic else None,
                    reference=LearnerGroup(group, dims, "reference") if config.algorithm.needs_reference else None,
                    engine=EngineGroup(group),
                    weights=WeightGroup(group),
                )
                await _close(group)
            except BaseException:
                for handle in workers:
                    handle.process.kill()
                raise
            finally:
                for task in listening:
                    task.cancel()
                for handle in workers:
                    handle.stop()

    async def _prepare(self, group: WorkerGroup, config: RunConfig) -> None:
        setup = (config, self._model_folder.resolve(), self._run_folder.resolve())
        answers = [w.prepare(*setup) for w in group.workers]
        limit = config.learner.timeout_seconds
        try:
            async with asyncio.timeout(limit):
                await group.gather(answers)
        except TimeoutError as error:
            late = [str(w.rank) for w, answer in zip(group.workers, answers, strict=True) if not answer.done()]
            raise WorkerDied(
                f"rank {', '.join(late)}: not ready after learner.timeout_seconds={limit:g}; "
                "raise it if loading takes longer"
            ) from error


async def _close(group: WorkerGroup) -> None:
    """Ask all to end; the work is done and saved, so one that does not is ended by `WorkerHandle.stop`."""
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await group.each("close")
    except TimeoutError:
        logger.warning("not all learner processes left their process groups in %g s; they are killed", STOP_SECONDS)
        for handle in group.workers:
            handle.process.kill()


def threads_per_worker(config: RunConfig) -> int:
    """CPU threads of each worker: as configured, else this machine's cores shared out."""
    cores = len(os.sched_getaffinity(0))
    return config.learner.threads or max(1, cores // config.learner.dims.world_size)
