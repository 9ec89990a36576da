"""Finds the processes that a thread started, and ends them with all that they started.

Linux keeps for each thread the children that it forked, in /proc/self/task/<thread>/children. A process whose parent
has ended is another's child, and is not found.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path


def children_of(thread: int, process: int | str = "self") -> list[int]:
    """The running children of a thread of ``process``; none where the kernel does not say."""
    try:
        pids = [int(pid) for pid in Path(f"/proc/{process}/task/{thread}/children").read_text().split()]
    except OSError:
        return []
    return [pid for pid in pids if began(pid) is not None]


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


def _threads_of(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []
