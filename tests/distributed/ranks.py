"""Learner ranks in processes of their own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

LIMIT = 300.0  # seconds; an idle machine needs a tenth of it


def run_ranks(main: Callable[..., None], world_size: int, *arguments: Any) -> None:
    """Spawn ``main(rank, *arguments)`` for each rank and wait for all of them; fails where one does."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=main, args=(rank, *arguments)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LIMIT)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0] * world_size
