"""Marks the threads of a trajectory, so that the processes which they start can be told from all others.

A mark is a number, written into the set of blocked real-time signals, which nothing here sends. Linux passes that set
to each thread and process that is started, through any number of forks, sessions and programs, and shows it in /proc.
"""

from __future__ import annotations

import contextlib
import re
import signal
from pathlib import Path

SHARED = (1 << 24) - 1
"""The mark of processes that many trajectories share, and that none of them ends."""
_SIGNALS = range(41, 65)  # real-time ones that no C library keeps for itself
_BLOCKED = re.compile(r"^SigBlk:\s*([0-9a-f]+)$", re.MULTILINE)


def mark(number: int) -> None:
    """Marks the calling thread, and all that it starts from now on, with a number of 24 bits, which are not all 0."""
    unblocked = {one for place, one in enumerate(_SIGNALS) if not number >> place & 1}
    signal.pthread_sigmask(signal.SIG_BLOCK, set(_SIGNALS) - unblocked)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, unblocked)


def read_mark(task: int, process: int | str | None = None) -> int:
    """Returns the mark of a process, or of a thread of ``process``; 0 if it has none, or does not exist."""
    path = Path(f"/proc/{task}/status" if process is None else f"/proc/{process}/task/{task}/status")
    with contextlib.suppress(OSError):
        if (blocked := _BLOCKED.search(path.read_text())) is not None:
            return int(blocked[1], 16) >> _SIGNALS.start - 1 & (1 << len(_SIGNALS)) - 1
    return 0
