"""The replicas of an engine: their servers, and the health of each:

    HEALTHY -> DEAD -> RESTARTING -> STALE -> HEALTHY

Only a healthy replica serves. A stale one answers, but it is not verified that it holds the served weights: its server
was restarted, or answers again. The supervisor (launcher/servers/supervisor.py) changes states. The engine waits for
them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

from rl_megatron.engines.http import AttemptFailed, Server
from rl_megatron.errors import EngineError

logger = logging.getLogger(__name__)
T = TypeVar("T")

HEALTH_SECONDS = 60.0
"""The time limit to answer one of three health checks or to sample a token. A server that exceeds it is dead."""
_END_SECONDS = 90.0  # limit for a dead server's processes; guards, and Ray's actors, kill them after 10 to 40


class Health(Enum):
    """The health of a replica."""

    STALE = "stale"
    HEALTHY = "healthy"
    DEAD = "dead"
    RESTARTING = "restarting"
    GONE = "gone"  # dead without a restart


class Event(Enum):
    """An event that changes a replica's state."""

    REFITTED = "holds the weights that are served"
    DIED = "died"
    RESTARTED = "is started again"
    ANSWERED = "answers"
    GIVEN_UP = "is given up"


TRANSITIONS: Mapping[tuple[Health, Event], Health] = {
    (Health.STALE, Event.REFITTED): Health.HEALTHY,
    (Health.STALE, Event.DIED): Health.DEAD,
    (Health.HEALTHY, Event.REFITTED): Health.HEALTHY,  # refitted with the next version
    (Health.HEALTHY, Event.DIED): Health.DEAD,
    (Health.DEAD, Event.RESTARTED): Health.RESTARTING,
    (Health.DEAD, Event.GIVEN_UP): Health.GONE,
    (Health.RESTARTING, Event.ANSWERED): Health.STALE,
    (Health.RESTARTING, Event.DIED): Health.DEAD,
}
PRESENT = frozenset({Health.STALE, Health.HEALTHY})


def next_health(health: Health, event: Event) -> Health:
    """Returns the health after ``event``. Raises ValueError for an event that cannot happen in ``health``."""
    if (health, event) not in TRANSITIONS:
        raise ValueError(f"a replica that is {health.value} cannot become one that {event.value}")
    return TRANSITIONS[health, event]


class ReplicaDied(AttemptFailed):
    """The server died while it handled a request."""


