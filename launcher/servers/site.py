"""The sites of servers: the nodes where each runs, and what starts it there."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from launcher.processes.guards import Guard, Order, any_port, held_ports, start_guard

StartAt = Callable[[int, Order], Awaitable[Guard]]  # starts a server, given its number, at a site elsewhere


HERE = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A node of one server, and what starts it there; ``before`` precedes its guard's command."""

    host: str = HERE
    before: tuple[str, ...] = ()
    python: str = sys.executable  # the guard's; of its container, if it runs in one
    start: Callable[[Order], Awaitable[Guard]] = start_guard
    number: int = 0  # the server's, of the ``count`` servers of the run
    count: int = 1
    node: str = "here"  # as the scheduler calls it
    gpus: tuple[int, ...] = ()  # the server's there, by number among those that the node shows the run
    shared: bool = False  # whether ranks may have these too

    @property
    def away(self) -> bool:
        """Whether it is, or may be, on another node, without access to this node's memory."""
        return self.host != HERE

    @contextlib.contextmanager
    def ports(self) -> Iterator[int]:
        """The first of a server's ports: held if it is here, else ports that are rarely in use."""
        if self.away:
            yield any_port(self.number, self.count)
            return
        with held_ports(self.host) as port:
            yield port


Sites = Sequence[Site]
"""The nodes of one server, the first of which answers requests."""


def elsewhere(found: Sequence[Sites]) -> bool:
    """Whether any server is on another node, without access to this node's memory."""
    return any(site.away for sites in found for site in sites)


class GpuTurns:
    """Servers of one GPU start one after the other: an engine that measures the memory that is left for its cache takes
    all that is allocated meanwhile for its own."""

    def __init__(self) -> None:
        self._gpus: defaultdict[tuple[str, int], asyncio.Lock] = defaultdict(asyncio.Lock)

    @contextlib.asynccontextmanager
    async def on(self, sites: Sites) -> AsyncIterator[None]:
        """Entered once no other server starts on a GPU of the sites."""
        async with contextlib.AsyncExitStack() as stack:
            for gpu in sorted({(site.node, gpu) for site in sites for gpu in site.gpus}):  # one order, no deadlock
                await stack.enter_async_context(self._gpus[gpu])
            yield
