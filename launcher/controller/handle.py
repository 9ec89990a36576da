"""The controller's end of one rank: sends calls, receives answers and heartbeats.

Keeps the first failure of a run, which ends every wait for a rank.

Reads and writes a rank's stream from the event loop, which never waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from launcher import wire
from launcher.processes import limits
from launcher.processes.guards import LastWords, end_of
from launcher.processes.own_thread import OwnThread
from launcher.wire import STACKS, Hello, Message
from rl_megatron.errors import RLMegatronError, SyncError, WorkerDied
from rl_megatron.observability.timeline import RankTimed, RankTimes
from rl_megatron.placement.names import LEARNER, called, file_stem

logger = logging.getLogger(__name__)


_WAKE_SECONDS = 10.0  # limit of scancel, whose server may be away
_TAIL_SECONDS = 0.5  # to read the end of a dead rank's output
_HUNG_UP = "hung up: it was killed, crashed or lost its node"


class RankProcess:
    """One rank's process, which has connected, and the stream to it."""

    def __init__(self, connection: Connection, hello: Hello, output: LastWords | Path) -> None:
        """``output``: its stderr, if this process's child started it on this machine; else the folder of its file."""
        self.connection, self.hello, self.output = connection, hello, output
        self.role, self.rank, self.node, self.pid = hello.role, hello.rank, hello.node, hello.pid
        self.where = f"pid {self.pid}" if isinstance(output, LastWords) else f"pid {self.pid} on {self.node}"

    async def ending(self) -> tuple[str, bool]:
        """How it ended, once its stream has, which is the only sign from another node; and whether it was killed, so
        that its peers' errors are consequences.

        Says it soon, whatever its output's disk does: peers blame each other after a second.
        """
        if isinstance(self.output, LastWords):
            tail = await self.output.tail()
            how, said = self.output.ending or _HUNG_UP, f"its last output:{tail}" if tail else "log.txt has its output"
        else:
            tail, file, how = "", f"{file_stem(self.role, self.rank)}.txt", _HUNG_UP
            with contextlib.suppress(TimeoutError):
                tail = await asyncio.wait_for(_files()(end_of, self.output / file), _TAIL_SECONDS)
            said = f"{file} ends with:{tail}" if tail else f"{file} has its output"
        return f"{how}; {said}", "exit code" not in how

    async def wake(self) -> None:
        """Continue the process if it was stopped: Slurm sends SIGCONT to all ranks of the step. On other nodes nothing
        else can. It has a limit of its own."""
        if isinstance(self.output, LastWords):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, signal.SIGCONT)
            return
        if not all(self.hello.step.split(".")):
            return
        command, given = ["scancel", "--signal=CONT", self.hello.step], dict(os.environ)
        try:
            done = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, env=given, timeout=_WAKE_SECONDS
            )
            why = f"scancel: status {done.returncode}: {done.stderr.strip()}" if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            why = str(error)
        if why:
            rank = called(self.role, self.rank)
            logger.warning("%s on %s was not continued, if it was stopped: %s", rank, self.node, why)

    def kill(self) -> None:
        """Close the stream, upon which the rank ends within seconds."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as stream:
            stream.shutdown(socket.SHUT_RDWR)  # unless it hung up first


@cache
def _files() -> OwnThread:
    """Reads the ends of ranks' output: their disk may never answer."""
    return OwnThread("output of ranks")


_beside = memoryview(bytearray(64 << 10))  # all streams share it: it is empty between two turns of the loop


