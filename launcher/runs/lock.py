"""Locks files against other processes."""

from __future__ import annotations

import fcntl
from typing import BinaryIO


def lock(file: BinaryIO) -> bool:
    """Lock a file, open for writing, until it is closed or the process ends, however it does. False: another has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
