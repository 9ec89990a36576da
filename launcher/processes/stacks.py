"""Writes the stacks of a run's processes when it hangs, in C, so that no hang prevents it; and reads them.

A rank that waits in a collective has a frame of torch.distributed innermost. The others wait for a rank that has
none.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import linecache
import os
import re
import signal
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rl_megatron.files import make_inside

SIGNAL = signal.SIGUSR2
_HEAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+).*\(most recent call first\):$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_CALLS = "_serve"  # of launcher/worker/process.py
_COLLECTIVES = "/torch/distributed/"
_OURS = ("/rl_megatron/", "/launcher/")
_file: IO[str] | None = None  # kept open: a process that hangs cannot open one
_silence = 0.0


def register(path: Path, *, silence: float) -> None:
    """Have this process write its stacks into a file on the signal, or ``silence`` seconds after `living`."""
    global _file, _silence
    make_inside(path.parent, mode=0o700)
    _silence = silence
    _file = path.open("a")
    faulthandler.register(SIGNAL, file=_file, all_threads=True, chain=False)


def dump() -> None:
    """Write this process's stacks, whatever its other threads do."""
    if _file is not None:
        os.kill(os.getpid(), SIGNAL)


def living() -> None:
    """Report that the interpreter runs. If this is not called in time, a C thread writes the stacks."""
    if _file is not None:
        faulthandler.dump_traceback_later(_silence, file=_file)


def tidy(folder: Path) -> None:
    """Removes empty files of stacks, and folders that are then empty. They stay where the disk is read-only."""
    with contextlib.suppress(OSError):  # an error here would hide why the run ends
        for file in folder.rglob("*.txt"):
            if not file.stat().st_size:
                file.unlink()
        for found in (*folder.glob("*/"), folder):
            if found.is_dir() and not any(found.iterdir()):
                found.rmdir()


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        """``file:line in name``; paths start at the repository or the package."""
        short = re.sub(r"^.*/(?:site-packages|lib/python3\.\d+)/", "", self.file)
        for room in _OURS:
            short = f"{room}{short.rpartition(room)[2]}".lstrip("/") if room in short else short
        return f"{short}:{self.line} in {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The last stack that a process wrote."""

    frames: tuple[Frame, ...]  # innermost first, of the thread in a collective, else of the main thread
    collective: str | None  # that it waits in

    @property
    def place(self) -> str:
        """Its innermost frame, and our innermost frame, which led there."""
        if not self.frames:
            return "no frame of Python"
        inner = self.frames[0]
        skip = [frame for frame in self.frames if not self.collective or _COLLECTIVES not in frame.file]
        led = next((f for f in skip if any(room in f.file for room in _OURS)), inner)
        return str(led) if self.collective or led == inner else f"{inner}, by {led}"


def of_thread(ident: int) -> Stack:
    """Where a thread of this process is now."""
    frames, frame = [], sys._current_frames().get(ident)
    while frame is not None:
        frames.append(Frame(file=frame.f_code.co_filename, line=frame.f_lineno, name=frame.f_code.co_name))
        frame = frame.f_back
    return Stack(frames=tuple(frames), collective=None)


def read(text: str) -> Stack | None:
    """The last stack in a file, of the thread that serves calls, else of the main thread, which a dump has last. None
    if there is none."""
    parts = _HEAD.split(text)[1:]
    last: dict[str, tuple[Frame, ...]] = {}
    for thread, part in zip(parts[-2::-2], parts[::-2], strict=True):  # from the end
        if thread in last:
            break  # an earlier dump
        found = _FRAME.finditer(part)
        last[thread] = tuple(Frame(file=m["file"], line=int(m["line"]), name=m["name"]) for m in found)
    if not last:
        return None
    threads = list(last.values())[::-1]
    waiting = [(frames, name) for frames in threads if (name := _collective(frames)) is not None]
    if waiting:
        frames, name = waiting[-1]
        return Stack(frames=frames, collective=name)
    serving = [frames for frames in threads if any(frame.name == _CALLS for frame in frames)]
    return Stack(frames=(serving or threads)[-1], collective=None)


def _collective(frames: Sequence[Frame]) -> str | None:
    """The outermost function of torch.distributed on top of a stack, or the wait for a collective under way."""
    if not frames:
        return None
    names = []
    for frame in frames:
        if _COLLECTIVES not in frame.file:
            break
        names.append(frame.name)
    if names:
        return next((name for name in reversed(names) if name != "wrapper"), None)
    waits = ".wait(" in linecache.getline(frames[0].file, frames[0].line)
    return "a collective under way" if waits else None


def of_task(task: asyncio.Task[Any]) -> str:
    """The frames of an event loop's task, innermost first, as far as it awaits coroutines."""
    frames: list[Frame] = []
    coroutine: Any = task.get_coro()
    while isinstance(coroutine, types.CoroutineType) and coroutine.cr_frame is not None:
        code = coroutine.cr_frame.f_code
        frames.append(Frame(file=code.co_filename, line=coroutine.cr_frame.f_lineno, name=code.co_name))
        coroutine = coroutine.cr_await
    return "\n  ".join([f"{task.get_name()}, which waits for {coroutine!r}", *map(str, reversed(frames))])


def explain(found: Mapping[int, Stack | None]) -> tuple[list[int], str]:
    """The ranks that are not in a collective while others are, and a sentence about all ranks."""
    waiting = {rank: s for rank, s in found.items() if s is not None and s.collective}
    behind = [rank for rank in found if rank not in waiting] if waiting else []
    said: dict[str, list[str]] = {}
    for rank, stack in found.items():
        if stack is None:
            text = "gave no stack"
        elif stack.collective:
            text = f"waits in {stack.collective} at {stack.place}"
        else:
            text = f"is at {stack.place}"
        said.setdefault(text, []).append(str(rank))
    return behind, "; ".join(f"rank {', '.join(ranks)} {text}" for text, ranks in said.items())
