"""Starts an engine server under a guard (engine_guard.py), which ends it when the trainer's end of a pipe closes. A
site is the server's node and the command that starts the guard there.

Forwards a child process's stderr, and keeps the last lines to explain why the process died.

Reserves ports for a server that binds them some seconds later.

Systems assign ephemeral ports from 32768 upwards (Linux's ip_local_port_range): a free port found there may be taken by
the next connection. So these ports are below that range, and are held until the server uses them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
from typing_extensions import override

from launcher.processes import engine_guard
from rl_megatron.files import append_private
from rl_megatron.observability.files import text_at_end

logger = logging.getLogger(__name__)

STOP_SECONDS = 20.0
MARK = "RL_MEGATRON_GUARDED"
"""A variable that has another value in the processes of each server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSpec:
    """A server to start. Paths are absolute and the same on every node."""

    prefix_command: Sequence[str] = ()  # a command that starts the guard on its node
    python: str = sys.executable  # the guard's
    host: str  # the node's address at which the server listens
    command: Sequence[str]  # the server's own
    environment: Mapping[str, str]  # complete
    gpus: Sequence[int] = ()  # the server's, by number among those that its node shows the guard; none: all
    folder: Path  # its working folder
    log: Path  # its output is appended; no other user can read it


class Guard(Protocol):
    """The guard of a server that was started."""

    async def wait(self) -> str:
        """Waits for the end of guard and server, and says how they ended, as the end of a sentence."""
        ...

    async def end(self) -> None:
        """Ends the server and its guard; returns once both are gone."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardProcess(Guard):
    """A guard that is a child of this process, or of a command that starts it on another node."""

    process: asyncio.subprocess.Process
    log: Path
    mark: str  # a value in the environment of its server and of the server's children

    @override
    async def wait(self) -> str:
        return f"ended with status {await self._status()}"

    async def _status(self) -> int:
        status = await self.process.wait()
        if status < 0:  # it was killed, and did not end its server
            await asyncio.to_thread(_kill_marked, self.mark)
        return status

    @override
    async def end(self) -> None:
        """Closes the pipe that the guard watches, and waits until it has ended its server."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            await asyncio.wait_for(self._status(), STOP_SECONDS)
        except TimeoutError:
            logger.warning("the guard (pid %d) of the server of %s did not end; killed", self.process.pid, self.log)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._status(), STOP_SECONDS)


async def start_guard(order: GuardSpec) -> GuardProcess:
    """Starts a server under its guard, which ends with this process. Raises OSError."""
    mark = secrets.token_hex(8)
    with append_private(order.log) as file:
        process = await asyncio.create_subprocess_exec(
            *order.prefix_command,
            order.python,
            str(engine_guard.__file__),
            order.host,
            *order.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env={**order.environment, MARK: mark, engine_guard.SEAT: ",".join(map(str, order.gpus))},
            cwd=order.folder,
        )
    return GuardProcess(process=process, log=order.log, mark=mark)


def _kill_marked(mark: str) -> None:
    """Kills all that a guard's server started on this machine, which would hold GPU memory, and awaits its end."""
    killed = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                process.kill()
                killed.append(process)
    psutil.wait_procs(killed, STOP_SECONDS / 2)


_LINES = 8
_LONGEST = 4096  # characters of a line
_DRAIN_SECONDS = 1.0  # its own children may hold the pipe open
ENDING = "\0"
"""The mark that a process's parent writes after its output, before how it ended. No program writes it."""


class StderrTail:
    """The controller's end of a process's stderr, whose other end is ``theirs``. Once it has ended, ``ending`` is the
    text that its parent wrote after `ENDING`, if any."""

    def __init__(self, who: str) -> None:
        self._ours, self.theirs = multiprocessing.Pipe(duplex=False)
        self.ending = ""
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._heard: Future[None] = Future()  # done once all of it is read
        self._hearing = threading.Thread(target=self._hear, name=f"stderr of {who}", daemon=True)

    def listen(self) -> None:
        """Starts reading, once the child has its end."""
        self.theirs.close()
        self._hearing.start()

    def _hear(self) -> None:
        self._heard.set_running_or_notify_cancel()  # who stops waiting for it must not cancel it
        with os.fdopen(os.dup(self._ours.fileno()), errors="replace") as stream:
            while text := stream.readline(_LONGEST):
                line, mark, ending = text.partition(ENDING)
                self.ending = ending.rstrip("\n") if mark else self.ending
                self._lines.append(line)
                with contextlib.suppress(OSError, ValueError):  # our own stderr is closed
                    print(line, end="", file=sys.stderr, flush=True)
        self._ours.close()
        self._heard.set_result(None)

    async def tail(self) -> str:
        """Returns the last lines of an ended child; empty if it wrote none."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(self._heard), _DRAIN_SECONDS)
        return _indented(tuple(self._lines))


def last_lines(log: Path, *, lines: int = _LINES) -> str:
    """Returns the last lines of a process's output file (`text_at_end`); empty if it cannot be read."""
    try:
        return _indented(text_at_end(log).splitlines()[-lines:])
    except OSError:
        return ""


