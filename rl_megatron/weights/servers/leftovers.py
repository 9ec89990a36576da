"""Removes what killed runs left in a node's memory: Slurm's SIGKILL ends whoever would remove a run's files, too.

A run's folder has a lock, which the system releases with the process that holds it, however that ends. For memory of
one node: over a network another node's lock may not be seen.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from rl_megatron.errors import SyncError

_LOCK, _NEW = "in_use", ".in_use.new"
_ENDING_SECONDS = 20.0  # of an earlier start of the run


@contextlib.contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is this user's own. Another's lock on it is replaced."""
    with (folder / _NEW).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / _NEW).rename(folder / _LOCK)  # which was never there without being held
        yield


def await_free(folder: Path) -> None:
    """Wait until nobody holds the folder's lock, if it is there. Raises SyncError where that takes too long."""
    end = time.monotonic() + _ENDING_SECONDS
    while _is_held(folder / _LOCK):
        if time.monotonic() > end:
            raise SyncError(
                f"{folder} has weights of a run that goes on: `fuser {folder / _LOCK}` names its process. It is an "
                "earlier start of this run, which you may end, or a run in another container that shares this folder "
                "and has its run's folder under the same path: then take another run.name, run.dir or weights.folder"
            )
        time.sleep(0.1)


def _is_held(lock: Path) -> bool:
    with contextlib.suppress(FileNotFoundError, PermissionError), lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def remove_abandoned(beside: Path) -> None:
    """Remove this user's folders next to ``beside``, with its name up to the last "-", whose lock nobody holds."""
    stem = beside.name.rpartition("-")[0]
    for folder in beside.parent.glob(f"{stem}-*"):
        with contextlib.suppress(OSError):  # it has no lock, another holds it, or another removes it
            if folder.lstat().st_uid == os.geteuid():
                with (folder / _LOCK).open("rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
