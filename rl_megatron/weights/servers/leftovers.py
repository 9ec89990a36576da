"""Removes what killed runs left in a node's memory: Slurm's SIGKILL ends whoever would remove a run's files, too.

A run's folder has a lock, which the system releases with the process that holds it, however that ends. For memory of
one node: over a network another node's lock may not be seen.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_LOCK, _NEW = "in_use", ".in_use.new"


@contextlib.contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is this user's own. Another's lock on it is replaced."""
    with (folder / _NEW).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / _NEW).rename(folder / _LOCK)  # which was never there without being held
        yield


def remove_abandoned(beside: Path) -> None:
    """Remove this user's folders next to ``beside``, with its name up to the last "-", whose lock nobody holds."""
    stem = beside.name.rpartition("-")[0]
    for folder in beside.parent.glob(f"{stem}-*"):
        with contextlib.suppress(OSError):  # it has no lock, another holds it, or another removes it
            if folder.lstat().st_uid == os.geteuid():
                with (folder / _LOCK).open("rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
