"""Runs engine servers in a Ray cluster: an actor at each place holds the guard of one server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from typing_extensions import override

from launcher.controller.handle import seen
from launcher.hosts.ray.head import said
from launcher.processes import guards
from launcher.processes.guards import Guard

# isort: split
import ray  # after head, which sets what it reads
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from launcher.hosts.ray.actors import ServerActor

logger = logging.getLogger(__name__)


class ActorGuard(Guard):
    """The guard that an actor holds."""

    def __init__(self, kill: Callable[[Any], Awaitable[None]], actor: Any, log: Path) -> None:
        self._kill, self._actor, self._log = kill, actor, log
        self._over: asyncio.Future[str] = asyncio.wrap_future(actor.wait.remote().future())
        self._over.add_done_callback(seen)

    @override
    async def wait(self) -> str:
        """Returns also when its actor or its node is gone."""
        try:
            return await asyncio.shield(self._over)
        except RayError as error:
            return f"ended with its actor{said(error)}"

    @override
    async def end(self) -> None:
        """Also ends the actor, which frees its place in the cluster."""
        try:
            async with asyncio.timeout(2 * guards.STOP_SECONDS):
                await asyncio.wrap_future(self._actor.end.remote().future())
        except TimeoutError:
            logger.warning("the actor of the server of %s did not end it; killed", self._log)
        except RayError:  # the actor is gone, and its guard's pipe closed
            pass
        await self._kill(self._actor)


def make_server_actor(here: PlacementGroupSchedulingStrategy) -> Any:
    """The actor class, bound to its bundle, all of which it takes."""
    bundle = here.placement_group.bundle_specs[here.placement_group_bundle_index]
    actor: Any = ray.remote(ServerActor)
    return actor.options(num_cpus=1, num_gpus=bundle.get("GPU", 0), scheduling_strategy=here).remote()
