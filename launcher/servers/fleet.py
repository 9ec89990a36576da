"""The engine servers of a running job: has each supervised, and lets servers join and leave (``rl-megatron engines``).

A server joins as a restarted one comes back: it starts, is checked, gets the served weights, and serves once these are
verified. One that leaves gets no more requests or weights; its requests go on elsewhere, and its processes are ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from launcher.servers.site import MoreSites, Sites
from launcher.servers.supervisor import Failed, Standing, Supervisor
from launcher.wire.greetings import this_node
from rl_megatron.errors import ConfigError, EngineError, RLMegatronError
from rl_megatron.rollout.servers.replicas import Event, Health, Replica

logger = logging.getLogger(__name__)

_LONGEST_REASON = 500  # characters: one line of the control socket has the rows of all servers
_LONGEST_ERRORS = 20_000  # characters, of all servers that did not join
ServerRow = dict[str, Any]
"""What is said of a server: its number, state, nodes, weight version, running completions, restarts, and the first line
of why it died last.
"""


class Fleet:
    """The replicas of one engine. ``start`` returns a ready and checked server for a number of ``sites``."""

    def __init__(
        self,
        *,
        supervisor: Supervisor,
        start: Callable[[int], Awaitable[Standing]],
        sites: dict[int, Sites],
        more_sites: MoreSites,
    ) -> None:
        self._supervisor, self._engine, self._section = supervisor, supervisor.engine, supervisor.section
        self._start, self._sites, self._more_sites = start, sites, more_sites
        self._replicas = self._engine.replicas
        self._starting: set[int] = set()  # numbers of servers that join
        self._vacant: list[Sites] = []
        self._keeping: dict[Replica, asyncio.Task[None]] = {}
        self._placing = asyncio.Lock()  # held while places are given or taken back

    @contextlib.asynccontextmanager
    async def watched(self, standing: Sequence[Standing]) -> AsyncIterator[None]:
        """Supervise the replicas, which ``standing`` are, and those that join."""
        for replica, one in zip(self._replicas.all, standing, strict=True):
            self._keep(replica, one)
        try:
            yield
        finally:
            for task in (keeping := list(self._keeping.values())):
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)

    def _keep(self, replica: Replica, standing: Standing) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._replicas.fail(error)

        if isinstance(standing, Failed):
            replica.apply(Event.DIED, standing.why)
        task = self._keeping[replica] = asyncio.create_task(self._supervisor.keep(replica, standing))
        task.add_done_callback(ended)

    async def answer(self, arguments: Mapping[str, Any]) -> list[ServerRow]:
        """Answer a request for ``action`` list, add (``count``, ``node``) or drop (``number``, ``drain``).

        Returns all servers, and once what was asked is done. Raises ConfigError or EngineError.
        """
        match arguments.get("action"):
            case "list":
                pass
            case "add":
                node = arguments.get("node")
                await self.add(int(arguments.get("count", 1)), None if node is None else str(node))
            case "drop":
                await self.drop(int(arguments["number"]), drain=bool(arguments.get("drain")))
            case other:
                raise ConfigError(f"engines: action {other!r} is not known; allowed: list, add, drop")
        return self.rows()

    def rows(self) -> list[ServerRow]:
        """All servers, in the order of their numbers."""
        version = self._engine.weights.version
        rows = [
            self._row(
                replica.number,
                state=replica.health.value,
                version=version if replica.health is Health.HEALTHY else None,
                completions=replica.server.in_flight,
                restarts=replica.restarts,
                reason=replica.reason.partition("\n")[0][:_LONGEST_REASON],
            )
            for replica in self._replicas.all
        ]
        return sorted([*rows, *(self._row(number, state="starting") for number in self._starting)], key=_number)

    def _row(self, number: int, *, state: str, **more: object) -> ServerRow:
        nodes = dict.fromkeys(site.node for site in self._sites.get(number, ()))
        row: ServerRow = {"version": None, "completions": 0, "restarts": 0, "reason": "", **more}
        return {"number": number, "state": state, "nodes": [this_node() if n == "here" else n for n in nodes], **row}

    async def drop(self, number: int, *, drain: bool = False) -> None:
        """Have a server leave. With ``drain`` it ends its running requests, else they go on elsewhere.

        Waits for a push that is under way. Raises ConfigError if too few would be left.
        """
        await self._engine.weights.settled()
        replica = self._find(number)
        self._refuse_too_few(replica)
        await self._engine.part_with(replica, drain=drain)
        if replica in self._keeping:
            _cancel(self._keeping[replica])  # at once: nothing may restart it while others get their places
        async with self._placing:
            if replica in self._keeping:  # else its place has been given to another
                await self._end(replica)
        logger.info("replica %d has left", number)

    def _find(self, number: int) -> Replica:
        for replica in self._replicas.all:
            if replica.number == number and replica.health is not Health.LEAVING:
                return replica
        there = ", ".join(str(r.number) for r in self._replicas.all if r.health is not Health.LEAVING)
        why = "it still starts, and can be dropped once it serves" if number in self._starting else f"there are {there}"
        raise ConfigError(f"server {number}: {why}")

    def _refuse_too_few(self, replica: Replica) -> None:
        left = [one for one in self._replicas.left() if one is not replica]
        serving = [one for one in self._replicas.healthy() if one is not replica]
        least = self._section.least_replicas
        if replica.health is Health.GONE or (serving and len(left) >= least):
            return
        raise ConfigError(
            f"server {replica.number} stays: without it {len(serving)} would serve and {len(left)} be left; one must "
            f"serve, and rollout.server.least_replicas={least} be left; add another first"
        )

    async def _end(self, replica: Replica) -> None:
        """End a replica's server, and forget it."""
        task = self._keeping.pop(replica)
        _cancel(task)
        try:
            await asyncio.gather(task, return_exceptions=True)
            if standing := self._supervisor.standing.pop(replica, None):
                await standing.end()
        finally:
            self._replicas.remove(replica)
            if sites := self._sites.pop(replica.number, None):
                self._vacant.append(sites)
            await replica.server.close()

    async def add(self, count: int, node: str | None = None) -> None:
        """Start servers, on ``node`` if given; returns once they serve.

        Raises ConfigError if there is no place for them, EngineError if some do not start, with each one's cause.
        """
        self._refuse_more(count)
        numbers: list[int] = []
        async with self._placing:
            try:
                while len(numbers) < count:
                    numbers.append(await self._place(node))
            except BaseException:
                for number in numbers:
                    self._give_back(number)
                raise
        results = await asyncio.gather(*map(self._join, numbers), return_exceptions=True)
        failed = {number: error for number, error in zip(numbers, results, strict=True) if error is not None}
        for number, error in failed.items():
            if not isinstance(error, Exception) or count == 1:
                raise error
            if not isinstance(error, RLMegatronError):
                logger.error("server %d did not join", number, exc_info=error)
        if failed:
            room, joined = _LONGEST_ERRORS // len(failed), [str(n) for n in numbers if n not in failed]
            causes = "".join(f"\nserver {number}: {_shortened(error, room)}" for number, error in failed.items())
            serving = f"; {', '.join(joined)} did" if joined else ""
            raise EngineError(f"{len(failed)} of {count} servers did not join{serving}:{causes}")

    def _refuse_more(self, count: int) -> None:
        if count < 1:
            raise ConfigError(f"{count} servers cannot be added; give 1 or more")
        if self._section.addresses:
            raise ConfigError("this run uses servers by rollout.server.addresses, and starts none itself")
        if self._section.colocated:
            raise ConfigError(
                "rollout.server.colocated=true: the learner waits for no server that joins before it takes the GPUs; "
                "servers can join where they have GPUs of their own"
            )

    async def _place(self, node: str | None) -> int:
        """The number of a new server, with its sites: those of one that is gone first."""
        gone = [one for one in self._replicas.all if one.health is Health.GONE and one in self._keeping]
        vacant = [*self._vacant, *(self._sites[one.number] for one in gone)]
        living = [sites for sites in self._sites.values() if not any(sites is one for one in vacant)]
        sites = await self._more_sites(node, living, vacant)
        for one in gone:
            if self._sites[one.number] is sites:
                await self._end(one)
        self._vacant = [one for one in self._vacant if one is not sites]
        number = self._replicas.next_number()
        self._sites[number] = sites
        self._starting.add(number)
        return number

    def _give_back(self, number: int) -> None:
        """Free the place of a server that does not start."""
        self._starting.discard(number)
        self._vacant.append(self._sites.pop(number))

    async def _join(self, number: int) -> None:
        """Start a server, and wait until it serves."""
        try:
            standing = await self._start(number)
        except BaseException:
            self._give_back(number)
            raise
        self._starting.discard(number)
        replica = self._replicas.add(standing.server, number)
        self._keep(replica, standing)
        logger.info("replica %d has joined, on %s", number, ", ".join(self._row(number, state="")["nodes"]))

        def settled() -> list[Replica]:
            return [] if replica.health is Health.STALE else [replica]

        await self._replicas.some(settled)
        if replica.health is not Health.HEALTHY:
            raise EngineError(f"server {number} started, but {replica.reason}; it is restarted as others are")


def _shortened(error: BaseException, room: int) -> str:
    """What it says, without the middle of what is longer than ``room`` characters."""
    text = str(error) if isinstance(error, RLMegatronError) else f"{type(error).__name__}: {error}"
    return text if len(text) <= room else f"{text[: room // 2]}\n[...]\n{text[-room // 2 :]}"


def _cancel(task: asyncio.Task[None]) -> None:
    """Cancel a task once: a second time would cut short how it ends."""
    if not task.cancelling():
        task.cancel()


def _number(row: ServerRow) -> int:
    number: int = row["number"]
    return number