class Replica:
    """One place for a server and its current server, which a restart replaces."""

    def __init__(self, number: int, server: Server, changed: Callable[[], None]) -> None:
        self.number, self.server, self._changed = number, server, changed
        self.title = f"replica {number}"
        self.health = Health.STALE
        self.reason = ""  # reason of its last death
        self.restarts = 0
        self.ended = set[Server]()  # its servers that died
        self.forgiven, self.forgiven_ended = 0, set[Server]()  # restarts and deaths that do not count for the limit
        self.supervised = False  # a supervisor restarts it
        self.ending: float | None = None  # loop's time at which the end of its dead server's processes began
        self.suspicion: Exception | None = None
        self.suspected = asyncio.Event()
        self._down = asyncio.Event()

    def apply(self, event: Event, reason: str = "") -> None:
        """Changes the state, logs it, and wakes all waiters."""
        before, self.health = self.health, next_health(self.health, event)
        if event is Event.DIED:
            self.reason = reason
            self.ended.add(self.server)
            self._down.set()
        if event is Event.ANSWERED:
            self._down, self.suspected, self.suspicion = asyncio.Event(), asyncio.Event(), None
        if self.health is not before:
            level = logging.WARNING if event in (Event.DIED, Event.GIVEN_UP) else logging.INFO
            text = f"{self.reason}\n" if event is Event.DIED else ""
            logger.log(level, "%s: %s%s -> %s", self.title, text, before.value.upper(), self.health.value.upper())
        self._changed()

    async def end(self, server: Awaitable[None]) -> None:
        """Waits until the processes of its dead server have ended. Until then they may hold memory."""
        self.ending = asyncio.get_running_loop().time()
        await server
        self.ending = None
        self._changed()

    def forgive(self) -> None:
        """Counts only later restarts for their limit."""
        self.forgiven, self.forgiven_ended = self.restarts, set(self.ended)

    def suspect(self, error: Exception) -> None:
        """Reports to the supervisor that the server did not answer."""
        if not self.suspected.is_set():
            self.suspicion = error
            self.suspected.set()

    def trust(self) -> None:
        """Withdraws the suspicion, because the server answers."""
        self.suspected.clear()
        self.suspicion = None
        self._changed()

    async def cancel_on_death(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of ``work``. Raises ReplicaDied as soon as the server is known to be dead."""
        task, down = asyncio.ensure_future(work), asyncio.ensure_future(self._down.wait())
        try:
            await asyncio.wait({task, down}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ReplicaDied(f"{self.server.url} died: {self.reason}")
        finally:
            task.cancel()
            down.cancel()
            await asyncio.wait({task, down})  # the request ends before the server's connections are closed


class ReplicaSet:
    """All replicas of an engine, with waits for some of them. The engine fails once all are gone."""

    def __init__(self, name: str, servers: Sequence[Server]) -> None:
        self._name = name
        self._failure: BaseException | None = None
        self._turn = asyncio.Event()
        self.all = tuple(Replica(number, server, self.wake) for number, server in enumerate(servers))

    def wake(self) -> None:
        """Wakes all waiters, which then check the replicas again."""
        turn, self._turn = self._turn, asyncio.Event()
        turn.set()

    def fail(self, error: BaseException) -> None:
        """Reports that the supervisor of the replicas has failed."""
        self._failure = error
        self.wake()

    def present(self) -> list[Replica]:
        """Returns the replicas that answer."""
        return [r for r in self.all if r.health in PRESENT]

    def healthy(self) -> list[Replica]:
        """Returns the replicas that may serve."""
        return [r for r in self.all if r.health is Health.HEALTHY]

    def survivors(self) -> list[Replica]:
        """Returns the replicas that serve, or may serve again."""
        return [r for r in self.all if r.health is not Health.GONE]

    async def wait_for_healthy(self, wanted: Callable[[], list[Replica]]) -> list[Replica]:
        """Waits until ``wanted`` returns replicas. Raises EngineError, with each one's reason, if none is left.

        The wait ends because every start has a time limit and the number of starts is limited.
        """
        while True:
            if not self.survivors():
                ends = dict.fromkeys(r.reason for r in self.all)
                raise EngineError("\n".join([f"no {self._name} server is left:", *ends]))
            if found := wanted():
                return found
            await self.change()

    def all_have_memory(self) -> bool:
        """True if all replicas that answer have their memory."""
        return not any(replica.server.released for replica in self.present())

    async def change(self) -> None:
        """Waits until a replica changes. Raises the error of a failed supervisor."""
        if self._failure is not None:
            raise self._failure
        await self._turn.wait()

    async def wait_for_suspects(self) -> None:
        """Waits until supervisors have found whether the suspected servers are alive.

        That takes at most `HEALTH_SECONDS`. Raises the error of a failed supervisor.
        """
        while any(r.supervised and r.suspected.is_set() and r.server not in r.ended for r in self.all):
            await self.change()

    async def wait_until_idle(self) -> None:
        """Waits until no server is being restarted, and all processes of dead servers have ended.

        Raises EngineError if an end takes longer than a minute and a half, and the error of a failed supervisor.
        """
        while any(r.ending is not None or r.health is Health.RESTARTING for r in self.all):
            if self._failure is not None:
                raise self._failure
            ending = [r for r in self.all if r.ending is not None]
            since = [r.ending for r in ending if r.ending is not None]
            try:
                async with asyncio.timeout_at(min(since) + _END_SECONDS if since else None):
                    await self._turn.wait()
            except TimeoutError as error:
                said = "\n  ".join(f"{r.title} at {r.server.url}: {r.reason}" for r in ending)
                raise EngineError(
                    f"a server that died has not ended in {_END_SECONDS:g} s, so the learner cannot take its GPUs; end "
                    f"its processes there, then start the run again:\n  {said}"
                ) from error
