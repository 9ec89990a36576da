"""Asks servers how busy they are, for the timeline: requests that run and wait, the share of the cache in use, tokens a
second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from itertools import count

from rl_megatron.errors import EngineError
from rl_megatron.observability.timeline import spans
from rl_megatron.observability.timeline.spans import Lane
from rl_megatron.rollout.servers.adapter import Sampling
from rl_megatron.rollout.servers.http import AttemptFailed, Server
from rl_megatron.rollout.servers.replicas import Replica, ReplicaSet

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 2.0
"""Between two questions, whatever the number of servers."""
_LIMIT_SECONDS = 1.0


class GaugesInTurn:
    """Asks one server every ``seconds``, each in its turn: what that costs does not grow with their number.

    A server that does not answer in a second, or with an error, is asked again in its next turn: its supervisor finds
    whether it works.
    """

    def __init__(self, adapter: Sampling, replicas: ReplicaSet, seconds: float = PERIOD_SECONDS) -> None:
        self._adapter, self._replicas, self._seconds = adapter, replicas, seconds
        self._lanes: dict[int, Lane] = {}
        self._made: dict[Server, tuple[float, int]] = {}  # tokens, and when they were counted, by the servers that are

    @contextlib.asynccontextmanager
    async def asked(self) -> AsyncIterator[None]:
        """Ask servers while the context lasts. If an answer cannot be read, it warns and asks no more."""
        task = asyncio.create_task(self._ask_in_turn())
        try:
            yield
        finally:
            task.cancel()
            (ended,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(ended, Exception):
                logger.warning("the timeline has no load of servers: %r", ended, exc_info=ended)

    async def _ask_in_turn(self) -> None:
        for turn in count():
            await asyncio.sleep(self._seconds)
            present = self._replicas.present()
            if not present:
                continue
            replica = present[turn % len(present)]
            try:
                async with asyncio.timeout(_LIMIT_SECONDS):
                    await self._ask(replica)
            except (TimeoutError, AttemptFailed, EngineError):
                continue
            except (ValueError, LookupError, TypeError) as error:
                logger.warning("the timeline has no load of servers: %s: %r", replica.server.url, error)
                return

    async def _ask(self, replica: Replica) -> None:
        server = replica.server
        found = await self._adapter.gauges(server)
        if found is None:
            return
        lane = self._lanes.setdefault(replica.number, Lane(replica.title, ""))
        spans.gauge(lane, "requests", running=found.running, waiting=found.waiting)
        if found.cache is not None:
            spans.gauge(lane, "cache", share=round(found.cache, 4))
        now, speed = spans.now(), found.tokens_per_second
        if speed is None and found.tokens is not None:
            before = self._made.get(server)
            present = {replica.server for replica in self._replicas.present()}
            self._made = {each: made for each, made in self._made.items() if each in present}
            self._made[server] = found.tokens, now
            speed = None if before is None else (found.tokens - before[0]) / ((now - before[1]) / 1e9)
        if speed is not None:
            spans.gauge(lane, "tokens", per_second=round(speed, 1))
