"""Ties a process to its parent by the kernel's prctl (Linux)."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents end."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
