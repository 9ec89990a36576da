"""The kinds of sandboxes by their names, and what all of them do: check what is given, and wait for a free slot."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import PurePosixPath

from rl_megatron.config.sections.reward import SandboxSection
from rl_megatron.errors import SandboxError
from rl_megatron.sandbox.protocol import PYTHON, Executor, Limits, Ran, SandboxProgram
from rl_megatron.sandbox.remote import RemoteExecutor
from rl_megatron.sandbox.subprocess import SubprocessExecutor

EXECUTORS: Mapping[str, Callable[[SandboxSection], Executor]] = {
    "subprocess": SubprocessExecutor,
    "remote": RemoteExecutor,
}


class Sandbox:
    """Runs code that a model wrote, at most as many programs at once as there are cores; from any event loop."""

    def __init__(self, section: SandboxSection) -> None:
        self.limits = Limits.of(section)
        self._executor = EXECUTORS[section.type](section)
        self._slots = _Slots(len(os.sched_getaffinity(0)))
        self._places = itertools.count()

    def place(self) -> int:
        """A place in the queue for slots, behind all that were given before."""
        return next(self._places)

    async def run(
        self,
        code: str | Sequence[str],
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits | None = None,
        place: int | None = None,
        begun: Callable[[], None] | None = None,
    ) -> Ran:
        """Run Python code, or a command with its arguments; returns once no process of it is left.

        It runs in a folder of its own that holds ``files`` alone, with an empty environment and without a network.
        ``limits`` are the configuration's unless given. Its time begins when it has a slot. It waits for one at
        ``place``, which several programs may share, or at a new one, and then calls ``begun``.
        Raises SandboxError where it could not be run or not be fenced, and for names of files outside of its folder.
        """
        given = {name: _bytes(content) for name, content in (files or {}).items()}
        for name in given:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise SandboxError(f"a file {name!r:.100} of a sandbox: give a relative path without ..")
        if isinstance(code, str):
            given[PYTHON] = code.encode(errors="replace")
        argv = None if isinstance(code, str) else list(code)
        if argv is not None and (not argv or any("\0" in part for part in argv)):
            raise SandboxError("a command of a sandbox needs a program's name, and no part of it may hold a NUL")
        async with self._slots.one(self.place() if place is None else place):
            if begun is not None:
                begun()
            program = SandboxProgram(argv=argv, stdin=_bytes(stdin), files=given)
            return await self._executor.execute(program, limits or self.limits)


class _Slots:
    """A number of slots that tasks of several event loops share; the first place is served first."""

    def __init__(self, number: int) -> None:
        self._free = number
        self._came = itertools.count()  # of one place, the first that came
        self._waiting: list[tuple[int, int, asyncio.AbstractEventLoop, asyncio.Future[None]]] = []  # a heap
        self._lock = threading.Lock()

    @contextlib.asynccontextmanager
    async def one(self, place: int) -> AsyncIterator[None]:
        """A slot, once one is free."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        waiting = (place, next(self._came), loop, turn)
        with self._lock:
            if self._free:
                self._free -= 1
                turn.set_result(None)
            else:
                heapq.heappush(self._waiting, waiting)
        try:
            await turn
        except asyncio.CancelledError:
            with self._lock:
                waits = waiting in self._waiting
                if waits:
                    self._waiting.remove(waiting)
                    heapq.heapify(self._waiting)
            if not waits:  # it was given one meanwhile
                self._leave()
            raise
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            while self._waiting:
                _, _, loop, turn = heapq.heappop(self._waiting)
                with contextlib.suppress(RuntimeError):  # its loop has closed
                    loop.call_soon_threadsafe(_give, turn)
                    return
            self._free += 1


def _give(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


def _bytes(content: str | bytes) -> bytes:
    return content.encode(errors="replace") if isinstance(content, str) else content
