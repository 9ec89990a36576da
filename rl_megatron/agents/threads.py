"""Threads with an event loop each, in which the user's code of one trajectory runs: no thread blocks another.

A call that is not answered in time is given up, with its thread, whether or not the code heeds its cancellation. A
thread cannot be killed, but it is a daemon and delays no exit. Its processes are ended, with all that they started.
Linux keeps for each thread the children that it forked, in /proc/self/task/<thread>/children. This process adopts those
below it when their parents end. They become children of its first thread, and their marks name their owners.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from typing_extensions import override

from rl_megatron.environments import marks
from rl_megatron.sandbox import keeper
from rl_megatron.user_code import describe_error


class AdoptedProcesses:
    """Processes that trajectories started and that are children of other threads than their own."""

    def __init__(self) -> None:
        """Makes this process adopt its descendants, from now on, when their parents end."""
        with contextlib.suppress(keeper.FenceRefused):  # then such processes are not found
            keeper.prctl(keeper.SUBREAPER, 1)
        self._seen = dict[int, int]()  # 0 of children and threads without a mark, SHARED of threads that have that

    def of(self, mark: int, own: Collection[int]) -> list[int]:
        """Returns the running processes with the ``mark`` that this process adopted, and the children of threads that
        have it. It leaves out those of the threads ``own``, which their owners know.

        Waits for those that have ended, also for those that trajectories share, so that none stays a zombie.
        """
        first = os.getpid()
        others = [thread for thread in _threads_of("self") if thread not in own and thread != first]
        found = list[int]()
        for thread in others:
            match self._mark(thread, "self"):
                case given if given == mark:
                    found += _children(thread, "self")
                case marks.SHARED:  # also one that forks or ends: all signals are blocked then, but not its children's
                    found += [child for child in _children(thread, "self") if marks.read_mark(child) == mark]
        adopted = _children(first, "self")  # read last: a thread that ends leaves its children to the first
        of = {child: self._mark(child) for child in adopted}
        there = {*adopted, *others}
        self._seen = {task: given for task, given in self._seen.items() if task in there}
        found += [child for child, given in of.items() if given == mark]
        reap([*found, *(child for child, given in of.items() if given == marks.SHARED)])
        return [pid for pid in found if start_ticks(pid) is not None]

    def _mark(self, task: int, process: str | None = None) -> int:
        if task in self._seen:
            return self._seen[task]
        given = marks.read_mark(task, process)
        if not given or (process is not None and given == marks.SHARED):
            self._seen[task] = given
        return given


def find_children(thread: int, process: int | str = "self") -> list[int]:
    """Returns the running children of a thread of ``process``; none where the kernel does not say."""
    return [pid for pid in _children(thread, process) if start_ticks(pid) is not None]


def _children(thread: int, process: int | str) -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/{process}/task/{thread}/children").read_text().split()]
    except OSError:
        return []


def start_ticks(pid: int) -> int | None:
    """Returns when a running process began, in the kernel's ticks, which tells it from a later one of the same id. None
    for one that has ended."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(rest[18])


def end_trees(roots: Iterable[int]) -> list[int]:
    """Stops these processes and all below them, so that none starts another, then kills them. Returns all of them."""
    found: list[int] = []
    new = list(dict.fromkeys(roots))
    while new:
        for pid in new:
            _send(pid, signal.SIGSTOP)
        found += new
        below = {child for pid in found for thread in _threads_of(pid) for child in find_children(thread, pid)}
        new = sorted(below.difference(found))
    for pid in found:
        _send(pid, signal.SIGKILL)
    return found


