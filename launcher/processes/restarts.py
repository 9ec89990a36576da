"""Waits for a server to come up, and starts it again if it ended or did not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from rl_megatron.engines.http import OutOfFiles, Server, out_of_files
from rl_megatron.errors import ConfigError, EngineError

logger = logging.getLogger(__name__)
T = TypeVar("T")

CALM_SECONDS = 3600.0
"""Of a server that ran for so long the restarts before count no more."""
ANSWER_SECONDS = 30.0
"""Of one look at the health of a server that comes up. SGLang's own limit for its answer is 20."""
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 60.0  # seconds before a restart
_LOOK_SECONDS = 0.1


async def until_serving(server: Server, ends: Coroutine[Any, Any, str], seconds: float) -> str | None:
    """Ask ``server`` for its health until it is well; if it ends first, return what ``ends`` says.

    A request without an answer is made again: a server that has just begun to listen may never answer those before.
    Raises TimeoutError after ``seconds``, of which the text is what the last answer was, as "status 503".
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


async def brought_up(
    start: Callable[[], Awaitable[T]],
    *,
    name: str,
    most: int,
    made: Callable[[], int],
    again: Callable[[], Awaitable[None]],
    failed: Callable[[Exception], None],
    ended: Exception,
) -> T:
    """What ``start`` returns once it does not fail. While fewer than ``most`` restarts are ``made``, it is called
    after the seconds of `wait_before`; the log says each wait for the server called ``name``.

    ``ended`` says how the server ended. ``failed`` gets each failure of a start, and ``again`` is awaited before each
    restart, which it counts. Raises the last failure, and OutOfFiles immediately: the server is not its cause.
    """
    while (count := made()) < most:
        wait = wait_before(count)
        logger.warning("%s: restart %d of %d in %g s", name, count + 1, most, wait)
        await asyncio.sleep(wait)
        await again()
        try:
            return await start()
        except OutOfFiles:
            raise
        except (ConfigError, EngineError, OSError) as error:
            if isinstance(error, OSError) and (none_left := out_of_files(f"start of {name}", error)):
                raise none_left from error
            failed(error)
            ended = error
    raise ended


def wait_before(restart: int) -> float:
    """Seconds to wait before a restart, from 0; they double from half a second to a minute at most."""
    return min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(restart, 64))
