"""Writes the stacks of a run's processes when it hangs, in C, so that no hang prevents it; and reads them.

A rank that waits in a collective has a frame of torch.distributed innermost. The others wait for a rank that has
none. The controller's own event loop is watched from a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import linecache
import logging
import os
import re
import signal
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from rl_megatron.config.run import RunConfig
from rl_megatron.files import FileOperation, current_operations, make_inside

logger = logging.getLogger(__name__)

SIGNAL = signal.SIGUSR2
_HEAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+).*\(most recent call first\):$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_CALLS = "_serve"  # the function of launcher/worker/process.py
_COLLECTIVES = "/torch/distributed/"
_OURS = ("/rl_megatron/", "/launcher/")
_file: IO[str] | None = None  # kept open: a process that hangs cannot open one
_silence = 0.0


def register(path: Path, *, silence: float) -> None:
    """Makes this process write its stacks into a file on the signal, or ``silence`` seconds after
    `postpone_stack_dump`."""
    global _file, _silence
    make_inside(path.parent, mode=0o700)
    _silence = silence
    _file = path.open("a")
    faulthandler.register(SIGNAL, file=_file, all_threads=True, chain=False)


def dump() -> None:
    """Writes this process's stacks, whatever its other threads do."""
    if _file is not None:
        os.kill(os.getpid(), SIGNAL)


def postpone_stack_dump() -> None:
    """Postpones the stack dump. If it is not called in time, a C thread writes all stacks."""
    if _file is not None:
        faulthandler.dump_traceback_later(_silence, file=_file)


def remove_empty_files(folder: Path) -> None:
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
    collective: str | None  # the collective that it waits in

    @property
    def place(self) -> str:
        """Its innermost frame, and our innermost frame, which led there."""
        if not self.frames:
            return "no frame of Python"
        inner = self.frames[0]
        skip = [frame for frame in self.frames if not self.collective or _COLLECTIVES not in frame.file]
        led = next((f for f in skip if any(room in f.file for room in _OURS)), inner)
        return str(led) if self.collective or led == inner else f"{inner}, by {led}"


def thread_stack(ident: int) -> Stack:
    """Returns the stack of a thread of this process as it is now."""
    frames, frame = [], sys._current_frames().get(ident)
    while frame is not None:
        frames.append(Frame(file=frame.f_code.co_filename, line=frame.f_lineno, name=frame.f_code.co_name))
        frame = frame.f_back
    return Stack(frames=tuple(frames), collective=None)


def read(text: str) -> Stack | None:
    """Returns the last stack in a file, of the thread that serves calls, else of the main thread, which a dump has
    last. None if there is none."""
    parts = _HEAD.split(text)[1:]
    last: dict[str, tuple[Frame, ...]] = {}
    for thread, part in zip(parts[-2::-2], parts[::-2], strict=True):  # last dump first
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
    """Returns the outermost function of torch.distributed on top of a stack, or the wait for a running collective."""
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


def task_frames(task: asyncio.Task[Any]) -> str:
    """Returns the frames of an event loop's task, innermost first, as far as it awaits coroutines."""
    frames: list[Frame] = []
    coroutine: Any = task.get_coro()
    while isinstance(coroutine, types.CoroutineType) and coroutine.cr_frame is not None:
        code = coroutine.cr_frame.f_code
        frames.append(Frame(file=code.co_filename, line=coroutine.cr_frame.f_lineno, name=code.co_name))
        coroutine = coroutine.cr_await
    return "\n  ".join([f"{task.get_name()}, which waits for {coroutine!r}", *map(str, reversed(frames))])


