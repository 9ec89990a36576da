"""Calls a function in another process, which the kernel ends at a limit of processor time or memory.

No Python of this process can end one operation of C, like a power of large integers, which also keeps Python's lock.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import IO, Any

WAIT_SECONDS = 60.0  # the longest wait for a process, which a busy machine may delay
_PASSED = ("LD_LIBRARY_PATH", "TZ")  # variables; tokens in others are not for a foreign template
_MOST_SHOWN = 500  # bytes of a process's last words in an error


class LimitExceeded(Exception):
    """A call took more than a limit. The text names the limit, and calls the call "it"."""


class ProcessFailed(Exception):
    """The process did not start, ended with a status, was killed by another, or hung. The text says which."""


class BoundedProcess:
    """A process of ``python -m module``, which calls `answer_calls`. Calls of several threads wait for each other.

    The first call starts it, and so does the first one after its end.
    """

    def __init__(self, module: str) -> None:
        self.command = (sys.executable, "-P", "-m", module)
        self.process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._log: IO[bytes] | None = None  # the process writes its standard error here

    def ask(self, seconds: float, *arguments: object) -> Any:
        """Returns what the function returns for the arguments: JSON.

        Raises LimitExceeded for ``seconds`` of processor time, for memory and for a call that crashes it twice.
        Raises ProcessFailed for faults that the call did not cause.
        """
        request = pickle.dumps((seconds, arguments))
        with self._lock:
            for _ in range(2):  # another program may have ended it, so one retry is fair
                process, reply = self.process or self.start(), b""
                self.process = None  # an interrupted call leaves it in an unknown state
                try:
                    reply = _exchanged(process, request)
                finally:
                    if not reply.endswith(b"\n"):
                        stood_still = _is_alive(process)
                        process.kill()
                        process.communicate()
                if process.returncode is None:
                    self.process = process
                    exceeded, value = json.loads(reply)
                    if exceeded:
                        raise LimitExceeded(value)
                    return value
                if process.returncode == -signal.SIGPROF:
                    raise LimitExceeded(f"it took more than {seconds:g} s of processor time")
                if process.returncode >= 0:
                    raise ProcessFailed(f"its process ended with status {process.returncode}: {self._last_words()}")
        if -process.returncode in (signal.SIGSEGV, signal.SIGABRT):
            raise LimitExceeded("it crashed its process twice")
        if stood_still:
            raise ProcessFailed(f"its process stood still for {WAIT_SECONDS:g} s, twice; something had stopped it")
        name = signal.Signals(-process.returncode).name
        raise ProcessFailed(f"its process was killed twice by another, with {name}, as one is where memory is short")

    def start(self) -> subprocess.Popen[bytes]:
        """Starts a process, which ends when this one does."""
        self._log = self._log or tempfile.TemporaryFile()  # noqa: SIM115
        variables = {name: os.environ[name] for name in _PASSED if name in os.environ}
        variables |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "LANG": "C.UTF-8"}
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(
                self.command, stdin=pipe, stdout=pipe, stderr=self._log, start_new_session=True, env=variables
            )
        except OSError as error:
            raise ProcessFailed(f"its process did not start: {error}") from error
        os.set_blocking(_descriptor(process.stdin), False)
        return process

    def _last_words(self) -> str:
        assert self._log is not None
        self._log.seek(0)
        return self._log.read()[-_MOST_SHOWN:].decode(errors="replace").strip()


def answer_calls(function: Callable[..., object], memory_bytes: int) -> None:
    """Answers calls from standard input with JSON until it closes. The function may take ``memory_bytes``."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    allowed = resource.getrlimit(resource.RLIMIT_AS)[1]
    memory_bytes = memory_bytes if allowed == resource.RLIM_INFINITY else min(memory_bytes, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    while True:
        try:
            seconds, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            reply = json.dumps((False, function(*arguments)))
        except MemoryError:
            reply = json.dumps((True, f"it took more than {memory_bytes >> 20} MB of memory"))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(reply, file=out, flush=True)


def _is_alive(process: subprocess.Popen[bytes]) -> bool:
    """True if a process keeps running, although its pipes may have closed just now."""
    try:
        process.wait(0.2)
    except subprocess.TimeoutExpired:
        return True
    return False


def _exchanged(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    """Returns what the process writes for a request. The last line is incomplete if the process ends or hangs."""
    into, out = _descriptor(process.stdin), _descriptor(process.stdout)
    left, reply = memoryview(request), [b""]
    try:
        while left and _is_ready(into, select.POLLOUT):
            left = left[os.write(into, left) :]
        while not left and not reply[-1].endswith(b"\n") and _is_ready(out, select.POLLIN):
            reply.append(os.read(out, 1 << 20))
            if not reply[-1]:
                break
    except BrokenPipeError:
        pass
    return b"".join(reply)


def _is_ready(descriptor: int, event: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(WAIT_SECONDS * 1000))


def _descriptor(pipe: IO[bytes] | None) -> int:
    assert pipe is not None
    return pipe.fileno()
