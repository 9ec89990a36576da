"""The controller's interface to a rank's process, which each kind of host implements."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol


class RankProcess(Protocol):
    """One rank's process and the stream to it."""

    role: str
    rank: int
    node: str
    pid: int
    where: str  # its name in messages: "pid 12", "pid 12 on node2"
    connection: Connection

    def over(self, hung_up: asyncio.Future[None]) -> asyncio.Future[Any]:
        """Done once it has ended. ``hung_up`` is done once its stream has ended."""
        ...

    async def ending(self) -> Ending:
        """How it ended, once `over` is done."""
        ...

    async def wake(self) -> None:
        """Continue the process if it was stopped. It has a limit of its own."""
        ...

    def kill(self) -> None:
        """Kill it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a process ended: ``expected`` on request; ``killed`` if its peers' errors are consequences."""

    how: str
    expected: bool
    killed: bool
