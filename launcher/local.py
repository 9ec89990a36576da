"""Processes on this machine: one worker per learner rank, each with a rollout engine replica beside the shard.

The proxies here make many ranks look like one Learner, one RolloutEngine and one WeightSync.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import tempfile
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from launcher import worker
from rl_megatron.config import RunConfig
from rl_megatron.errors import RLMegatronError, WorkerDied
from rl_megatron.interfaces import Roles
from rl_megatron.types import Batch, Completion, GenerationRequest, Loss, ParallelDims, StepResult, WeightUpdate

STOP_SECONDS = 10.0


class WorkerHandle:
    """The controller's end of one worker. Calls are answered in the order they were made."""

    def __init__(self, rank: int, rendezvous: str, failed: asyncio.Future[None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.rank, self._failed = rank, failed
        self.process: BaseProcess = context.Process(
            target=worker.main, args=(theirs, rank, rendezvous), name=f"rank {rank}", daemon=False
        )
        self.process.start()
        theirs.close()
        self._loop = asyncio.get_running_loop()
        self._waiting: list[asyncio.Future[Any]] = []
        self._sender = ThreadPoolExecutor(1, thread_name_prefix=f"send {rank}")  # a full pipe must not stop the loop
        for target in (self._read, self._watch):
            threading.Thread(target=target, name=f"{target.__name__} {rank}", daemon=True).start()

    def prepare(self, *setup: Any) -> asyncio.Future[Any]:
        """Send what the worker waits for after its imports; done when it is ready to serve."""
        return self._send(setup)

    def call(self, name: str, *arguments: Any) -> asyncio.Future[Any]:
        """Ask the worker; the future raises WorkerDied, or the RLMegatronError that the worker raised."""
        return self._send((name, arguments))

    def _send(self, message: Any) -> asyncio.Future[Any]:
        answer = self._loop.create_future()
        self._waiting.append(answer)
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._sender.submit(self._write, data)
        return answer

    def _write(self, data: bytes) -> None:
        try:
            self._connection.send_bytes(data)
        except OSError as error:
            self._tell(self._fail, WorkerDied(f"rank {self.rank} does not read its pipe any more: {error}"))

    def _read(self) -> None:
        try:
            while True:
                self._tell(self._answer, *pickle.loads(self._connection.recv_bytes()))
        except (EOFError, OSError):
            return  # _watch says how the process ended

    def _watch(self) -> None:
        self.process.join()
        ending = _ending(self.process.exitcode)
        self._tell(self._fail, WorkerDied(f"rank {self.rank} (pid {self.process.pid}) {ending}"))

    def _tell(self, function: Any, *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody listens any more
            return

    def _answer(self, status: str, value: Any) -> None:
        if status == "ok":
            answer = self._waiting.pop(0)
            if not answer.done():
                answer.set_result(value)
        elif status == "refused":
            self._fail(value)
        else:
            self._fail(WorkerDied(f"rank {self.rank} (pid {self.process.pid}) raised:\n{value}"))

    def _fail(self, error: RLMegatronError) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # the caller may be gone already
        self._waiting.clear()

    def stop(self) -> None:
        """End the process by its id: let it finish, then SIGTERM, then SIGKILL, each with a limit."""
        self.process.join(STOP_SECONDS)
        for end in (self.process.terminate, self.process.kill):
            if self.process.is_alive():
                end()
                self.process.join(STOP_SECONDS)
        self._sender.shutdown(wait=False, cancel_futures=True)


def _ending(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"was killed by signal {-exitcode}; see log.txt in the run's folder (and dmesg, if memory ran out)"
    return f"ended with exit code {exitcode}; see log.txt in the run's folder"


class WorkerGroup:
    """All ranks. A collective call ends with the first failure of any rank, so none waits for a dead one."""

    def __init__(self, workers: Sequence[WorkerHandle], failed: asyncio.Future[None]) -> None:
        self.workers, self._failed = workers, failed

    async def each(self, name: str, *arguments: Any) -> list[Any]:
        """Ask every rank the same; answers in rank order."""
        return await self.gather([w.call(name, *arguments) for w in self.workers])

    async def gather(self, answers: Sequence[asyncio.Future[Any]]) -> list[Any]:
        """Await answers. Raises as soon as any worker fails, asked or not."""
        everything: asyncio.Future[list[Any]] = asyncio.gather(*answers)
        either: set[asyncio.Future[Any]] = {everything, self._failed}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            everything.cancel()
            self._failed.result()
        return await everything


class LearnerGroup:
    """A Learner over all ranks (see interfaces.Learner)."""

    def __init__(self, group: WorkerGroup, dims: ParallelDims) -> None:
        self._group, self._dims = group, dims

    async def compute_logprobs(self, batch: Batch) -> Batch:
        """See interfaces.Learner."""
        answers = await self._group.gather(
            [w.call("compute_logprobs", batch.micro_batches[self._dims.dp_rank(w.rank)]) for w in self._group.workers]
        )
        rows = {self._dims.dp_rank(rank): answer for rank, answer in enumerate(answers) if answer is not None}
        micro_batches = tuple(
            tuple(m.with_old_logprobs(x) for m, x in zip(row, rows[d], strict=True))
            for d, row in enumerate(batch.micro_batches)
        )
        return replace(batch, micro_batches=micro_batches)

    async def train_step(self, batch: Batch, loss: Loss, learning_rate: float) -> StepResult:
        """See interfaces.Learner."""
        common = (loss, learning_rate, batch.num_tokens, batch.num_sequences)
        share = {w.rank: batch.micro_batches[self._dims.dp_rank(w.rank)] for w in self._group.workers}
        answers = await self._group.gather([w.call("train_step", share[w.rank], *common) for w in self._group.workers])
        result: StepResult = next(a for a in answers if a is not None)
        return result

    async def save(self, folder: Path) -> None:
        """See interfaces.Learner."""
        await self._group.each("save", folder)

    async def load(self, folder: Path) -> None:
        """See interfaces.Learner."""
        await self._group.each("load", folder)


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
            (results,) = await self._group.gather([handle.call("generate", [request for request, _ in share])])
        except RLMegatronError as error:
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
        """See interfaces.WeightSync."""
        updates: list[WeightUpdate] = await self._group.each("push", version)
        return WeightUpdate(
            version=version,
            num_bytes=updates[0].num_bytes,
            seconds=max(u.seconds for u in updates),
        )

    async def export(self, folder: Path) -> None:
        """See interfaces.WeightSync. Writes what was pushed last."""
        await self._group.gather([self._group.workers[0].call("export", folder)])


class LocalLauncher:
    """Starts the workers of a run on this machine. See interfaces.Launcher."""

    def __init__(self, model_folder: Path, run_folder: Path) -> None:
        self._model_folder, self._run_folder = model_folder, run_folder

    @asynccontextmanager
    async def start(self, config: RunConfig) -> AsyncIterator[Roles]:
        """See interfaces.Launcher."""
        dims = config.learner.dims
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        failed.add_done_callback(lambda f: f.cancelled() or f.exception())  # seen, even if nobody awaits it
        with tempfile.TemporaryDirectory(prefix="rl_megatron-") as folder:
            os.environ["OMP_NUM_THREADS"] = str(threads_per_worker(config))
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nothing here leaves this machine
            rendezvous = f"file://{folder}/rendezvous"
            workers = [WorkerHandle(rank, rendezvous, failed) for rank in range(dims.world_size)]
            group = WorkerGroup(workers, failed)
            try:
                setup = (config, self._model_folder.resolve(), self._run_folder.resolve())
                await group.gather([w.prepare(*setup) for w in workers])
                yield Roles(learner=LearnerGroup(group, dims), engine=EngineGroup(group), weights=WeightGroup(group))
                await asyncio.wait_for(group.each("close"), STOP_SECONDS)
            except BaseException:
                for handle in workers:
                    handle.process.kill()
                raise
            finally:
                for handle in workers:
                    handle.stop()


def threads_per_worker(config: RunConfig) -> int:
    """CPU threads of each worker: as configured, else this machine's cores shared out."""
    cores = len(os.sched_getaffinity(0))
    return config.learner.threads or max(1, cores // config.learner.dims.world_size)
