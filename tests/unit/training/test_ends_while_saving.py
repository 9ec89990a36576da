"""Runs that fail while a checkpoint is being written: which of them leave it, and whose error is told."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rl_megatron.errors import WorkerDied
from rl_megatron.interfaces import Learner
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.training import checkpoints
from rl_megatron.training.checkpoints import CheckpointStore, TrainerState
from rl_megatron.training.loop import Loop, Pace
from tests.savings import Shards


@dataclass
class Failing:
    """A job whose steps have the errors of ``errors``, by number, and whose learner is ``shards``."""

    errors: dict[int, Exception]
    shards: Shards = field(default_factory=Shards)
    first_step_is_saved: bool = False
    name: str = "failing"
    done: int = 0

    async def start(self, *, fresh: bool) -> None:
        """Nothing to prepare."""

    async def step(self, number: int, watch: Stopwatch) -> dict[str, Any]:
        if number in self.errors:
            raise self.errors[number]
        self.done = number
        return {"step": number}

    async def evaluate(self, watch: Stopwatch) -> dict[str, Any]:
        return {}

    def enough(self, row: object) -> bool:
        return False

    def state(self) -> TrainerState:
        return replace(TrainerState(step=0, prompts={"epoch": 0, "next": 8}, stream=None), step=self.done)

    def learners(self) -> dict[str, Learner]:
        return {"learner": cast(Learner, self.shards)}

    async def before_save(self) -> None:
        """Nothing is under way."""

    async def close(self) -> None:
        """Nothing goes on."""


def loop_of(job: Failing, folder: Path) -> Loop:
    return Loop(
        job=cast(Any, job),
        pace=Pace(steps=9, rows=1, evaluations=0, checkpoints=1),
        checkpoints=CheckpointStore(folder, keep=2, config={}),
        recorder=cast(Any, SimpleNamespace(write=lambda row: None)),
        stop=asyncio.Event(),
    )


def test_a_warm_start_is_on_the_disk_before_a_step_of_reinforcement(tmp_path: Path) -> None:
    job = Failing({1: WorkerDied("rank 1")}, first_step_is_saved=True)
    with pytest.raises(WorkerDied, match="rank 1"):
        asyncio.run(loop_of(job, tmp_path).run())
    assert checkpoints.latest(tmp_path) == tmp_path / "step_000000"
    assert checkpoints.read(tmp_path / "step_000000").state.step == 0
