"""Linux's calls that fence a process, which Python 3.11 does not have, by the C library."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
NEW_USERS = 0x10000000
_ALL_NAMESPACES = NEW_USERS | 0x20000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
PDEATHSIG, SUBREAPER, NO_NEW_PRIVS, _SECCOMP = 1, 36, 38, 22
# By machine: its name in filters, its number of clone, and the numbers of calls that no program of a sandbox needs:
# memory that no limit counts, other processes' memory, keys, and large parts of the kernel.
_CALLS = {
    "x86_64": (0xC000003E, 56, (319, 447, 101, 310, 311, 29, 68, 248, 249, 250, 321, 298, 323, 425, 272, 308, 165)),
    "aarch64": (0xC00000B7, 220, (279, 447, 117, 270, 271, 194, 186, 217, 218, 219, 280, 241, 282, 425, 97, 268, 40)),
}


class FenceRefused(Exception):
    """This machine does not allow a fence; says which, and why."""


def prctl(option: int, *values: Any) -> None:
    """Raises FenceRefused."""
    if libc.prctl(option, *values, *(0,) * (4 - len(values))):
        raise FenceRefused(f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def forbid_calls() -> None:
    """Have the kernel refuse the system calls of `call_filter`. Raises FenceRefused."""
    rules = call_filter()
    prctl(NO_NEW_PRIVS, 1)
    code = ctypes.create_string_buffer(rules)
    prctl(_SECCOMP, 2, struct.pack("HP", len(rules) // 8, ctypes.addressof(code)))


def call_filter() -> bytes:
    """The filter that refuses the system calls of ``_CALLS``, and namespaces of the program's own.

    Raises FenceRefused.
    """
    if platform.machine() not in _CALLS:
        raise FenceRefused(
            f"the system calls of {platform.machine()} are not known here, only those of {', '.join(_CALLS)}"
        )
    machine, clone, calls = _CALLS[platform.machine()]
    load, equal, above, has, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, not_permitted, unknown = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
    rules = [(load, 0, 0, 4), (equal, 1, 0, machine), (answer, 0, 0, kill), (load, 0, 0, 0)]
    rules += [(above, 0, 1, 0x40000000), (answer, 0, 0, not_permitted)]  # x32's
    rules += [(equal, 0, 1, 435), (answer, 0, 0, unknown)]  # clone3, for which libraries take clone
    for number in calls:
        rules += [(equal, 0, 1, number), (answer, 0, 0, not_permitted)]
    rules += [(equal, 0, 3, clone), (load, 0, 0, 16), (has, 0, 1, _ALL_NAMESPACES), (answer, 0, 0, not_permitted)]
    rules += [(answer, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *rule) for rule in rules)


def write_file(path: str, text: str) -> None:
    """Raises OSError."""
    with open(path, "w") as file:
        file.write(text)


def read_file(path: str) -> str:
    """Raises OSError."""
    with open(path) as file:
        return file.read()