def explain(found: Mapping[int, Stack | None]) -> tuple[list[int], str]:
    """Returns the ranks that are not in a collective while others are, and a sentence about all ranks."""
    waiting = {rank: s for rank, s in found.items() if s is not None and s.collective}
    behind = [rank for rank in found if rank not in waiting] if waiting else []
    texts: dict[str, list[str]] = {}
    for rank, stack in found.items():
        if stack is None:
            text = "gave no stack"
        elif stack.collective:
            text = f"waits in {stack.collective} at {stack.place}"
        else:
            text = f"is at {stack.place}"
        texts.setdefault(text, []).append(str(rank))
    return behind, "; ".join(f"rank {', '.join(ranks)} {text}" for text, ranks in texts.items())


_TICK_SECONDS = 0.02
_LAST_SECONDS = 5.0  # time for stacks and reason before the process ends


class LoopWatch:
    """Watches the event loop that makes it from a thread, because a call that blocks it stops everything.

    It ends the process and its children if the loop is blocked for ``run.watchdog_seconds``, or if any thread waits for
    a file (`current_operations`) for an hour. A call that holds Python's lock keeps the thread from running, too. After
    that much processor time the kernel sends SIGPROF, and C code writes the stacks.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self._limit, self._disk_limit = config.watchdog_seconds, config.watchdog_disk_seconds
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder
        self._stacks = (folder / "controller.txt").open("a")  # opened now, because C code cannot open it
        faulthandler.register(signal.SIGPROF, file=self._stacks, all_threads=True, chain=True)
        self._loop, self._thread_of_loop = asyncio.get_running_loop(), threading.get_ident()
        self._ticked, self._over = threading.Event(), threading.Event()
        self._tick()
        self._watching = threading.Thread(target=self._watch, name="loop watch", daemon=True)
        self._watching.start()

    def begin(self) -> None:
        """Leaves the modules and data that are there out of garbage collections.

        A full collection over some 200,000 objects holds the loop for 0.1 s.
        """
        gc.freeze()

    def stop(self) -> None:
        """Stops watching, before the loop ends."""
        self._timer.cancel()
        self._over.set()
        self._watching.join()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        faulthandler.unregister(signal.SIGPROF)
        self._stacks.close()
        remove_empty_files(self._folder)
        gc.unfreeze()

    def _tick(self) -> None:
        self._ticked.set()
        self._timer = self._loop.call_later(_TICK_SECONDS, self._tick)

    def _watch(self) -> None:
        """Counts seconds instead of reading a clock, so that a run that is suspended as a whole does not hang."""
        still, waits = 0, dict[FileOperation, int]()
        while max(waits.values(), default=0) <= self._disk_limit and still <= self._limit:
            signal.setitimer(signal.ITIMER_PROF, self._limit)
            if self._over.wait(1.0):
                return
            waiting = current_operations()
            waits = {file: waits.get(file, 0) + 1 for file in waiting.values()}
            still = 0 if self._ticked.is_set() or self._thread_of_loop in waiting else still + 1
            self._ticked.clear()
        self._end(None if still > self._limit else max(waits, key=lambda file: waits[file]))

    def _end(self, file: FileOperation | None) -> NoReturn:
        last = threading.Thread(target=self._write_end, args=(file,), daemon=True)  # its disk may never answer
        last.start()
        last.join(_LAST_SECONDS)
        os._exit(1)

    def _write_end(self, file: FileOperation | None) -> None:
        """Writes the end. Python's lock is free while a write waits for a disk, unlike in C code that writes stacks."""
        with open(os.memfd_create("stacks"), "w+") as memory:
            faulthandler.dump_traceback(memory, all_threads=True)
            memory.seek(0)
            written = memory.read()
        text = (
            f"the controller's event loop has been blocked for {self._limit:g} s (run.watchdog_seconds): it is at "
            f"{thread_stack(self._thread_of_loop).place}\n  no code on the event loop may block"
            if file is None
            else f"the controller has waited for a file for {self._disk_limit:g} s\n  the "
            f"file system does not answer for {file.path}"
        )
        text += f"\n  stacks: {self._folder / 'controller.txt'}"
        print(f"error: {text}", file=sys.stderr, flush=True)
        self._stacks.write(written)
        self._stacks.flush()
        logger.error("the run failed: %s", text)