def _indented(lines: Iterable[str]) -> str:
    return "".join(f"\n  {line.rstrip()[:_LONGEST]}" for line in lines if line.strip())


_LOW, _HIGH = 20_000, 32_000
_ATTEMPTS = 100


BLOCK = 16
"""Neighboring ports that a server gets: for requests, its ranks' store, and what its engine adds."""


def any_port(number: int = 0, count: int = 1) -> int:
    """Returns the first of a block of ports that are rarely in use, for another node.

    ``count`` callers with different ``number``s below that get different ports.
    """
    blocks = (_HIGH - _LOW) // BLOCK
    return _LOW + BLOCK * (secrets.randbelow(blocks // count) * count + number)


@contextlib.contextmanager
def held_ports(host: str) -> Iterator[int]:
    """Holds a block of ports of ``host``, an address of this machine or "" for all of them, and yields the first.

    A server can still bind one of them if it sets SO_REUSEADDR, which is usual. Linux then lets two sockets share a
    port while at most one of them listens. Raises OSError if all tried ports are taken.
    """
    for attempt in range(_ATTEMPTS):
        port = any_port()
        with contextlib.ExitStack() as stack:
            try:
                for number in range(port, port + BLOCK):
                    _take(stack.enter_context(socket.socket()), host, number)
            except OSError:
                if attempt == _ATTEMPTS - 1:
                    raise
                continue
            yield port
            return


def free_port(host: str) -> int:
    """Returns a port of ``host`` (see `held_ports`) that is free at this moment. Raises OSError."""
    with held_ports(host) as port:
        return port


def _take(held: socket.socket, host: str, port: int) -> None:
    """Binds the port exclusively, then allows a socket with SO_REUSEADDR to share it."""
    held.bind((host, port))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


StartAt = Callable[[int, GuardSpec], Awaitable[Guard]]  # starts a server, given its number, at a site elsewhere


HERE = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSite:
    """A node of one server, and what starts it there; ``prefix_command`` precedes its guard's command."""

    host: str = HERE
    prefix_command: tuple[str, ...] = ()
    python: str = sys.executable  # the guard's; of its container, if it runs in one
    start: Callable[[GuardSpec], Awaitable[Guard]] = start_guard
    server_index: int = 0  # the server's, of the ``num_servers`` servers of the run
    num_servers: int = 1
    node: str = "here"  # the scheduler's name of it
    gpus: tuple[int, ...] = ()  # the server's there, by number among those that the node shows the run
    shares_gpus: bool = False  # ranks may have these too

    @property
    def is_remote(self) -> bool:
        """True if it is, or may be, on another node, without access to this node's memory."""
        return self.host != HERE

    @contextlib.contextmanager
    def ports(self) -> Iterator[int]:
        """Yields the first of a server's ports: held if it is here, else ports that are rarely in use."""
        if self.is_remote:
            yield any_port(self.server_index, self.num_servers)
            return
        with held_ports(self.host) as port:
            yield port


Sites = Sequence[ServerSite]
"""The nodes of one server. The first one answers requests."""


def has_remote_server(found: Sequence[Sites]) -> bool:
    """True if any server is on another node, without access to this node's memory."""
    return any(site.is_remote for sites in found for site in sites)


class GpuStartLock:
    """A lock by which servers of one GPU start one after the other. An engine measures the memory left for its cache,
    and counts all that others allocate during that time as its own."""

    def __init__(self) -> None:
        self._gpus: defaultdict[tuple[str, int], asyncio.Lock] = defaultdict(asyncio.Lock)

    @contextlib.asynccontextmanager
    async def acquire(self, sites: Sites) -> AsyncIterator[None]:
        """Waits until no other server starts on a GPU of the sites, and keeps it so within."""
        async with contextlib.AsyncExitStack() as stack:
            for gpu in sorted({(site.node, gpu) for site in sites for gpu in site.gpus}):  # one order, no deadlock
                await stack.enter_async_context(self._gpus[gpu])
            yield