def reap(pids: Iterable[int]) -> None:
    """Collects the exit statuses of this process's children among ``pids`` that have ended."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):  # another's child, or collected
            os.waitpid(pid, os.WNOHANG)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _threads_of(pid: int | str) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


T = TypeVar("T")

_WAKING = 16  # calls that wake their threads at a time
_WAKING_SECONDS = 0.02
_MARKS = itertools.cycle(range(1, marks.SHARED))


class CallTimeout(Exception):
    """A call was not answered in time."""


class UserCodeFailed(Exception):
    """A call raised; the text says what."""


class WakeLimiter:
    """Limits how many calls wake their threads together: a thousand threads that want the interpreter's lock keep the
    caller's event loop waiting for it. A call holds up others for 20 ms at most."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(_WAKING)

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Holds a place until the call has ended or taken 20 ms."""
        await self._places.acquire()
        left = contextlib.ExitStack()
        left.callback(self._places.release)
        late = asyncio.get_running_loop().call_later(_WAKING_SECONDS, left.close)
        try:
            yield
        finally:
            late.cancel()
            left.close()  # does nothing if the timer has closed it


class LoopThread:
    """A daemon thread with an event loop. One caller's event loop uses it."""

    def __init__(self, waking: WakeLimiter, adopted: AdoptedProcesses) -> None:
        self._waking, self._adopted, self._mark = waking, adopted, next(_MARKS)
        self._loop = asyncio.new_event_loop()
        self._helpers = _Helpers()
        self._loop.set_default_executor(self._helpers)
        self._loop.set_task_factory(self._task)
        self._tasks = WeakSet[asyncio.Task[Any]]()
        self._ended = self._given_up = False
        self._thread = _OwnThread(target=self._turn, name="environment", daemon=True)
        self._thread.start()

    def _task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **named: Any) -> asyncio.Task[Any]:
        task = asyncio.Task[Any](coroutine, loop=loop, **named)
        self._tasks.add(task)
        return task

    def _turn(self) -> None:
        marks.mark(self._mark)
        while not self._ended:
            with contextlib.suppress(BaseException):  # the user's task may exit
                self._loop.run_forever()
        with contextlib.suppress(BaseException):
            left = [task for task in self._tasks if not task.done()]
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left))
        with contextlib.suppress(Exception):
            self._loop.close()

    async def call(self, function: Callable[[], Awaitable[T]], seconds: float) -> T:
        """Returns the result of ``function``, on this thread's loop. Raises CallTimeout after ``seconds``, and
        UserCodeFailed."""

        async def outcome() -> tuple[T | None, BaseException | None]:
            try:
                return await function(), None
            except BaseException as error:  # noqa: BLE001  raised again where it is awaited
                return None, error

        async with self._waking.place():
            running = asyncio.run_coroutine_threadsafe(outcome(), self._loop)
            waiting = asyncio.wrap_future(running)
            try:
                done, _ = await asyncio.wait({waiting}, timeout=seconds)
            finally:
                if not waiting.done():
                    self._given_up = True
                    waiting.cancel()
        if not done:
            raise CallTimeout
        result, error = waiting.result()
        if error is not None:
            raise UserCodeFailed(describe_error(error)) from error
        return result  # type: ignore[return-value]  # T may be None itself

    async def end_processes(self) -> list[int]:
        """Kills processes that this thread's code left running, in whatever thread and way. Returns their ids."""
        own = {one.native_id or 0 for one in threading.enumerate() if isinstance(one, _OwnThread)}
        roots = [
            *find_children(self._thread.native_id or 0),
            *self._helpers.children(),
            *self._adopted.of(self._mark, own),
        ]
        if not roots:
            return []
        found = await asyncio.to_thread(end_trees, roots)
        for _ in range(50):  # a killed process is gone within milliseconds
            reap(found)
            if all(start_ticks(pid) is None for pid in found):
                break
            await asyncio.sleep(0.01)
        return found

    @property
    def is_clean(self) -> bool:
        """True if another trajectory may use it: no call was given up, and no task is left on its loop."""
        return not self._given_up and all(task.done() for task in tuple(self._tasks))

    def end(self) -> None:
        """Ends the thread once nothing blocks it."""
        self._ended = True
        with contextlib.suppress(RuntimeError):  # its loop is closed
            self._loop.call_soon_threadsafe(self._loop.stop)


class EpisodeThreads:
    """The threads of a run, at most ``limit`` of them, which clean trajectories hand on. One event loop uses them."""

    def __init__(self, limit: int) -> None:
        self._room, self._waking, self._adopted = asyncio.Semaphore(limit), WakeLimiter(), AdoptedProcesses()
        self._free: list[LoopThread] = []

    async def take(self, admitted: Callable[[], None]) -> LoopThread:
        """Returns a thread for one trajectory, first come, first served. Calls ``admitted`` once there is room."""
        await self._room.acquire()
        admitted()
        if self._free:
            return self._free.pop()
        try:
            async with self._waking.place():  # a start waits for the interpreter's lock, too
                await asyncio.sleep(0)
                return LoopThread(self._waking, self._adopted)
        except BaseException:
            self._room.release()
            raise

    async def give_back(self, thread: LoopThread) -> list[int]:
        """Kills the processes that a trajectory left, and keeps its thread if it is clean. Returns the killed ids."""
        try:
            killed = await thread.end_processes()
            if not killed and thread.is_clean:
                self._free.append(thread)
            else:
                thread.end()
            return killed
        finally:
            self._room.release()


class _OwnThread(threading.Thread):
    """A trajectory's, as this module starts them; their children are known."""


class _Helpers(ThreadPoolExecutor):
    """Runs what the user's code hands to threads in daemon ones, and knows the processes that these started."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)  # its own threads are never started
        self._left: dict[int, int | None] = {}  # processes of threads that have ended, and when they began
        self._running: set[int] = set()

    def children(self) -> list[int]:
        left = [pid for pid, since in tuple(self._left.items()) if since is not None and start_ticks(pid) == since]
        return left + [child for thread in tuple(self._running) for child in find_children(thread)]

    @override
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            thread = threading.get_native_id()
            self._running.add(thread)
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  raised again where it is awaited
                future.set_exception(error)
            finally:
                self._left |= {
                    pid: start_ticks(pid) for pid in find_children(thread)
                }  # these become another thread's now
                self._running.discard(thread)

        _OwnThread(target=work, name="environment's helper", daemon=True).start()
        return future
