"""Watches the engine servers of a run: restarts a server that dies or hangs, and refits it.

It waits for a server to come up, and starts it again if it ended or did not come up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from launcher.processes.guards import Guard, last_lines
from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.engines import replicas
from rl_megatron.engines.adapter import Sampling, UnknownWeights
from rl_megatron.engines.engine import ServerEngine
from rl_megatron.engines.http import (
    AttemptFailed,
    ResponseTimeout,
    Server,
    ServerUnreachable,
    TokenRefused,
    TooManyOpenFiles,
    open_files_error,
)
from rl_megatron.engines.replicas import Event, Health, Replica
from rl_megatron.errors import ConfigError, EngineError, SyncError

logger = logging.getLogger(__name__)

CALM_SECONDS = 3600.0
"""The time after which a running server's earlier restarts no longer count."""
ANSWER_SECONDS = 30.0
"""The limit of one health check of a server that comes up. SGLang's own limit for its answer is 20."""
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 60.0  # seconds before a restart
_LOOK_SECONDS = 0.1


async def wait_until_serving(server: Server, ends: Coroutine[Any, Any, str], seconds: float) -> str | None:
    """Checks the health of ``server`` until it is healthy. If it ends first, returns the text of ``ends``.

    Repeats a request without an answer: a server that has just begun to listen may never answer earlier requests.
    Raises TimeoutError after ``seconds``, with the last answer as its text, for example "status 503".
    """
    ended, heard = asyncio.ensure_future(ends), "nothing"
    try:
        async with asyncio.timeout(seconds):
            while not ended.done():
                status = await server.status("/health", seconds=ANSWER_SECONDS)
                if status == 200:
                    return None
                heard = "nothing" if status is None else f"status {status}"
                await asyncio.wait([ended], timeout=_LOOK_SECONDS)
        return ended.result()
    except TimeoutError as error:
        raise TimeoutError(heard) from error
    finally:
        ended.cancel()


def backoff_seconds(restart: int) -> float:
    """Returns seconds to wait before a restart, from 0; they double from half a second to a minute at most."""
    return min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(restart, 64))


_GRACE_SECONDS = 2.0
_TAIL = 20  # lines of a log in an error
_CHECKS = 3  # failed checks in a row; a suspended job may miss one


class ServerState(Protocol):
    """The server at a replica's site."""

    server: Server
    fatal: tuple[type[Exception], ...]  # exceptions of a request that show that it can no longer serve

    async def wait_for_exit(self) -> str:
        """Waits until it ends by itself, and says how."""
        ...

    async def end(self) -> None:
        """Ends it, and waits until it is gone."""
        ...


@dataclass(slots=True, kw_only=True)
class StartedServer(ServerState):
    """A server that this run started: its address, and for each of its nodes a guard and a log."""

    guards: list[Guard]
    server: Server
    logs: list[Path]
    ports: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # holds them
    fatal: tuple[type[Exception], ...] = (ResponseTimeout, UnknownWeights)

    async def ready(self, seconds: float) -> None:
        """Waits until it answers. Raises EngineError with the end of its log if it ends, or does not in ``seconds``."""
        try:
            how = await wait_until_serving(self.server, self.wait_for_exit(), seconds)
        except TimeoutError as error:
            tail = await asyncio.to_thread(last_lines, self.logs[0], lines=_TAIL)
            raise EngineError(
                f"{self.server.url} is not ready after rollout.server.start_seconds={seconds:g} (/health answered "
                f"{error}); raise it if loading takes longer; {self.logs[0]} ends with:{tail}"
            ) from error
        if how is not None:
            raise EngineError(how)

    @override
    async def wait_for_exit(self) -> str:
        """Says how the first guard ended, with the last lines of its node's log."""
        waiting = [asyncio.ensure_future(guard.wait()) for guard in self.guards]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            node = next(number for number, one in enumerate(waiting) if one.done())
            how, log = waiting[node].result(), self.logs[node]
        finally:
            for one in waiting:
                one.cancel()
        where = f" (node {node} of {len(self.guards)})" if len(self.guards) > 1 else ""
        tail = await asyncio.to_thread(last_lines, log, lines=_TAIL)
        return f"{self.server.url}{where} {how}; {log} ends with:{tail}"

    @override
    async def end(self) -> None:
        """Ends it on all of its nodes concurrently: a node that stayed would hold GPUs and ports."""
        await asyncio.gather(*(guard.end() for guard in self.guards))
        self.ports.close()


