"""Starts the servers of rewards and environments under guards, watches them, and ends them with the run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shlex
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from launcher.processes import restarts
from launcher.processes.guards import Guard, Order
from launcher.processes.last_words import end_of
from launcher.processes.scratch import scratch
from launcher.servers.interpreter import python_path, show_package
from launcher.servers.site import Site
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.services import ServiceSection
from rl_megatron.errors import ServiceError, together
from rl_megatron.rollout.servers.http import Server
from rl_megatron.services import ServiceAddress, Services

logger = logging.getLogger(__name__)

T = TypeVar("T")

_BACKOFF_SECONDS = 1.0  # before the first restart


@dataclass(slots=True, kw_only=True)
class _Replica:
    name: str
    number: int
    section: ServiceSection
    site: Site
    log: Path
    guard: Guard | None = None
    restarts: int = 0  # since it last ran for an hour
    ports: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"service {self.name}, replica {self.number}"

    async def end(self) -> None:
        """End it, if it runs."""
        if self.guard is not None:
            await self.guard.end()
        self.ports.close()


class RunningServices:
    """The services of one run at their ``sites``: for each service one for each replica.

    ``resumes``: they have served this run before, so one that does not come up is started again.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        sites: Mapping[str, Sequence[Site]],
        services: Services,
        *,
        resumes: bool = False,
    ) -> None:
        self._services, self._folder, self._packages = services, folder.resolve(), Path()
        self._resumes = resumes
        self._replicas = [
            _Replica(
                name=name,
                number=number,
                section=config.services[name],
                site=site,
                log=self._folder / f"service_{name}_{number}.log",
            )
            for name, of_name in sites.items()
            for number, site in enumerate(of_name)
        ]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """Start all, and wait until they serve; leaving the context ends them.

        Yields a task that never returns, and raises ServiceError once a service is given up.
        """
        async with contextlib.AsyncExitStack() as stack:
            if self._replicas:
                self._packages = stack.enter_context(scratch(within=self._folder))
                show_package(self._packages)
            stack.push_async_callback(self._end)
            async with together() as starting:
                for one in self._replicas:
                    starting.create_task(self._begin(one))
            watching = asyncio.create_task(self._watch())
            try:
                yield watching
            finally:
                watching.cancel()
                await asyncio.wait([watching])

    async def _end(self) -> None:
        """End all at once: one that heeds no SIGTERM takes ten seconds."""
        await asyncio.gather(*(one.end() for one in self._replicas))

    async def _watch(self) -> None:
        async with together() as group:
            for one in self._replicas:
                group.create_task(self._keep(one))
        await asyncio.Event().wait()  # a run without services

    async def _keep(self, one: _Replica) -> None:
        """Restart a replica each time that it ends. Raises ServiceError after ``restarts`` without an hour between."""
        loop = asyncio.get_running_loop()
        while True:
            assert one.guard is not None
            began = loop.time()
            said = await _ended(one, await one.guard.wait())
            if loop.time() - began >= restarts.CALM_SECONDS:
                one.restarts = 0
            self._services.stopped(one.name, one.number)
            logger.warning("%s", said)
            try:
                await self._restarted(one, ServiceError(said))
            except ServiceError:
                self._services.given_up(one.name, one.number)
                raise

    async def _begin(self, one: _Replica) -> None:
        """Start a replica of the run's beginning. In a resume, where it has served before, also again. Raises as
        `_start`, and in a resume ServiceError."""
        await (self._restarted(one) if self._resumes else self._start(one))

    async def _restarted(self, one: _Replica, ended: ServiceError | None = None) -> None:
        """Start a replica, and again until it serves; ``ended`` says how it did. Raises ServiceError once its restarts
        are used up."""

        async def again() -> None:
            one.restarts += 1

        try:
            await restarts.brought_up(
                partial(self._start, one),
                name=one.title,
                most=one.section.restarts,
                first_wait=_BACKOFF_SECONDS,
                made=lambda: one.restarts,
                again=again,
                failed=partial(logger.warning, "%s"),
                ended=ended,
            )
        except (ServiceError, OSError) as error:
            used = f"services.{one.name}.restarts={one.section.restarts} are used up"
            raise ServiceError(f"{used}: {error}") from error

    async def _start(self, one: _Replica) -> None:
        """Start a replica and wait until it serves. Raises ServiceError with its log's last lines, or OSError."""
        one.ports.close()
        key, site = secrets.token_hex(24), one.site
        port = one.ports.enter_context(site.ports())
        words = [word.format(host=site.host, port=port) for word in shlex.split(one.section.command)]
        own = {"SERVICE_HOST": site.host, "SERVICE_PORT": str(port), "SERVICE_KEY": key}
        own["PYTHONPATH"] = python_path(self._packages)
        one.guard = await site.start(
            Order(
                before=site.before,
                python=site.python,
                host=site.host,
                command=words,
                environment={**os.environ, **own},
                folder=Path.cwd(),
                log=one.log,
            )
        )
        address = ServiceAddress(url=f"http://{site.host}:{port}", key=key)
        await self._healthy(one, one.guard, address)
        self._services.serves(one.name, one.number, address)
        logger.info("%s: serves at %s (%s)", one.title, address.url, site.node)

    async def _healthy(self, one: _Replica, guard: Guard, address: ServiceAddress) -> None:
        server = Server(address.url, token=address.key, timeout_seconds=one.section.start_seconds)
        limit = one.section.start_seconds
        try:
            how = await restarts.until_serving(server, one.section.health, guard.wait(), limit)
        except TimeoutError as error:
            await guard.end()
            raise ServiceError(
                f"{one.title}: {address.url}{one.section.health} answered {error} within "
                f"services.{one.name}.start_seconds={limit:g}; {await _log_of(one)}"
            ) from error
        finally:
            await server.close()
        if how is not None:
            raise ServiceError(await _ended(one, how))


async def unless_given_up(work: Coroutine[Any, Any, T], watching: asyncio.Task[None]) -> T:
    """The result of ``work``, which is cancelled once ``watching`` of `RunningServices.running` raises ServiceError,
    with its text, and may then finish a checkpoint."""
    working, why = asyncio.create_task(work), ""
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            why = str(watching.exception())
            watching.result()  # raises: a watch ends by an error alone
        return working.result()
    finally:
        if not working.done():
            working.cancel(why)
            await asyncio.wait([working])


async def _ended(one: _Replica, how: str) -> str:
    return f"{one.title} ({one.site.node}) {how}; {await _log_of(one)}"


async def _log_of(one: _Replica) -> str:
    return f"{one.log} ends with:{await asyncio.to_thread(end_of, one.log)}"
