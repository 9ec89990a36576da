"""Ties a process to its parent by the kernel's prctl (Linux)."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent() -> None:
    """The kernel kills this process once its parent is gone, whatever it does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """What this process's descendants leave behind when they end becomes its own child."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