@dataclass(slots=True, kw_only=True)
class AttachedServer(ServerState):
    """A server that the user runs. After it was unreachable it may be another one at the same address."""

    server: Server
    fatal: tuple[type[Exception], ...] = (ResponseTimeout, UnknownWeights, ServerUnreachable, TokenRefused)

    @override
    async def wait_for_exit(self) -> str:
        """Never returns: the server's end is not reported."""
        return await _unused_argument()

    @override
    async def end(self) -> None:
        """Does nothing: the user, who started the server, ends it."""


@dataclass(slots=True, kw_only=True)
class FailedServer(ServerState):
    """The state without a server: at a resume's beginning it did not start, or failed its checks, and is gone."""

    server: Server
    reason: str
    fatal: tuple[type[Exception], ...] = ()

    @override
    async def wait_for_exit(self) -> str:
        return self.reason

    @override
    async def end(self) -> None:
        """Does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervisor:
    """Supervises the replicas of ``engine``. ``restart`` returns a ready and checked server after a death.

    ``push_current`` has a stale server at a URL load the served weights. It raises SyncError, ``restart`` EngineError,
    ConfigError or OSError.
    """

    engine: ServerEngine
    section: ServerSection
    restart: Callable[[Replica], Awaitable[ServerState]]
    push_current: Callable[[str], Awaitable[None]]

    @contextlib.asynccontextmanager
    async def watched(self, standing: Sequence[ServerState]) -> AsyncIterator[None]:
        """Supervises the replicas while the context is open; ``standing`` are their servers."""
        keeping = []
        for replica, one in zip(self.engine.replicas.all, standing, strict=True):
            if isinstance(one, FailedServer):
                replica.apply(Event.DIED, one.reason)
            keeping.append(asyncio.create_task(self._keep(replica, one)))
            keeping[-1].add_done_callback(self._report)
        try:
            yield
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)

    def _report(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.engine.replicas.fail(error)

    async def _keep(self, replica: Replica, standing: ServerState) -> None:
        """Supervises one replica until it is given up."""
        replica.supervised, loop = True, asyncio.get_running_loop()
        while True:
            began = loop.time()
            if replica.health is not Health.DEAD:  # a FailedServer starts DEAD
                why = await self._watch(replica, standing)
                if loop.time() - began >= CALM_SECONDS:
                    replica.forgive()
                replica.apply(Event.DIED, why)
            await replica.end(standing.end())
            again = await self._restart(replica)
            if again is None:
                replica.apply(Event.GIVEN_UP)
                if left := self.engine.replicas.survivors():
                    names = ", ".join(str(one.number) for one in left)
                    logger.warning("%s has no restarts left; the run continues with %s", replica.title, names)
                return
            standing = again
            await replica.server.close()
            replica.server = standing.server
            replica.apply(Event.ANSWERED)

    async def _restart(self, replica: Replica) -> ServerState | None:
        """Restarts the server; None after ``rollout.server.restarts`` attempts since it last ran for an hour.

        One attempt for each server that a dropped prompt killed does not count. Raises TooManyOpenFiles, which has
        another cause. A learner that takes turns with it trains first: its GPUs have no room for a start.
        """
        while (count := self.engine.attempt_count(replica)) < self.section.restarts:
            wait = backoff_seconds(count)
            logger.warning("%s: restart %d of %d in %g s", replica.title, count + 1, self.section.restarts, wait)
            await asyncio.sleep(wait)
            await self.engine.weights.wait_for_memory()
            replica.restarts += 1
            replica.apply(Event.RESTARTED)
            try:
                return await self.restart(replica)
            except TooManyOpenFiles:
                raise
            except (ConfigError, EngineError, OSError) as error:
                if isinstance(error, OSError) and (none_left := open_files_error(f"start of {replica.title}", error)):
                    raise none_left from error
                replica.apply(Event.DIED, str(error))
        return None

    async def _watch(self, replica: Replica, standing: ServerState) -> str:
        """Refits and watches the server until it is dead. Returns the cause."""
        reasons = (
            *(standing.wait_for_exit(), self._fails(replica, standing), self._hangs(replica)),
            *(self._is_stalled(replica), self._cannot_serve(replica)),
        )
        tasks = [asyncio.ensure_future(reason) for reason in reasons]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(task.result() for task in tasks if task.done())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)  # otherwise an ending request opens a connection that nothing closes

    async def _fails(self, replica: Replica, standing: ServerState) -> str:
        """Waits until a request fails fatally, or one fails and the server then does not answer a health check."""
        while True:
            await replica.suspected.wait()
            error = replica.suspicion
            if isinstance(error, standing.fatal):
                return str(error)
            server = replica.server
            period = _period()
            status = await server.health(seconds=period)
            if not (status or await _Meter(self.engine.adapter, server).moves(period)):
                await asyncio.sleep(_GRACE_SECONDS)  # an ended server's exit status and log say more
                return f"{error}; it also did not answer a health check within {period:g} s"
            replica.trust()

    async def _hangs(self, replica: Replica) -> str:
        """Waits until several health checks in a row fail while it generates no tokens. Any answer is enough while it
        is paused for new weights."""
        loop, missed, meter = asyncio.get_running_loop(), 0, _Meter(self.engine.adapter, replica.server)
        period = _period()
        while missed < _CHECKS:
            began = loop.time()
            status, moves = await asyncio.gather(replica.server.health(seconds=period), meter.moves(period))
            paused = self.engine.weights.updating or replica.health is not Health.HEALTHY
            well = status is not None and (status < 300 or paused)
            if well and moves is None and not paused:
                well = await self._ping_all(replica)
            missed = 0 if well or moves else missed + 1
            await asyncio.sleep(max(0.0, began + period - loop.time()))
        return (
            f"{replica.server.url} failed {_CHECKS} health checks in {replicas.HEALTH_SECONDS:g} s: it hangs or was "
            "stopped"
        )

    async def _ping_all(self, replica: Replica) -> bool:
        """True if every rank of an idle server answers, also those on its other nodes."""
        try:
            async with asyncio.timeout(_period()):
                await self.engine.adapter.ping(replica.server)
        except TooManyOpenFiles:
            raise
        except (TimeoutError, AttemptFailed, EngineError):
            return self.engine.weights.updating  # a push began meanwhile
        return True

    async def _is_stalled(self, replica: Replica) -> str:
        """Waits until it generates no token for its requests in several checks, even if it reports healthy."""
        limit, loop, still = self.section.timeout_seconds, asyncio.get_running_loop(), 0
        period, meter = limit / _CHECKS, _Meter(self.engine.adapter, replica.server)
        while still < _CHECKS:
            began = loop.time()
            still = still + 1 if await meter.moves(period) is False else 0
            await asyncio.sleep(max(0.0, began + period - loop.time()))
        return (
            f"{replica.server.url} generated no token in rollout.server.timeout_seconds={limit:g}, although "
            f"{replica.server.in_flight} completions wait for tokens"
        )

    async def _cannot_serve(self, replica: Replica) -> str:
        """Waits until it cannot be refitted with the served weights. Raises TooManyOpenFiles, which has another
        cause."""
        if replica.health is Health.STALE:
            try:
                async with self.engine.weights.refitting:
                    await self.push_current(replica.server.url)
            except TooManyOpenFiles:
                raise
            except (AttemptFailed, EngineError, SyncError) as error:
                return f"{replica.server.url} cannot load the weights: {error}"
        return await _unused_argument()


class _Meter:
    """Measures whether a server makes tokens, from one call to the next."""

    def __init__(self, adapter: Sampling, server: Server) -> None:
        self._adapter, self._server = adapter, server
        self._before: Hashable = None

    async def moves(self, seconds: float) -> bool | None:
        """True if it generated tokens since the last call, or at the first count. None if paused or without requests.

        False if it does not answer in ``seconds``. Raises TooManyOpenFiles, which has another cause.
        """
        if self._server.paused or not self._server.in_flight:
            self._before = None
            return None
        try:
            async with asyncio.timeout(seconds):
                made = await self._adapter.tokens(self._server)
        except TooManyOpenFiles:
            raise
        except (TimeoutError, AttemptFailed, EngineError):
            return False
        before, self._before = self._before, made
        return made != before


def _period() -> float:
    return replicas.HEALTH_SECONDS / _CHECKS


async def _unused_argument() -> str:
    await asyncio.Event().wait()
    raise AssertionError