class RankStream:
    """The controller's end of a stream. ``heard`` gets each message, and ``hearing`` is called each time a part of one
    was read whose rest is still to come; a stream that breaks only ends."""

    def __init__(self, connection: Connection, heard: Callable[[Message], None], hearing: Callable[[], None]) -> None:
        self._connection, self._heard, self._hearing = connection, heard, hearing
        self._loop = asyncio.get_running_loop()
        self.hung_up: asyncio.Future[None] = self._loop.create_future()
        self._coming, self._left = wire.Incoming(), deque[memoryview]()
        self._writing, self._awaiting = True, False  # whether the other side may still read; whether we wait for it
        self._file = connection.fileno()
        os.set_blocking(self._file, False)
        self._loop.add_reader(self._file, self._read)

    def send(self, message: Message) -> None:
        """Send after all that is still to be sent. Arrays of the message must not change before it is."""
        if not self._writing:
            return
        if not self._left:
            self._loop.call_soon(self._write)
        self._left.extend(wire.parts(message))

    def close(self) -> None:
        """Close it, whatever is still to be sent."""
        self._hang_up()
        self._connection.close()

    def _write(self) -> None:
        """Write what the stream takes, in a turn of the loop of its own: sending to all ranks must not keep it."""
        if not self._left:
            return
        try:
            wire.write_some(self._file, self._left)
        except BlockingIOError:
            pass
        except OSError:  # what ended the other side is known soon
            self._writing = False
            self._left.clear()
        self._await_room(bool(self._left))

    def _await_room(self, wanted: bool) -> None:
        """Have the loop call `_write` as soon as the stream takes more, or no longer."""
        if wanted and not self._awaiting:
            self._loop.add_writer(self._file, self._write)
        elif self._awaiting and not wanted:
            self._loop.remove_writer(self._file)
        self._awaiting = wanted

    def _read(self) -> None:
        """Read once: an array straight into its memory, and many small messages together."""
        room = self._coming.room
        try:
            count = os.readv(self._file, [room, _beside])
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self._hang_up()
            return
        message = self._coming.filled(min(count, len(room)))
        if message is not None:
            self._heard(message)
        if count > len(room):
            for message in self._coming.fed(_beside[: count - len(room)]):
                self._heard(message)
        if self._coming.inside:
            self._hearing()

    def _hang_up(self) -> None:
        self._writing = False
        self._left.clear()
        if not self.hung_up.done():
            self._loop.remove_reader(self._file)
            self._await_room(False)
            self.hung_up.set_result(None)


_GRACE_SECONDS = 1.0


class Failure:
    """Why the run cannot continue: the first error of any rank, but a killed rank before its peers' errors.

    A rank that dies breaks its peers' collectives, and their errors may arrive before the news of its end.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.known: asyncio.Future[None] = self._loop.create_future()
        self.known.add_done_callback(seen)
        self.rank: int | None = None  # the rank whose process failed, if one did
        self.role = LEARNER  # that rank's role
        self._waits = self._claimed = False

    def claim(self) -> None:
        """Claim the diagnosis of a hang: later reports by others are noise."""
        self._claimed = True

    def report(
        self, error: RLMegatronError, *, at_once: bool, whose: RankProcess | None = None, claimed: bool = False
    ) -> None:
        """Record ``error``, at once or unless a better one arrives within a second."""
        if self._claimed and not claimed:
            logger.info("reported while the run hangs: %s", error)
        elif at_once:
            self._settle(error, whose)
        elif not self._waits:
            self._waits = True
            self._loop.call_later(_GRACE_SECONDS, partial(self._settle, error, whose, late=True))

    def _settle(self, error: RLMegatronError, whose: RankProcess | None, *, late: bool = False) -> None:
        if not self.known.done() and not (late and self._claimed):
            if whose is not None:
                self.role, self.rank = whose.role, whose.rank
            self.known.set_exception(error)


def seen(future: asyncio.Future[Any]) -> None:
    """Retrieve a future's exception, so that asyncio does not warn that nothing did."""
    if not future.cancelled():
        future.exception()


STOP_SECONDS = 30.0
_ALONE = ("generate", "export")  # calls that take long and have no collective
_PASSES = ("score", "backward")


