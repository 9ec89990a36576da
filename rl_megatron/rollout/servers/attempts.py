"""Sends a request to one replica, and retries it on others until it is answered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid

from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.errors import EngineError
from rl_megatron.rollout.servers.adapter import Adapter, ForeignWeights
from rl_megatron.rollout.servers.answers import problem_of
from rl_megatron.rollout.servers.http import AttemptFailed, Server
from rl_megatron.rollout.servers.replicas import Replica, ReplicaDied, ReplicaSet
from rl_megatron.types import Completion, GenerationRequest

logger = logging.getLogger(__name__)


class Attempts:
    """Retries failed requests a few times; a request whose replica died goes to another, or waits for one."""

    def __init__(self, adapter: Adapter, replicas: ReplicaSet, section: ServerSection, *, vocab_size: int) -> None:
        self._adapter, self._replicas, self._section = adapter, replicas, section
        self._vocab_size = vocab_size
        self._aborts: set[asyncio.Task[None]] = set()

    async def sampled(self, request: GenerationRequest, only: Replica | None = None) -> list[Completion]:
        """Completions by the least busy replica, or by ``only``. Deaths of replicas do not count as attempts."""
        wait, failed, left = self._section.backoff_seconds, None, self._section.retries
        while True:
            replica = only or await self._least_busy(failed)
            server = replica.server
            name = f"{request.id} {uuid.uuid4().hex}"
            try:
                with server.busy():
                    completions = await replica.while_alive(self._adapter.generate(server, request, name))
                for completion in completions:
                    if problem := problem_of(completion, request, vocab_size=self._vocab_size):
                        raise AttemptFailed(f"{server.url}: {problem}")
                return completions
            except asyncio.CancelledError:
                self._abort(server, request, name)
                raise
            except ReplicaDied as error:
                if only is not None:
                    raise
                logger.warning("request %r is sent again: %s", request.id, error)
                continue
            except (AttemptFailed, ForeignWeights) as error:
                replica.suspect(error)
                if not left or (isinstance(error, ForeignWeights) and not replica.supervised):
                    tries = self._section.retries + 1 - left
                    raise EngineError(f"request {request.id!r}: {error}; attempts made: {tries}") from error
                logger.warning("request %r: %s; retrying in %g s", request.id, error, wait)
                failed = replica
            except EngineError as error:
                raise EngineError(f"request {request.id!r}: {error}") from error
            left -= 1
            await asyncio.sleep(wait)
            wait *= 2

    async def _least_busy(self, failed: Replica | None) -> Replica:
        """The least busy healthy replica, not ``failed`` if there is another."""
        healthy = await self._replicas.some(self._replicas.healthy)
        return min(healthy, key=lambda replica: (replica is failed, replica.server.in_flight))

    def _abort(self, server: Server, request: GenerationRequest, name: str) -> None:
        """Have the server abort the request; it may otherwise notice the closed connection only seconds later."""

        async def send() -> None:
            with contextlib.suppress(AttemptFailed, EngineError):  # the server's end ends the request too
                await self._adapter.abort(server, request, name)

        task = asyncio.ensure_future(send())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def close(self) -> None:
        """Wait until servers have got all aborts."""
        await asyncio.gather(*self._aborts)
