"""What glibc does with the memory that a rank frees."""

from __future__ import annotations

import ctypes
import platform

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h; the largest values it takes are set below
_TRIM_STEPS = 25


def keep_freed_memory() -> None:
    """Let glibc keep freed memory: returning and faulting in layers' large temporaries costs 8 % of a tiny step."""
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


class Heap:
    """Trims the memory that glibc keeps after `keep_freed_memory`, which steps of different sizes fragment."""

    def __init__(self) -> None:
        self._trim = None if torch.cuda.is_available() else getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._steps = 0

    def step(self) -> None:
        """At every `_TRIM_STEPS`-th call return all free memory to the system; the next step faults it in again."""
        self._steps += 1
        if self._trim is not None and self._steps % _TRIM_STEPS == 0:
            self._trim(0)
