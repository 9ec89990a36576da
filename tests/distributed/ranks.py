"""Learner ranks in separate processes, forked from one that has done their imports.

`FORKS` is what every test here starts processes from: its server, one for each pytest process, imports torch, megatron
and our learner once, 2 s of CPU time, and a fork of it takes milliseconds. It has one thread, so that forks are sound:
it runs no kernel and opens no group. What a test sets in ``os.environ`` does not reach it: hand it over as an argument.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

LIMIT = 300.0  # seconds; an idle machine needs a tenth of it
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.distributed.imports"])


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
    assert codes == [0] * world_size
