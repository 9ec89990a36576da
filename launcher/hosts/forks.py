"""Forks ranks on this machine from one process that has already imported their common modules."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from typing_extensions import override

from launcher.controller.handle import Ending, RankProcess
from launcher.processes.guards import LastWords
from launcher.wire.greetings import this_node
from launcher.worker import nursery
from launcher.worker.forking import HELD_BACK
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import WorkerDied
from rl_megatron.placement.names import called

logger = logging.getLogger(__name__)


class ForkedRank(RankProcess):
    """A worker that the nursery forked."""

    def __init__(
        self, role: str, rank: int, connection: Connection, last_words: LastWords, pid: int, code: Future[int]
    ) -> None:
        self.role, self.rank, self.connection = role, rank, connection
        self.node, self.pid, self.where = this_node(), pid, f"pid {pid}"
        self._last_words, self._code = last_words, code

    @override
    def over(self, hung_up: asyncio.Future[None]) -> asyncio.Future[Any]:
        """The child's exit code tells more than the end of its stream."""
        return asyncio.wrap_future(self._code)

    @override
    async def ending(self) -> Ending:
        code = self._code.result()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        tail = await self._last_words.tail()
        said = f"its last output:{tail}" if tail else "log.txt has its output"
        return Ending(how=f"{how}; {said}", expected=code == 0, killed=code < 0)

    @override
    async def wake(self) -> None:
        self._signal(signal.SIGCONT)

    @override
    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if not self._code.done():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)


class Nursery:
    """The controller's end of nursery.py. Leaving the context ends that process and all its ranks."""

    def __init__(self, imports: Sequence[str]) -> None:
        """Start the nursery, which imports ``imports`` before its first fork."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asked: deque[Future[tuple[int, Future[int]]]] = deque()
        with theirs:
            self._process = nursery_process(imports, theirs.fileno())
        threading.Thread(target=self._hear, name="nursery", daemon=True).start()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()

    async def fork(self, role: str, rank: int) -> ForkedRank:
        """Fork a new rank. Raises WorkerDied if the nursery has ended."""
        (connection, theirs), last_words = multiprocessing.Pipe(), LastWords(called(role, rank))
        asked: Future[tuple[int, Future[int]]] = Future()
        self._asked.append(asked)
        with theirs:
            message = json.dumps([role, rank]).encode()
            try:
                socket.send_fds(self._socket, [message], [theirs.fileno(), last_words.theirs.fileno()])
            except OSError as error:
                raise self._gone() from error
            finally:
                last_words.listen()
        pid, code = await asyncio.wrap_future(asked)
        return ForkedRank(role, rank, connection, last_words, pid, code)

    def _hear(self) -> None:
        """Read pids, in the order of forks, and exit codes. When the nursery ends, its ranks have ended too."""
        living: dict[int, Future[int]] = {}
        plain = ""
        with contextlib.suppress(OSError):
            while message := self._socket.recv(nursery.MESSAGE_BYTES):
                pid, code, hindered = json.loads(message)
                if hindered and not plain:
                    plain = hindered
                    logger.warning("ranks start slower, each with imports of its own: %s", plain)
                if code is None:
                    living[pid] = Future()
                    living[pid].set_running_or_notify_cancel()  # who stops waiting for it must not cancel it
                    answer = self._asked.popleft()
                    if answer.set_running_or_notify_cancel():
                        answer.set_result((pid, living[pid]))
                else:
                    living.pop(pid).set_result(code)
        for future in living.values():
            future.set_result(-signal.SIGKILL)
        while self._asked:
            answer = self._asked.popleft()
            if answer.set_running_or_notify_cancel():
                answer.set_exception(self._gone())

    def _gone(self) -> WorkerDied:
        status = self._process.wait()
        return WorkerDied(f"the process that ranks are forked from ended with status {status}; see its output")


def nursery_process(imports: Sequence[str], stdin: int) -> subprocess.Popen[bytes]:
    """Start nursery.py in an interpreter of its own: this process has threads, so no fork of it would be sound."""
    with _signals_held_back():
        return subprocess.Popen(
            [sys.executable, "-P", "-m", nursery.__name__, *imports], stdin=stdin, env=dict(os.environ)
        )


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Processes started within ignore SIGINT and SIGTERM, which a terminal or Slurm sends to every process of a run."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def fork_all(forks: Nursery, config: RunConfig, ranks: Sequence[tuple[str, int]]) -> list[ForkedRank]:
    """Fork all ``ranks``, given by role and number. Raises WorkerDied after ``learner.timeout_seconds``."""
    limit = config.learner.timeout_seconds
    try:
        async with asyncio.timeout(limit):
            return [await forks.fork(role, rank) for role, rank in ranks]
    except TimeoutError as error:
        raise WorkerDied(
            f"the ranks' imports take longer than learner.timeout_seconds={limit:g}; raise it if files are slow"
        ) from error
