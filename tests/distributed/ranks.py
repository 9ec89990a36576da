"""Learner ranks in separate processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.forks import FORKS

LIMIT = 1200.0  # seconds; an idle machine needs at most 40, one with a load of 30 more than 500


def run_ranks(main: Callable[..., None], world_size: int, *arguments: Any) -> None:
    """Fork ``main(rank, *arguments)`` for each rank and wait for all of them; fails if one does."""
    ranks = [FORKS.Process(target=main, args=(rank, *arguments)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LIMIT)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0] * world_size, f"the ranks' exit statuses are {codes}; None has not ended in {LIMIT:.0f} s"