class WorkerHandle:
    """The controller's end of one worker. Calls are answered in the order they were made."""

    def __init__(self, process: RankProcess, failure: Failure, on_signal: Callable[[str], None] | None) -> None:
        self.process, self.role, self.rank = process, process.role, process.rank
        self._failure, self._on_signal = failure, on_signal
        self.who = f"{called(self.role, self.rank)} ({process.where})"
        self.ready = False  # whether it serves calls
        self.quiet = self.still = 0  # seconds since its last message, since its last progress
        self.doing, self.beats = "its start", 0
        self.pass_seconds, self.peak = 0.0, 0  # passes since `SlowestRank` read them; the most bytes that it held
        self.times = RankTimes(f"{called(self.role, self.rank)} ({process.node})")
        self._calls: list[str] = []  # the calls of _waiting
        self._closing = self._raised = False
        self._loop = asyncio.get_running_loop()
        self._waiting: list[asyncio.Future[Any]] = []
        self._stream = RankStream(process.connection, self._heard, self._hearing)
        self._saying: asyncio.Task[None] | None = None
        self._stream.hung_up.add_done_callback(self._gone)

    def send(self, name: str, message: wire.Message) -> asyncio.Future[Any]:
        """Send the call ``name``, which is packed: many ranks may get one message. A failed worker never answers, but
        ``Failure`` has its error."""
        self._closing = self._closing or name == "close"
        answer = self._loop.create_future()
        self._waiting.append(answer)
        self._calls.append(name)
        self.times.asked(name)
        self._stream.send(message)
        return answer

    @property
    def asked(self) -> str | None:
        """The call that it has not answered yet, if any."""
        return self._calls[0] if self._calls and self.ready else None

    @property
    def alone(self) -> list[asyncio.Future[Any]]:
        """The answers to come of calls that ranks make without each other."""
        return [answer for name, answer in zip(self._calls, self._waiting, strict=True) if name in _ALONE]

    def tick(self) -> None:
        """Count one second."""
        self.quiet += 1
        self.still += self.asked is not None

    def dump(self) -> None:
        """Have it write its stacks, whatever it is doing."""
        self._stream.send(STACKS)

    def _hearing(self) -> None:
        """Count the rank as alive while a large answer arrives, behind which its heartbeats wait."""
        self.quiet = self.still = 0

    def _heard(self, message: wire.Message) -> None:
        try:
            self._answer(*wire.unpack(message))
        except Exception as error:  # noqa: BLE001  in a callback it would only be logged, and the rank waited for
            self._raised = True
            self._failure.report(WorkerDied(f"{self.who}: its message cannot be read: {error!r}"), at_once=True)

    def _answer(self, status: str, value: Any, timed: RankTimed | None = None) -> None:
        self.quiet = 0
        if status == "alive":
            self.doing, beats = value
            self.still = self.still if beats == self.beats else 0
            self.beats = beats
            return
        if status == "signal" and self._on_signal is not None:
            self._on_signal(value)
        elif status == "ok":
            self.ready, self.still = True, 0
            call = self._calls.pop(0)
            self.times.answered(timed)
            if timed is not None:
                self.peak = timed.peak
                self.pass_seconds += timed.seconds_of(call) if call in _PASSES else 0.0
            answer = self._waiting.pop(0)
            if not answer.done():
                answer.set_result(value)
        elif status == "refused":
            self._raised = True
            self._failure.report(value, at_once=not isinstance(value, SyncError))  # another rank may have died
        elif status == "erred":  # another node would not help, and its peers' errors are noise
            self._raised = True
            self._failure.report(WorkerDied(limits.explained(f"{self.who} raised {value}")), at_once=True)
        else:
            self._raised = True
            self._died(f"raised {value}", at_once=False)

    def _gone(self, _: asyncio.Future[Any]) -> None:
        self._saying = self._loop.create_task(self._say())

    async def _say(self) -> None:
        """Report the end, unless the rank itself said why, or had answered all calls when it was asked to end."""
        how, killed = await self.process.ending()
        if not (self._raised or (self._closing and not self._calls)):
            self._died(how, at_once=killed)

    def _died(self, what: str, *, at_once: bool) -> None:
        self._failure.report(WorkerDied(limits.explained(f"{self.who} {what}")), at_once=at_once, whose=self.process)

    async def stop(self) -> None:
        """Let the process finish, then kill it, each with a time limit."""
        hung_up = self._stream.hung_up
        if not (await asyncio.wait({hung_up}, timeout=STOP_SECONDS))[0]:
            self.process.kill()
            await asyncio.wait({hung_up}, timeout=STOP_SECONDS)
        hung_up.remove_done_callback(self._gone)
        if self._saying is not None:
            self._saying.cancel()
        self._stream.close()
