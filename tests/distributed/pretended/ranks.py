"""Ranks on pretended GPUs: one process imports torch and megatron for all, and forks the ranks of each world."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.processes.parent import die_with
from tests.distributed.ranks import LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Ranks that call ``main(rank, *arguments)``."""

    main: Callable[..., None]
    size: int
    arguments: tuple[Any, ...] = ()


def run_worlds(worlds: Sequence[World], *, default: str = "cpu", before: Callable[[], None] | None = None) -> None:
    """Run one world after the other; fails if a rank does. ``default`` is that of ``learner.device``.

    ``before`` is called in the ranks' parent before megatron is imported.
    """
    nursery = multiprocessing.get_context("spawn").Process(target=_nurse, args=(os.getpid(), worlds, default, before))
    nursery.start()
    try:
        nursery.join(LIMIT + LIMIT * len(worlds) / 2)
        code = nursery.exitcode
    finally:
        nursery.kill()
    assert code == 0


def set_default(device: str) -> None:
    """Make ``device`` the default of ``learner.device`` in this process."""
    from rl_megatron.config.sections.learner import LearnerSection

    LearnerSection.model_fields["device"].default = device
    LearnerSection.model_rebuild(force=True)


def _nurse(parent: int, worlds: Sequence[World], default: str, before: Callable[[], None] | None) -> None:
    """Has one thread, so that forks are sound."""
    die_with(parent)
    from tests.distributed.pretended import machine

    machine.install()
    if before is not None:
        before()
    import tests.imports  # noqa: F401

    set_default(default)
    fork = multiprocessing.get_context("fork")
    for world in worlds:
        ranks = [fork.Process(target=_rank, args=(os.getpid(), world, rank)) for rank in range(world.size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert [rank.exitcode for rank in ranks] == [0] * world.size


def _rank(nurse: int, world: World, rank: int) -> None:
    die_with(nurse)
    world.main(rank, *world.arguments)
