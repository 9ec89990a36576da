"""Starts a server again that ended or did not come up: of a run's engines and of its services."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rl_megatron.errors import ConfigError, EngineError, ServiceError
from rl_megatron.rollout.servers.http import OutOfFiles, out_of_files

logger = logging.getLogger(__name__)
T = TypeVar("T")

CALM_SECONDS = 3600.0
"""Of a server that ran for so long the restarts before count no more."""
_MOST_SECONDS = 60.0


async def brought_up(
    start: Callable[[], Awaitable[T]],
    *,
    name: str,
    most: int,
    first_wait: float,
    made: Callable[[], int],
    again: Callable[[], Awaitable[None]],
    failed: Callable[[Exception], None],
    ended: Exception | None = None,
) -> T:
    """What ``start`` returns once it does not fail. While fewer than ``most`` restarts are ``made``, it is called again
    after the seconds of `wait_before` from ``first_wait``; the log says each wait for the server called ``name``.

    ``ended``: how a server ended that has served, whose first start is a restart. ``failed`` gets each failure of a
    start, and ``again`` is awaited before each restart, which it counts. Raises the last failure, and OutOfFiles at
    once, of which the server is not the cause.
    """
    while True:
        if ended is None:
            try:
                return await start()
            except OutOfFiles:
                raise
            except (ConfigError, EngineError, ServiceError, OSError) as error:
                if isinstance(error, OSError) and (none_left := out_of_files(f"start of {name}", error)):
                    raise none_left from error
                failed(error)
                ended = error
        if (count := made()) >= most:
            raise ended
        wait = wait_before(count, first_wait)
        logger.warning("%s: restart %d of %d in %g s", name, count + 1, most, wait)
        await asyncio.sleep(wait)
        await again()
        ended = None


def wait_before(restart: int, first: float) -> float:
    """Seconds to wait before a restart, from 0; they double from ``first`` to a minute at most."""
    return min(_MOST_SECONDS, first * 2.0 ** min(restart, 64))
