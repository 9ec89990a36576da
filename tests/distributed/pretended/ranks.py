"""Ranks on pretended GPUs: one process imports torch and megatron for all, and forks the ranks of each world."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from launcher.processes.environment import exit_with_parent
from tests.distributed.ranks import LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Ranks that call ``main(rank, *arguments)``."""

    main: Callable[..., None]
    size: int
    arguments: tuple[Any, ...] = ()


def run_worlds(worlds: Sequence[World], *, default: str = "cpu", before: Callable[[], None] | None = None) -> None:
    """Run one world after the other; fails if a rank does. ``default`` is that of ``learner.device``.

    ``before`` is called in the ranks' parent before megatron is imported. Later calls of this process with the same
    two have the same parent.
    """
    nurse = _nurse_of(default, before)
    codes: list[list[int]] | None = None
    try:
        nurse.connection.send((worlds, dict(os.environ)))
        if nurse.connection.poll(LIMIT + LIMIT * len(worlds) / 2):
            codes = nurse.connection.recv()
    finally:
        if codes != [[0] * world.size for world in worlds]:  # some of its ranks may still run
            nurse.process.kill()
            _nurse_of.cache_clear()
    assert codes == [[0] * world.size for world in worlds], (
        f"the ranks' exit statuses: {codes}; None: they have not ended"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nurse:
    process: SpawnProcess
    connection: Connection


@functools.cache
def _nurse_of(default: str, before: Callable[[], None] | None) -> _Nurse:
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=_nurse, args=(os.getpid(), theirs, default, before))
    process.start()
    atexit.register(process.kill)
    theirs.close()
    return _Nurse(process=process, connection=ours)


def set_default(device: str) -> None:
    """Make ``device`` the default of ``learner.device`` in this process."""
    from rl_megatron.config.sections.learner import LearnerSection

    LearnerSection.model_fields["device"].default = device
    LearnerSection.model_rebuild(force=True)


def _nurse(parent: int, connection: Connection, default: str, before: Callable[[], None] | None) -> None:
    """Has one thread, so that forks are sound."""
    exit_with_parent(parent)
    from tests.distributed.pretended import machine

    machine.install()
    if before is not None:
        before()
    import tests.imports  # noqa: F401

    set_default(default)
    fork = multiprocessing.get_context("fork")
    with contextlib.suppress(EOFError):
        while True:
            worlds, environment = connection.recv()
            os.environ.update(environment)
            codes = []
            for world in worlds:
                ranks = [fork.Process(target=_rank, args=(os.getpid(), world, rank)) for rank in range(world.size)]
                for rank in ranks:
                    rank.start()
                for rank in ranks:
                    rank.join()
                codes.append([rank.exitcode for rank in ranks])
                if any(codes[-1]):
                    break
            connection.send(codes)


def _rank(nurse: int, world: World, rank: int) -> None:
    exit_with_parent(nurse)
    world.main(rank, *world.arguments)
