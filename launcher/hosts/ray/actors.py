"""The code that runs in Ray's processes on the nodes of a cluster: a rank, or the guard of an engine server.

Each imports this file, so it has none of the controller's imports.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import ray

from launcher.processes.guards import GuardSpec, start_guard
from launcher.wire import Call

_OF_NODE = ("SLURM", "CUDA_VISIBLE_DEVICES")  # variables that differ between the nodes of a job


class RankActor:
    """The actor that a rank runs in."""

    def serve(self, call: Call, number: int, log: str) -> None:
        """Runs rank ``number``; its output goes to the file ``log``."""
        from launcher.worker.process import serve  # imports torch, which a server's actor needs not

        with Path(log).open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        serve(call, number)
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]


class ServerActor:
    """Runs the guard of an engine server. Both end with the actor, because the guard's pipe closes."""

    async def start(self, order: GuardSpec) -> None:
        """Starts guard and server. Raises OSError."""
        given = {name: value for name, value in order.environment.items() if not name.startswith(_OF_NODE)}
        own = {name: value for name, value in os.environ.items() if name.startswith(_OF_NODE)}
        self._guard = await start_guard(replace(order, environment=given | own))

    async def wait(self) -> str:
        """Waits for the end of guard and server, and says how they ended."""
        return await self._guard.wait()

    async def end(self) -> None:
        """Ends the server and its guard."""
        await self._guard.end()
