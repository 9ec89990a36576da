"""The controller's end of one rank: sends calls, receives answers and heartbeats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from launcher.controller.failure import Failure
from launcher.controller.rank_process import RankProcess
from launcher.controller.rank_stream import RankStream
from launcher.processes import limits
from launcher.wire import messages
from launcher.wire.greetings import Setup
from launcher.wire.messages import STACKS
from rl_megatron.errors import SyncError, WorkerDied
from rl_megatron.observability.timeline.kernels import RankKernels, Recorded
from rl_megatron.observability.timeline.ranks import RankTimed, RankTimes
from rl_megatron.placement.names import called

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
        self.pass_seconds, self.peak = 0.0, 0  # of passes since `SlowestRank` read them; bytes that it held at most
        self._times = RankTimes(f"{called(self.role, self.rank)} ({process.node})")
        self._calls: list[str] = []  # the calls of _waiting
        self._closing = self._raised = False
        self._loop = asyncio.get_running_loop()
        self._waiting: list[asyncio.Future[Any]] = []
        self._stream = RankStream(process.connection, self._heard, self._hearing)
        self._saying: asyncio.Task[None] | None = None
        self._over = process.over(self._stream.hung_up)
        self._over.add_done_callback(self._gone)

    def prepare(self, setup: Setup) -> asyncio.Future[Any]:
        """Send the setup that the worker waits for; the name of its GPU, if any, once it is ready to serve."""
        return self.send("prepare", messages.pack(setup))

    def call(self, name: str, *arguments: Any) -> asyncio.Future[Any]:
        """Call the worker. A failed worker never answers, but ``Failure`` has its error."""
        return self.send(name, messages.pack((name, arguments)))

    def send(self, name: str, message: messages.Message) -> asyncio.Future[Any]:
        """Send the call ``name``, which is packed: many ranks may get one message."""
        self._closing = self._closing or name == "close"
        answer = self._loop.create_future()
        self._waiting.append(answer)
        self._calls.append(name)
        self._times.asked(name)
        self._stream.send(message)
        return answer

    def placed(self, recorded: Recorded) -> RankKernels:
        """A file of its kernels, as the timeline shows them."""
        return self._times.placed(recorded)

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
        """A large answer arrives, and heartbeats wait behind it."""
        self.quiet = self.still = 0

    def _heard(self, message: messages.Message) -> None:
        try:
            self._answer(*messages.unpack(message))
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
            self._times.answered(timed)
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
        try:
            self._stream.drain()
        finally:
            self._saying = self._loop.create_task(self._say())

    async def _say(self) -> None:
        """Report the end, unless the rank itself said why, or was asked to end."""
        ending = await self.process.ending()
        if not (self._raised or (ending.expected and self._closing)):
            self._died(ending.how, at_once=ending.killed)

    def _died(self, what: str, *, at_once: bool) -> None:
        self._failure.report(WorkerDied(limits.explained(f"{self.who} {what}")), at_once=at_once, whose=self.process)

    async def stop(self) -> None:
        """Let the process finish, then kill it, each with a time limit."""
        if not (await asyncio.wait({self._over}, timeout=STOP_SECONDS))[0]:
            self.process.kill()
            await asyncio.wait({self._over}, timeout=STOP_SECONDS)
        self._over.remove_done_callback(self._gone)
        if self._saying is not None:
            self._saying.cancel()
        self._stream.close()
        self._over.cancel()
