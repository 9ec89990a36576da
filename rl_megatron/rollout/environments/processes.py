"""Finds the processes that a trajectory's threads started, and ends them with all that they started.

Linux keeps for each thread the children that it forked, in /proc/self/task/<thread>/children. This process adopts those
below it whose parents have ended: they become children of its first thread, and their marks say whose they are.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterable
from pathlib import Path

from rl_megatron.environments import marks
from rl_megatron.sandbox import kernel


class Adopted:
    """Processes that trajectories started and that are children of other threads than their own."""

    def __init__(self) -> None:
        """From now on this process adopts what is below it and whose parent ends."""
        with contextlib.suppress(kernel.FenceRefused):  # then such processes are not found
            kernel.prctl(kernel.SUBREAPER, 1)
        self._seen = dict[int, int]()  # 0 of children and threads without a mark, SHARED of threads that have that

    def of(self, mark: int, own: Collection[int]) -> list[int]:
        """The running processes with the ``mark`` that this process adopted, and the children of threads that have it,
        without those of the threads ``own``, which their owners know.

        Waits for those that have ended, also for those that trajectories share, so that none stays a zombie.
        """
        first = os.getpid()
        others = [thread for thread in _threads_of("self") if thread not in own and thread != first]
        found = list[int]()
        for thread in others:
            match self._mark(thread, "self"):
                case given if given == mark:
                    found += _children(thread, "self")
                case marks.SHARED:  # or one that forks or ends: all signals are blocked then, but not its children's
                    found += [child for child in _children(thread, "self") if marks.mark_of(child) == mark]
        adopted = _children(first, "self")  # after all others, as a thread that ends leaves its children to the first
        of = {child: self._mark(child) for child in adopted}
        there = {*adopted, *others}
        self._seen = {task: given for task, given in self._seen.items() if task in there}
        found += [child for child, given in of.items() if given == mark]
        reap([*found, *(child for child, given in of.items() if given == marks.SHARED)])
        return [pid for pid in found if began(pid) is not None]

    def _mark(self, task: int, process: str | None = None) -> int:
        if task in self._seen:
            return self._seen[task]
        given = marks.mark_of(task, process)
        if not given or (process is not None and given == marks.SHARED):
            self._seen[task] = given
        return given


def children_of(thread: int, process: int | str = "self") -> list[int]:
    """The running children of a thread of ``process``; none where the kernel does not say."""
    return [pid for pid in _children(thread, process) if began(pid) is not None]


def _children(thread: int, process: int | str) -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/{process}/task/{thread}/children").read_text().split()]
    except OSError:
        return []


def began(pid: int) -> int | None:
    """When a running process began, in the kernel's ticks, which tells it from a later one of the same id; None of one
    that has ended."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(rest[18])


def end_trees(roots: Iterable[int]) -> list[int]:
    """Stop these processes and all below them, so that none starts another, then kill them; all that were found."""
    found: list[int] = []
    new = list(dict.fromkeys(roots))
    while new:
        for pid in new:
            _send(pid, signal.SIGSTOP)
        found += new
        below = {child for pid in found for thread in _threads_of(pid) for child in children_of(thread, pid)}
        new = sorted(below.difference(found))
    for pid in found:
        _send(pid, signal.SIGKILL)
    return found


def reap(pids: Iterable[int]) -> None:
    """Collect the exit statuses of this process's children among ``pids`` that have ended."""
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
