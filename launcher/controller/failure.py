"""Keeps the first failure of a run, which ends every wait for a rank."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

from launcher.controller.rank_process import RankProcess
from rl_megatron.errors import RLMegatronError
from rl_megatron.placement.names import LEARNER

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 1.0


class Failure:
    """Why the run cannot continue: the first error of any rank, but a killed rank before its peers' errors.

    A rank that dies breaks its peers' collectives, and their errors may arrive before the news of its end.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.known: asyncio.Future[None] = self._loop.create_future()
        self.known.add_done_callback(seen)
        self.rank: int | None = None  # the rank whose process failed, if one did
        self.role = LEARNER  # of that rank
        self._waits = self._claimed = False

    def claim(self) -> None:
        """Claim the diagnosis of a hang: later reports by others are noise."""
        self._claimed = True

    def report(
        self, error: RLMegatronError, *, at_once: bool, whose: RankProcess | None = None, claimed: bool = False
    ) -> None:
        """Record ``error``, at once or unless a better one arrives within a second."""
        if self._claimed and not claimed:
            logger.info("reported while the run hangs: %s", error)
        elif at_once:
            self._settle(error, whose)
        elif not self._waits:
            self._waits = True
            self._loop.call_later(_GRACE_SECONDS, partial(self._settle, error, whose, late=True))

    def _settle(self, error: RLMegatronError, whose: RankProcess | None, *, late: bool = False) -> None:
        if not self.known.done() and not (late and self._claimed):
            if whose is not None:
                self.role, self.rank = whose.role, whose.rank
            self.known.set_exception(error)


def seen(future: asyncio.Future[Any]) -> None:
    """Retrieve a future's exception, so that asyncio does not warn that nothing did."""
    if not future.cancelled():
        future.exception()
