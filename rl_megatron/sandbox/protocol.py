"""What runs in a sandbox, its limits, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rl_megatron.config.sections.reward import SandboxSection

PYTHON = "main.py"
"""The file of a program that is given as Python code."""
ProgramEnd = Literal["done", "time", "memory", "output", "processes", "killed"]
"""done: it ended by itself; killed: by a signal that no limit sent; else the limit at which it was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one program, with all that it starts."""

    seconds: float
    cpu_seconds: float  # of all its processes
    memory_bytes: int  # of all its processes, and of what each may ask for
    processes: int = 16  # and threads
    output_bytes: int = 64 << 10  # beyond what its test expects
    files_bytes: int = 64 << 20  # in memory

    @classmethod
    def of(cls, section: SandboxSection) -> Limits:
        """Those of the configuration."""
        return cls(seconds=section.seconds, cpu_seconds=section.seconds, memory_bytes=section.memory_mb << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxProgram:
    """What is to run, in a folder of its own that holds ``files`` alone."""

    argv: Sequence[str] | None  # None: Python, of the file main.py
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How a program ended, and what it printed until then."""

    ended: ProgramEnd
    exit: int | None  # its status, if it ended by itself
    stdout: str  # what is not UTF-8 is replaced
    stderr: str
    seconds: float


class Executor(Protocol):
    """One kind of sandbox."""

    async def execute(self, program: SandboxProgram, limits: Limits) -> Ran:
        """Run it; returns once no process of it is left. Cancelling ends it too.

        Raises SandboxError where it could not be run, or not be fenced.
        """
        ...
